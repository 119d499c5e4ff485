"""Operators that write to their arguments, as graphs hold them: functions of old values.

The trace wraps such an operator of a user's: it copies what is written, runs the operator on the
copies and returns them.  `written` does the same, but copies only where somebody else reads the
old value.  Libraries add a product to a tensor right where that lies: `onto` says which operator
does so in the place of one that makes a new tensor, if nobody reads the old one any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from stator.ops.libraries import (
    int8_convolution_onto,
    int8_linear_onto,
    onednn_convolution_onto,
    onednn_convolution_plus,
)
from stator.torch_api import run_on_copies

ADDED: Final = 6  # the place of the tensor that a convolution or product of integers is added to


def written(operator: Any, copied: Sequence[int], /, **arguments: Any) -> tuple[Any, ...]:
    """Run `operator`; of the tensors that it writes to, those at `copied` are copied first.

    Returns what the operator returns, then what it wrote.
    """
    return run_on_copies(operator, tuple(copied), arguments)


def int8_convolution_plus(*arguments: Any) -> Tensor:
    """A convolution of integers, added to a copy of a tensor of integers."""
    given = list(arguments)
    given[ADDED] = given[ADDED].clone()
    made: Tensor = int8_convolution_onto()(*given)
    return made


def int8_linear_plus(*arguments: Any) -> Tensor:
    """A product of integers, added to a copy of a tensor of integers."""
    given = list(arguments)
    given[ADDED] = given[ADDED].clone()
    made: Tensor = int8_linear_onto()(*given)
    return made


@dataclass(frozen=True, slots=True)
class Onto:
    """An operator that adds to one of its arguments, where that lies."""

    operator: Any
    place: int  # of that argument, in the calls of the operator that makes a new tensor
    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # its own, from those


def onto(target: Any) -> Onto | None:
    """What does the work of `target` in the memory of an argument; None if nothing does."""
    if target is int8_convolution_plus:
        return Onto(int8_convolution_onto(), ADDED, lambda given: given)
    if target is int8_linear_plus:
        return Onto(int8_linear_onto(), ADDED, lambda given: given)
    if target is not None and target is onednn_convolution_plus():
        return Onto(onednn_convolution_onto(), 1, lambda given: (given[1], given[0], *given[2:]))
    return None
