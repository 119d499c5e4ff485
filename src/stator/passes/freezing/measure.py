"""Which of several ways to compute something is the fastest here: measured, once a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import torch
from torch import fx

from stator.torch_api import size_hint, unset_fake_temporarily

ROUNDS: Final = 9
LEAST_GAIN: Final = 0.05  # of the time of the first way: less is noise
ENOUGH: Final = 0.008  # seconds for one way, beyond the second call

Ways = Mapping[str, Callable[[], object]]

_verdicts: dict[Hashable, tuple[str, dict[str, float]]] = {}


def fastest(key: Hashable, make: Callable[[], Ways]) -> tuple[str, dict[str, float]]:
    """The name of the fastest way, and the seconds of each.

    `make` prepares the ways, the one to be expected first: another has to gain.  They are called in
    turn, and the best time counts, so that a busy machine does not decide; one that raises is none.
    """
    if key not in _verdicts:
        with unset_fake_temporarily(), torch.no_grad(), torch.inference_mode(False):
            _verdicts[key] = _measured(make())
    return _verdicts[key]


def in_words(seconds: Mapping[str, float]) -> str:
    """How long each way took."""
    return ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())


def kind_of(source: fx.Node | None) -> Any:
    """Type, sizes and strides, as far as they are known: what the time of a call depends on."""
    if source is None:
        return None
    value = source.meta["val"]
    return value.dtype, *(tuple(map(_hint, ns)) for ns in (value.size(), value.stride()))


def _hint(number: int | torch.SymInt) -> int | None:
    return number if isinstance(number, int) else size_hint(number)


def example(source: fx.Node | None) -> Any:
    """A tensor like the one that the node stands for, to measure with."""
    if source is None:
        return None
    dtype, size, stride = kind_of(source)
    return torch.empty_strided(size, stride, dtype=dtype).fill_(0.5)


def _measured(ways: Ways) -> tuple[str, dict[str, float]]:
    seconds = {name: float("inf") for name in ways}
    working = {}
    for name, call in ways.items():  # the first call warms up, and shows whether it works
        try:
            call()
        except RuntimeError:
            continue
        working[name] = call
    spent = dict.fromkeys(working, 0.0)
    for _ in range(ROUNDS):
        for name, call in working.items():
            if spent[name] < ENOUGH:
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
                spent[name] += took
                seconds[name] = min(seconds[name], took)
    first, *_ = working
    best = min(seconds, key=seconds.__getitem__)
    gains = seconds[best] < (1 - LEAST_GAIN) * seconds[first]
    return best if gains else first, seconds
