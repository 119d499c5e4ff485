"""Calls of pointwise operators that break formulas, and the judgement of their results.

Cases come from the operator's own schema: tensors of every type that eager takes, broadcast
against each other so that all pairs of values meet, and numbers from a list for each argument's
name.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

aten = torch.ops.aten

DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
# Types that eager promotes, and whether the second tensor has dimensions.
MIXED: Final = (
    (torch.float32, torch.int64, True),
    (torch.int32, torch.float32, True),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.bfloat16, True),
    (torch.uint8, torch.int8, True),
    (torch.uint8, torch.int32, True),
    (torch.bool, torch.float64, True),
    (torch.int64, torch.bool, True),
    (torch.float32, torch.float64, False),
    (torch.int32, torch.float32, False),
    (torch.bfloat16, torch.float32, False),
    (torch.uint8, torch.int64, False),
)

CONDITIONS: Final = ("condition", "mask")
REFUSALS: Final = (RuntimeError, ValueError, TypeError, OverflowError)  # what eager raises

# Before torch 2.13, eager pays no heed to NaN where it is the only bound.
NAN_BOUND: Final = (math.nan,) if torch.__version__ >= (2, 13) else ()

# Values for each argument that is not a tensor; several of one operator are combined.
NUMBERS: Final[dict[str, tuple[Any, ...]]] = {
    "alpha": (1, 3, -0.5, 0.1),
    "approximate": ("none", "tanh"),
    "beta": (1, 2.0),
    "decimals": (0, 2, -1),
    "eps": (None, 0.125, 0.0),
    "exponent": (0, 1, 2, 3, 5, 0.1, 0.5, -0.5, -1, -2, -3, 1.7, math.inf, math.nan, True),
    "input_scale": (1, 0.5),
    "is_result": (False, True),
    "lambd": (0.5, 3, 0.0, 0.1),
    "max": (2, None, 0.5, *NAN_BOUND, 0.1),
    "max_val": (1, 2.5),
    "min": (-1, None, 0, 1.5, -0.1),
    "min_val": (-1, -0.25),
    "nan": (None, 0.5),
    "negative_slope": (0.01, 0.25),
    "neginf": (None, -3.0),
    "other": (
        3,
        -3,
        0,
        7,
        -8,
        70,
        300,
        0.1,
        0.375,
        1e-3,
        1e30,
        -0.75,
        True,
        math.inf,
        -math.inf,
        math.nan,
    ),
    "posinf": (None, 4.0),
    "rounding_mode": (None, "trunc", "floor"),
    "scale": (1, 1.25),
    "self": (2, 1, 0, 3, -2, 0.1, 0.375, True, math.inf, math.nan),
    "self_is_result": (False, True),
    "threshold": (20, 0, 0.5, 0.1),
    "value": (1, 2, -0.5, 0.1, math.inf),
    "weight": (0.0, 0.3, 0.5, 0.9, 1, -2.5),
}

# Units in the last place, where two are not enough.
SLACK: Final = {
    # Eager divides by six with a constant of f32.
    (aten.hardsigmoid_backward.default, torch.float64): 2.0**29,
    # Eager subtracts a square from one, which cancels.
    (aten.mish_backward.default, torch.float64): 16,
    # Two terms of opposite sign: what is left has the error of the larger one.
    (aten.logaddexp.default, torch.float32): 64,
    (aten.logaddexp2.default, torch.float32): 64,
    (aten.gelu_backward.default, torch.float32): 4,
}
# Where eager's NaN comes of inf * 0, and ours is the limit.
DEFINED_AT_INFINITY: Final = {aten.mish_backward.default}
# Of 0.0 and -0.0, eager's vectors take the second and its other code the first.
TAKES_EITHER_ZERO: Final = {
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
    aten.clamp.Tensor,
}


# ---------------------------------------------------------------------------------------------
# Values


def values_of(dtype: torch.dtype, count: int) -> Tensor:
    """`count` values: those where formulas break, then random ones.

    The count should fill whole vectors: what is left over, eager computes in another way.
    """
    random = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.arange(count) % 2 == 1
    if dtype.is_floating_point:
        hard = torch.tensor(_hard_floats(dtype), dtype=torch.float64)
        scales = torch.logspace(-3, 2, 8, dtype=torch.float64).repeat(count)[:count]
        drawn = torch.randn(count, generator=random, dtype=torch.float64) * scales
    else:
        hard = torch.tensor(_hard_integers(dtype))
        drawn = torch.randint(-(2**40), 2**40, (count,), generator=random)
    if count < len(hard):
        hard = hard[:: len(hard) // count + 1]
    return torch.cat([hard, drawn])[:count].to(dtype)


def _hard_floats(dtype: torch.dtype) -> list[float]:
    # No wider type could tell who is right when f64 overflows, so it gets the extremes of f32.
    info = torch.finfo(torch.float32 if dtype is torch.float64 else dtype)
    positive = [0.0, info.smallest_normal * info.eps, info.smallest_normal, info.eps, 1e-4, 0.1]
    positive += [0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0, 20.0, 20.5, 40.0, 88.0, 104.0]
    positive += [1e4, 3e10, info.max, math.inf]
    return [math.nan, *positive, *(-value for value in positive)]


def _hard_integers(dtype: torch.dtype) -> list[int]:
    info = torch.iinfo(dtype)
    hard = [info.min, info.min + 1, -100, -8, -3, -2, -1, 0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 100]
    return [value for value in [*hard, info.max - 1, info.max] if info.min <= value <= info.max]


# ---------------------------------------------------------------------------------------------
# Cases


@dataclass(frozen=True)
class Case:
    """One call of an operator."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int = 0  # which of several results is judged

    def on(self, convert: Any) -> Case:
        """The same call, every tensor converted; those that only choose are left alone."""
        return Case(
            self.target,
            tuple(convert(arg) if isinstance(arg, Tensor) else arg for arg in self.args),
            self.kwargs,
            self.output,
        )

    @property
    def is_mixed(self) -> bool:
        """Whether its tensors have several types, conditions apart."""
        names = [arg.name for arg in self.target._schema.arguments]
        types = {
            arg.dtype
            for name, arg in zip(names, self.args, strict=False)
            if isinstance(arg, Tensor) and name not in CONDITIONS
        }
        return len(types) > 1

    def run(self) -> Any:
        """Eager's result or results."""
        return self.target(*self.args, **self.kwargs)

    def result(self) -> Tensor:
        """The result of eager that is judged."""
        results = self.run()
        return results if isinstance(results, Tensor) else results[self.output]

    def scale(self) -> Tensor:
        """For each element of the result, its largest finite argument."""
        sizes = [
            arg.double().abs().nan_to_num(0.0, posinf=0.0)
            for arg in self.args
            if isinstance(arg, Tensor)
        ]
        return functools.reduce(torch.maximum, sizes)

    def __str__(self) -> str:
        shown = [
            f"{arg.dtype}{list(arg.shape)}" if isinstance(arg, Tensor) else repr(arg)
            for arg in self.args
        ]
        return ", ".join([*shown, *(f"{name}={value!r}" for name, value in self.kwargs.items())])


def cases_of(target: Any) -> Iterator[Case]:
    """Calls with every type, mixed types, and every combination of numbers."""
    arguments = target._schema.arguments
    tensors = {arg.name: str(arg.type) for arg in arguments if "Tensor" in str(arg.type)}
    numbers = [
        [(arg.name, value) for value in NUMBERS[arg.name]]
        for arg in arguments
        if arg.name not in tensors
    ]
    for inputs in inputs_of(tensors):
        for chosen in itertools.product(*numbers):
            given = inputs | dict(chosen)
            yield Case(
                target,
                tuple(given[arg.name] for arg in arguments if not arg.kwarg_only),
                {arg.name: given[arg.name] for arg in arguments if arg.kwarg_only},
            )


def inputs_of(tensors: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The tensors of a call, by name: of one type, of two, and with the optional ones left out."""
    promoted = [name for name in tensors if name not in CONDITIONS]
    for dtype in DTYPES:
        inputs = spread(dict.fromkeys(promoted, dtype), tensors)
        yield inputs
        for name, kind in tensors.items():
            if kind.startswith("Optional"):
                yield inputs | {name: None}
    if len(promoted) < 2:
        return
    *rest, last = promoted
    for first, second, has_size in MIXED:
        inputs = spread(dict.fromkeys(rest, first) | {last: second}, tensors)
        one = inputs[last].flatten()[13:14].squeeze()  # a number that every float type holds
        yield inputs if has_size else inputs | {last: one}


def spread(dtypes: Mapping[str, torch.dtype], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors shaped so that broadcasting makes all their values meet."""
    rank = len(tuple(names))
    inputs = {}
    for position, name in enumerate(names):
        values = values_of(dtypes.get(name, torch.bool), count={1: 512, 2: 64}.get(rank, 16))
        if name == "value":  # of masked_fill: without dimensions
            inputs[name] = values[-1]
        else:
            inputs[name] = values.reshape([-1 if d == position else 1 for d in range(rank)])
    return inputs


# ---------------------------------------------------------------------------------------------
# Judgement


def is_as_good(case: Case, ours: Tensor, eager: Tensor, exact: Tensor) -> Tensor:
    """Where our result is as good as eager's; `exact` is eager's result in f64."""
    if not eager.is_floating_point():
        return ours == eager
    narrow = exact.to(eager.dtype)
    exact = torch.where(narrow.isinf(), narrow.double(), exact)
    is_same = (ours == eager) | (ours.isnan() & (eager.isnan() | exact.isnan())) | (ours == exact)
    if case.target in DEFINED_AT_INFINITY:
        is_same |= eager.isnan() & exact.isnan()
    is_other_zero = (ours == 0) & (eager == 0) & (ours.signbit() != eager.signbit())
    is_other_zero &= eager.signbit() == exact.signbit()  # else eager's own sign is an accident
    is_other_zero &= case.target not in TAKES_EITHER_ZERO
    eager_error = (eager.double() - exact).abs().nan_to_num(math.inf)
    # Of two results in f64 there is no telling which one is better: let them differ by as much as
    # rounding the arguments would make them.
    size = exact.abs().maximum(case.scale()) if eager.dtype is torch.float64 else exact
    slack = SLACK.get((case.target, eager.dtype), 2) * unit_in_the_last_place(size, eager.dtype)
    is_near = (ours.double() - exact).abs() <= 2 * eager_error + slack
    return (is_same | is_near) & ~is_other_zero


def unit_in_the_last_place(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of the number in a float type."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)
    return (2.0 ** (exponent.double() - 1)).clamp(min=info.smallest_normal) * info.eps


def require_as_good(case: Case, ours: Tensor, eager: Tensor) -> None:
    """Fail where neither way in which eager computes an element is matched."""
    is_float = eager.is_floating_point()
    exact = case.on(widened).result() if is_float else eager
    is_good = is_as_good(case, ours, eager, exact)
    if not is_good.all() and is_float:
        # Eager's vector code and its scalar code disagree on NaN and zeros here and there.
        strided = case.on(lambda tensor: apart(tensor, eager.shape))
        is_good |= is_as_good(case, ours, strided.result(), strided.on(widened).result())
    if not is_good.all():
        at = tuple((~is_good).nonzero()[0].tolist())
        results = {"ours": ours[at], "eager": eager[at], "f64": exact[at]}
        shown = ", ".join(f"{name} {result.item()!r}" for name, result in results.items())
        pytest.fail(f"{case}: {int((~is_good).sum())} wrong, at {list(at)}: {shown}")


def widened(tensor: Tensor) -> Tensor:
    """The same values in f64; conditions stay as they are."""
    return (
        tensor
        if tensor.dtype is torch.bool
        else torch.empty_like(tensor, dtype=torch.float64).copy_(tensor)
    )


def apart(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The same values with gaps between them: eager does not vectorise over such memory."""
    if tensor.ndim == 0:
        return tensor
    wide = torch.empty([*shape, 2], dtype=tensor.dtype)[..., 0]
    return wide.copy_(tensor)
