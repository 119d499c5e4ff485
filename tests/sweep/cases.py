"""Which cases there are: operators, dtypes, directions and samples from torch's database."""

from __future__ import annotations

import functools
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
FORWARD: Final = "forward"
BACKWARD: Final = "backward"


@dataclass(frozen=True, slots=True)
class Unit:
    """One operator, dtype and direction; its cases are the samples chosen for it."""

    op: str
    dtype: str
    direction: str
    in_place: bool = False

    def __str__(self) -> str:
        suffix = " in place" if self.in_place else ""
        return f"{self.op}{suffix} {self.dtype} {self.direction}"

    @property
    def seed(self) -> int:
        """The same numbers for a unit in every process and in every run."""
        return zlib.crc32(str(self).encode())

    @property
    def info(self) -> Any:
        """Torch's description of the operator (an OpInfo)."""
        return operators()[self.op]

    @property
    def gives_any_values(self) -> bool:
        """Whether its results are memory that nobody filled; torch 2.11 does not say so itself."""
        return bool(getattr(self.info, "has_nondeterministic_output", "empty" in self.op))

    @property
    def function(self) -> Callable[..., Any]:
        """What is compiled: the operator itself or its in-place method."""
        function: Callable[..., Any] = (
            self.info.get_inplace() if self.in_place else self.info.get_op()
        )
        return function


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a unit that are run, by their number, and how many there were to choose."""

    chosen: tuple[tuple[int, Any], ...]
    available: int


class NoSamplesError(Exception):
    """Torch's database raised instead of making samples."""


def _call_without_reseeding(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


@functools.cache
def operators() -> dict[str, Any]:
    """Torch's operator database by name."""
    # Random operators are wrapped there to save and restore the generator's state, which breaks
    # the graph and hides the operator from the compiler. The judge seeds before each run.
    database.wrapper_set_seed = _call_without_reseeding
    return {info.full_name: info for info in database.op_db}


def units(
    patterns: Sequence[str] = ("*",),
    dtypes: Sequence[str] = tuple(DTYPES),
    in_place: bool = False,
    device: str = "cpu",
) -> list[Unit]:
    """Every unit whose operator matches a pattern, in an order that mixes dear and cheap ones."""
    found = [
        Unit(name, dtype, direction, changes)
        for name, info in operators().items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for dtype in dtypes
        for changes in ((False, True) if in_place and info.get_inplace() else (False,))
        for direction in _directions(info, DTYPES[dtype], changes, device)
    ]
    return sorted(found, key=lambda unit: unit.seed)  # so that an estimate of the rest holds


def _directions(info: Any, dtype: torch.dtype, in_place: bool, device: str) -> Iterator[str]:
    if dtype in info.supported_dtypes(device):
        yield FORWARD
        differentiable = info.supports_inplace_autograd if in_place else info.supports_autograd
        if differentiable and dtype in info.supported_backward_dtypes(device):
            yield BACKWARD


def samples(unit: Unit, cap: int, device: str = "cpu") -> Samples:
    """At most `cap` samples of a unit; raises NoSamplesError where the database fails."""
    make = functools.partial(unit.info.sample_inputs, device, DTYPES[unit.dtype])
    _seed_all(unit.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database uses what torch has deprecated
        try:
            made = list(make(requires_grad=unit.direction == BACKWARD))
        except Exception as error:  # foreign code: it may raise anything
            raise NoSamplesError(repr(error)[:300]) from error
    chosen = tuple((index, made[index]) for index in spread(len(made), cap))
    return Samples(chosen, len(made))


def spread(count: int, cap: int) -> list[int]:
    """Up to `cap` of `count` positions: the first, the last, and evenly between."""
    if count <= cap:
        return list(range(count))
    if cap == 1:
        return [0]
    return [round(step * (count - 1) / (cap - 1)) for step in range(cap)]


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # the database draws from numpy's global generator
    random.seed(seed)
