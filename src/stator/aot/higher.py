"""Gradients as a program of their own: what is differentiated when derivatives go on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from stator.aot.metadata import Mutation, Program, TangentPlan
from stator.aot.subclasses import Wrapped, put_together, width
from stator.core.torch_types import Flat
from stator.torch_api import autocast_off, view_base


@dataclass(frozen=True, slots=True)
class GradientProgram:
    """Runs a program again and differentiates it, leaving a history behind.

    The backward graph would not do: autograd has other formulas where it is asked for more than one
    derivative, and its graph no longer tells a detached value from a saved one.
    """

    function: Flat
    program: Program
    autocast: tuple[tuple[str, torch.dtype], ...]  # that was on when the program was traced

    def without(self, missing: tuple[bool, ...]) -> Flat:
        """The program for one set of tangents: all inputs, then the tangents that are there."""

        def gradients(*arguments: Any) -> list[Any]:
            primals = arguments[: len(self.program.inputs)]
            return self._gradients(primals, arguments[len(primals) :], missing)

        return gradients

    def _gradients(
        self, primals: Sequence[Any], tangents: Sequence[Any], missing: tuple[bool, ...]
    ) -> list[Any]:
        with torch.enable_grad():
            values = self._values(primals)
            pairs = zip(self.program.tangents, values, missing, strict=True)
            present = [(plan, value) for plan, value, absent in pairs if not absent]
            outputs = [value for _, value in present]
            plans = [plan for plan, _ in present]
            given = [settled(t, plan) for t, plan in zip(tangents, plans, strict=True)]
            wanted = [i for i, layout in enumerate(self.program.grads) if layout is not None]
            with autocast_off():
                found = torch.autograd.grad(
                    outputs,
                    [primals[i] for i in wanted],
                    given,
                    create_graph=True,
                    allow_unused=True,
                )
        grads: list[Any] = [None] * len(primals)
        for index, grad in zip(wanted, found, strict=True):
            grads[index] = grad
        return grads

    def _values(self, primals: Sequence[Any]) -> list[Any]:
        """The differentiable values of the program, from a new run."""
        arguments = [
            primal if fact.mutation is Mutation.NONE else primal.clone()
            for primal, fact in zip(primals, self.program.inputs, strict=True)
        ]
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            outputs = self.function(*arguments)
        values = []
        for value in self.program.values:
            if not value.differentiable:
                continue
            if value.of_input is not None:
                values.append(arguments[value.of_input])
                continue
            assert value.of_output is not None, "a differentiable value has an origin"
            output = outputs[value.of_output]
            base = view_base(output) if value.is_base else None
            values.append(output if base is None else base)
        return values


def settled(tangent: torch.Tensor, plan: TangentPlan) -> torch.Tensor:
    """The tangent, in the memory layout that the backward was traced with."""
    if plan.stride is not None and tangent.stride() == plan.stride:
        return tangent
    if isinstance(plan.layout, Wrapped):
        return _coerced(tangent, plan.layout)
    if plan.stride is None:
        format_ = torch.channels_last if plan.channels_last else torch.contiguous_format
        return tangent.contiguous(memory_format=format_)
    fresh = torch.empty_strided(
        tangent.size(), plan.stride, dtype=tangent.dtype, device=tangent.device
    )
    return fresh.copy_(tangent)


def _coerced(tangent: Any, layout: Wrapped) -> Any:
    """A subclass tangent with the metadata that was planned (a placement, say)."""
    same = type(tangent) is layout.cls
    if same and tangent.__tensor_flatten__()[1] == layout.context:
        return tangent
    coerce = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
    found = tangent
    if coerce is not None:
        found = coerce(layout.context) if same else coerce(layout.context, layout.cls)
    if type(found) is not layout.cls:
        raise RuntimeError(
            f"a tangent is a {type(tangent).__name__} where the backward was compiled for a "
            f"{layout.cls.__name__}; convert the gradient before it reaches the compiled function"
        )
    return found


def by_input(program: Program, grads: Sequence[Any]) -> list[Any]:
    """Gradients put together, one for each input; None where there is none."""
    stream = iter(grads)
    found: list[Any] = []
    for layout in program.grads:
        if layout is None:
            found.append(None)
            continue
        parts = [next(stream) for _ in range(width(layout))]
        missing = all(part is None for part in parts)
        found.append(None if missing else put_together(layout, iter(parts)))
    return found
