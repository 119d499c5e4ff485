"""What is measured: a program, what it is called with, and what counts as its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from benchmarks.closeness import TOLERANCE, relative_error

Kind: TypeAlias = Literal["micro", "infer", "train"]
Program: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One program with its inputs.  With `leaves`, a call computes their gradients too."""

    program: Program  # what a contender compiles
    inputs: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    tangent: Tensor | None = None  # of the output; None: the output is a loss
    written: tuple[Tensor, ...] = ()  # changed in place: results as well
    weights: tuple[Tensor, ...] = ()  # read in full, though they are no inputs
    moved: int | None = None  # bytes that must move, where inputs and outputs do not tell
    error: Callable[[Any, Any], float] = relative_error  # of a result, given eager's
    tolerance: float = TOLERANCE  # of that error

    def forward(self, program: Program) -> Any:
        """Call `program`; grad mode is on if gradients are wanted, and old ones are dropped."""
        for leaf in self.leaves:
            leaf.grad = None
        with torch.set_grad_enabled(bool(self.leaves)):
            return program(*self.inputs)

    def backward(self, output: Any) -> None:
        """Gradients of the leaves, as a training step leaves them."""
        if self.leaves:
            output.backward(self.tangent)

    def step(self, program: Program) -> Any:
        """One whole call; its output."""
        output = self.forward(program)
        self.backward(output)
        return output

    def results(self, output: Any) -> list[Any]:
        """All that a call computed; the next call leaves it alone."""
        written = [tensor.detach().clone() for tensor in self.written]
        return [output, *written, *(leaf.grad for leaf in self.leaves)]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table, at its full size and at one for tests."""

    name: str
    kind: Kind
    full: Callable[[], Task]
    tiny: Callable[[], Task]
    own_state: bool = False  # a call changes what the next one starts from: a task per contender
