"""Compile a graph, run it, and say what is wrong with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from stator.backend import compile_fx
from stator.debug.minify.case import Case
from stator.debug.minify.compare import compare, exact_results, largest_number
from stator.debug.minify.failure import Failure, crash
from stator.debug.minify.record import fresh
from stator.torch_api import NEEDS_VALUES, FakeTensorMode, ShapeEnv, is_random_op, pytree

SEED: Final = 20240607

Run = Callable[[Callable[..., Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class How:
    """In which way graphs are compiled."""

    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False  # sizes are symbols

    def with_options(self, **more: Any) -> How:
        """The same way with further options."""
        return replace(self, options={**self.options, **more})


def judge(case: Case, how: How) -> list[Failure]:
    """What is wrong with a graph as Stator compiles it; nothing if eager does not run it."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        eager = _attempt(torch.fx.Interpreter(case.module).run, case.inputs)
        if isinstance(eager, Failure):
            return []
        options = {**how.options, "strict": True, "cache": False}
        if any(is_random_op(node.target) for node in case.calls):
            options["fallback_random"] = True  # eager's own numbers, which can be compared
        try:
            compiled = compile_fx(case.module, _examples(case, how), options=options)
        except Exception as error:
            needs_values = isinstance(error.__cause__, NEEDS_VALUES)
            return [] if needs_values else [crash(error)]  # Dynamo would break the graph there
        ours = _attempt(compiled, case.inputs)
        if isinstance(ours, Failure):
            return [ours]
        if _identical(ours, eager):
            return []
        exact = exact_results(case.module, _results, case.inputs)
        return compare(ours, eager, exact, largest_number(case.module, case.inputs))


def class_of(case: Case, how: How) -> Failure | None:
    """The first thing that is wrong, and whether symbolic sizes alone make it so."""
    found = judge(case, how)
    if not found:
        return None
    if how.dynamic and found[0] not in judge(case, replace(how, dynamic=False)):
        return replace(found[0], dynamic=True)
    return found[0]


def shows(case: Case, how: How, failure: Failure) -> bool:
    """Whether a graph fails in the same way."""
    plain = replace(failure, dynamic=False)
    if plain not in judge(case, how):
        return False
    return not failure.dynamic or plain not in judge(case, replace(how, dynamic=False))


def _attempt(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any] | Failure:
    try:
        return _results(function, fresh(inputs))
    except Exception as error:
        return crash(error)


def _results(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """What a program returns, what it wrote to its inputs, and their gradients."""
    torch.manual_seed(SEED)
    before = [value.detach().clone() if _is_tensor(value) else None for value in inputs]
    leaves = [value for value in inputs if _is_tensor(value) and value.requires_grad]
    results = pytree.tree_leaves(function(*inputs))
    torch.manual_seed(SEED)
    differentiable = [value for value in results if _is_tensor(value) and value.requires_grad]
    found = list(results)
    if leaves and differentiable:
        tangents = [_tangent(value) for value in differentiable]
        found += torch.autograd.grad(differentiable, leaves, tangents, allow_unused=True)
    for value, was in zip(inputs, before, strict=True):
        written = was is not None and not _same_bits(value.detach(), was)
        found.append(value if written else None)
    return found


def _tangent(value: torch.Tensor) -> torch.Tensor:
    """A gradient to start from; the same numbers in float64."""
    return torch.randn(value.shape, dtype=torch.float32).to(value.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(7), other.nan_to_num(7)))


def _identical(ours: Sequence[Any], eager: Sequence[Any]) -> bool:
    """Whether nothing differs at all, which is quickly seen."""
    return len(ours) == len(eager) and all(map(_alike, ours, eager))


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (one is other or bool(one == other))
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return bool(torch.equal(one, other))


def _examples(case: Case, how: How) -> list[Any]:
    """Inputs as the compiler is shown them."""
    if not how.dynamic:
        return list(case.inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return [_symbolic(value, mode) for value in case.inputs]


def _symbolic(value: Any, mode: Any) -> Any:
    """A fake twin all of whose sizes are symbols; equal sizes are one symbol."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=False)
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return mode.from_tensor(torch.empty(value, device="meta"), static_shapes=False).size(0)
    return value
