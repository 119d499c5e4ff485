"""Try a package out: inputs made up from what it tells of itself, and how long calls take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stator.torch_api import pytree

_INTEGERS: Final = ("uint8", "int8", "int16", "int32", "int64")


def made_up_inputs(
    model: Any, given: Sequence[torch.Tensor] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that fit a loaded package: normal numbers, or zeros where it takes integers.

    A size that may vary is its least, or 2 if it may be that.  `given`: its tensors, all of them.
    """
    wanted = model.manifest["inputs"]
    if given and len(given) != len(wanted):
        raise ValueError(f"{len(given)} tensors are given, and the program takes {len(wanted)}")
    tensors = iter(given or [_made_up(told) for told in wanted])
    spec = pytree.treespec_loads(model.manifest["in_spec"])
    fixed = iter(model.manifest["arguments"])
    leaves = [next(tensors) if value == ["tensor"] else value[1] for value in fixed]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(args), dict(kwargs)


def _made_up(told: dict[str, Any]) -> torch.Tensor:
    known: dict[str, int] = {}
    size = []
    for one in told["size"]:
        if isinstance(one, int):
            size.append(one)
        else:
            text, low, high = one
            known.setdefault(text, min(max(2, low), high))
            size.append(known[text])
    dtype, device = getattr(torch, told["dtype"]), told.get("device", "cpu")
    if told["dtype"] in _INTEGERS or dtype is torch.bool:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.randn(size).to(device, dtype)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of calls."""

    first: float
    calls: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.calls)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Where the middle half begins and ends."""
        low, _, high = statistics.quantiles(self.calls, n=4)
        return low, high


def timed(call: Callable[[], Any], seconds: float, tick: Callable[[float], None]) -> Timed:
    """Call for some seconds; `tick` hears what share of them is over."""
    first = _one(call)
    calls: list[float] = []
    start = time.perf_counter()
    while len(calls) < 3 or time.perf_counter() - start < seconds:
        calls.append(_one(call))
        tick(min(1.0, (time.perf_counter() - start) / max(seconds, 1e-9)))
    return Timed(first, tuple(calls))


def _one(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sizes_shown(size: Sequence[Any]) -> str:
    """Sizes for people: `2 x s0 (1 to 64)`."""
    shown = [
        str(one) if isinstance(one, int) else f"{one[0]} ({one[1]} to {_most(one[2])})"
        for one in size
    ]
    return " x ".join(shown) or "a number"


def _most(high: int) -> str:
    return "any" if high >= 2**62 else str(high)
