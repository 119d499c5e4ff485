"""Results against eager's, in type, size, strides and value; float64 says who is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from stator.debug.minify.failure import Failure
from stator.debug.minify.record import fresh
from stator.torch_api import pytree

_WIDE: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_NARROWING: Final = ("float", "half", "bfloat16")  # methods, for which float64 has `double`
# How far a value may be off, relative to the largest beside it, beyond what eager itself is.
TOLERANCES: Final = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
FLOAT32: Final = 1e-4
OF_EAGER: Final = 10.0  # times eager's own error are allowed
ROUNDINGS: Final = 8.0  # of the largest number in the graph: what differences of equals consist of
UNSURE: Final = 0.01  # where eager is that far from float64, float64 went another way


def compare(
    ours: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any] | None, largest: float
) -> list[Failure]:
    """Everything in which results differ from eager's, each kind once.

    `largest` is the largest number that was computed on the way.
    """
    if len(ours) != len(eager):
        return [Failure("size", detail=f"{len(ours)} results, {len(eager)} in eager mode")]
    found: dict[str, Failure] = {}
    references = exact if exact is not None and len(exact) == len(eager) else eager
    for number, (one, other, reference) in enumerate(zip(ours, eager, references, strict=True)):
        for failure in _differences(one, other, reference, largest):
            named = replace(failure, detail=f"result {number} {failure.detail}")
            found.setdefault(failure.kind, named)
    return list(found.values())


def _differences(ours: Any, eager: Any, exact: Any, largest: float) -> Iterator[Failure]:
    if not isinstance(ours, torch.Tensor) or not isinstance(eager, torch.Tensor):
        if type(ours) is not type(eager) or (ours is not eager and ours != eager):
            yield Failure("accuracy", detail=f"is {ours!r}, in eager mode {eager!r}")
        return
    if ours.dtype != eager.dtype:
        yield Failure("dtype", detail=f"is {ours.dtype}, in eager mode {eager.dtype}")
    if ours.shape != eager.shape:
        sizes = f"is {list(ours.shape)}, in eager mode {list(eager.shape)}"
        yield Failure("size", detail=sizes)
        return
    if _strides(ours) != _strides(eager):
        detail = f"has strides {ours.stride()}, in eager mode {eager.stride()}"
        yield Failure("stride", detail=detail)
    if ours.dtype == eager.dtype and (words := _error(ours, eager, exact, largest)):
        yield Failure("accuracy", detail=words)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides along dimensions where they matter."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return []
    return [s for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1]


def _error(ours: torch.Tensor, eager: torch.Tensor, exact: Any, largest: float) -> str | None:
    """In words, how far a result is off; None if it is as good as eager's."""
    if ours.layout is not torch.strided:
        ours, eager, exact = ours.to_dense(), eager.to_dense(), None
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = int((ours != eager).sum())
        return f"differs in {wrong} of {ours.numel()} elements" if wrong else None
    wide = _WIDE.get(eager.dtype, eager.dtype)
    one, other = ours.detach().to(wide), eager.detach().to(wide)
    if not torch.equal(one.isnan(), other.isnan()) or not _same_infinities(one, other):
        return "is not finite where eager's is, or the other way round"
    finite = other.isfinite()
    if not finite.any():
        return None
    one, other = one[finite], other[finite]
    scale = float(other.abs().max())
    rounding = ROUNDINGS * torch.finfo(eager.dtype).eps * largest
    tolerance = TOLERANCES.get(eager.dtype, FLOAT32) * scale + rounding
    off = float((one - other).abs().max())
    if off <= tolerance:
        return None
    if isinstance(exact, torch.Tensor) and exact.shape == eager.shape:
        right = exact.detach().to(wide)[finite]
        eagers = float((other - right).abs().max())
        if eagers <= UNSURE * scale:
            off, tolerance = float((one - right).abs().max()), tolerance + OF_EAGER * eagers
    return f"is off by {off:.3g}, where {tolerance:.3g} is allowed" if off > tolerance else None


def _same_infinities(one: torch.Tensor, other: torch.Tensor) -> bool:
    infinite = other.isinf()
    same = torch.equal(one.isinf(), infinite) and torch.equal(one[infinite], other[infinite])
    return bool(same)


def largest_number(module: fx.GraphModule, inputs: Sequence[Any]) -> float:
    """The largest finite number that a graph reads or computes in eager mode."""
    found = [0.0]

    class Looking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            for value in pytree.tree_leaves(result):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                    largest = value.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()
                    found[0] = max(found[0], float(largest))
            return result

    Looking(module).run(*fresh(inputs))
    return found[0]


def exact_results(module: fx.GraphModule, run: Any, inputs: Sequence[Any]) -> Any:
    """What `run(function, inputs)` gives of the graph in float64; None if it does not run there."""
    wide = [_widened(value) for value in fresh(inputs)]
    try:
        return run(_Wide(module).run, wide)
    except Exception:  # an operator of single precision alone: eager is the measure then
        return None


class _Wide(fx.Interpreter):
    """Runs a graph in float64, whatever types it asks for."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result if n.op == "placeholder" else pytree.tree_map(_widened, result)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map(_wide_type, (args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method("double" if target in _NARROWING else target, args, kwargs)


def _wide_type(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return value
    leaf = value.requires_grad and value.grad_fn is None
    wide = value.to(_WIDE[value.dtype])
    return wide.detach().requires_grad_(True) if leaf else wide
