"""Random programs of torch operators, made for passes: no-ops, constants, joins, twins, views.

A program decides what to do next from a seed and the shapes that it has, so that it does the same
each time it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor

from tests.fuzz.choices import Choices, Recorded

Step = Callable[["Running"], Tensor]
NUMBERS: Final = (0, 1, 0.0, -0.0, 1.0, 2, -1.0, 0.5)
FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16)
LONGEST: Final = 14


@dataclass(slots=True)
class Running:
    """A program while it runs."""

    choices: Choices
    values: list[Tensor]

    def any(self) -> Tensor:
        return self.choices.one_of(self.values)

    def floating(self) -> Tensor:
        found = self.any()
        return found if found.is_floating_point() else found.float()

    def two(self) -> tuple[Tensor, Tensor]:
        """Two values that go together, the second perhaps broadcast."""
        one = self.floating()
        fitting = [x for x in self.values if x.shape == one.shape and x.is_floating_point()]
        other = self.choices.one_of(fitting or [one])
        return one, other

    def matrix(self) -> Tensor:
        found = self.floating()
        while found.ndim > 2:
            found = found.flatten(0, 1)
        while found.ndim < 2:
            found = found.unsqueeze(0)
        return found


def unary(run: Running) -> Tensor:
    names = (
        "sin",
        "relu",
        "neg",
        "sigmoid",
        "exp",
        "abs",
        "clone",
        "contiguous",
        "detach",
        "floor",
    )
    return getattr(run.floating(), run.choices.one_of(names))()


def with_number(run: Running) -> Tensor:
    x, number = run.any(), run.choices.one_of(NUMBERS)
    match run.choices.below(6):
        case 0:
            return x + number
        case 1:
            return x * number
        case 2:
            return x - number
        case 3:
            return x / (number or 1)
        case 4:
            return number + x
        case _:
            return x.float() ** 1


def binary(run: Running) -> Tensor:
    one, other = run.two()
    match run.choices.below(6):
        case 0:
            return one + other
        case 1:
            return one * other
        case 2:
            return one - other
        case 3:
            return torch.where(one > other, one, other)
        case 4:
            return torch.maximum(one, other)
        case _:
            return torch.add(one, other, alpha=run.choices.one_of((1, 2)))


def constant(run: Running) -> Tensor:
    like = run.any()
    match run.choices.below(5):
        case 0:
            return torch.zeros_like(like)
        case 1:
            return torch.ones_like(like)
        case 2:
            return torch.full(like.shape, run.choices.one_of((2.0, 0.0, 1.0)))
        case 3:
            return torch.full(like.shape, 2).cumsum(0) if like.ndim else torch.ones(3)
        case _:
            return torch.zeros(()).expand(like.shape) * like


def view(run: Running) -> Tensor:
    x, choices = run.any(), run.choices
    match choices.below(9):
        case 0:
            return x.reshape(x.shape)
        case 1:
            return x.reshape(-1)
        case 2:
            return x.transpose(0, -1) if x.ndim else x
        case 3:
            return x.transpose(0, -1).transpose(-1, 0) if x.ndim else x
        case 4:
            order = choices.shuffled(range(x.ndim))
            return x.permute(order).permute(choices.shuffled(range(x.ndim)))
        case 5:
            return x.unsqueeze(0).squeeze(0)
        case 6:
            return x.unsqueeze(-1)
        case 7:
            return x[: x.shape[0]] if x.ndim else x
        case _:
            return x.expand(2, *x.shape) if x.numel() < 200 else x.squeeze()


def join(run: Running) -> Tensor:
    x, choices = run.any(), run.choices
    if not x.ndim:
        return x.unsqueeze(0)
    half = x.shape[0] // 2
    match choices.below(6):
        case 0:
            return torch.cat([x])
        case 1:
            return torch.cat([x[:half], x[half:]])
        case 2:
            return torch.cat([x, x])[: x.shape[0]]
        case 3:
            return torch.cat(list(x.split(max(half, 1))))
        case 4:
            return torch.cat([torch.cat([x, x]), x]) if x.numel() < 200 else x
        case _:
            return torch.cat([x, x.neg() if x.dtype != torch.bool else x])[x.shape[0] :]


def cast(run: Running) -> Tensor:
    x, choices = run.any(), run.choices
    match choices.below(4):
        case 0:
            return x.to(x.dtype)
        case 1:
            return x.to(choices.one_of(FLOATS)).to(choices.one_of(FLOATS))
        case 2:
            return x.double().to(x.dtype)
        case _:
            return x.to(choices.one_of((torch.int32, torch.bool))).to(torch.float32)


def reduction(run: Running) -> Tensor:
    x = run.floating()
    if not x.ndim or not x.numel():
        return x
    match run.choices.below(4):
        case 0:
            return x.sum(-1, keepdim=True)
        case 1:
            return x.amax(0)
        case 2:
            return x.softmax(-1)
        case _:
            return x * 2 - (x * 2).amax(-1, keepdim=True)


def product(run: Running) -> Tensor:
    x = run.matrix()
    y = x.t() @ x if x.numel() else torch.ones(2, 2)
    x = x if x.numel() else y
    match run.choices.below(4):
        case 0:
            return y
        case 1:
            return y + y[0]
        case 2:
            return x @ y + x @ y
        case _:
            return y[0] + y


def twin(run: Running) -> Tensor:
    """The same twice, which may be computed once."""
    x = run.floating()
    return x.exp().sin() + x.exp().cos()


STEPS: Final[tuple[Step, ...]] = (
    unary,
    with_number,
    binary,
    constant,
    view,
    join,
    cast,
    reduction,
    product,
    twin,
)


def program(seed: int) -> Callable[..., list[Tensor]]:
    """The program of a seed."""

    def run(*inputs: Tensor) -> list[Tensor]:
        running = Running(Recorded(random=Random(seed)), list(inputs))
        for _ in range(running.choices.between(2, LONGEST)):
            result = running.choices.one_of(STEPS)(running)
            if result.numel() <= 4096:
                running.values.append(result)
        new = running.values[len(inputs) :] or [running.values[0].clone()]
        picked = [running.choices.one_of(new) for _ in range(running.choices.between(1, 3))]
        return [new[-1], *picked]

    return run


def inputs_of(seed: int) -> list[Tensor]:
    """Inputs of a program: small, strided, with what is hard to get right in them."""
    choices, generator = Recorded(random=Random(~seed)), torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for _ in range(choices.between(1, 3)):
        sizes = [choices.one_of((3, 1, 2, 4, 0)) for _ in range(choices.between(1, 3))]
        x = torch.randn(sizes, generator=generator)
        if choices.chance(4):
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        if choices.chance(4) and x.numel():
            x[(0,) * x.ndim] = choices.one_of((math.nan, math.inf, -0.0))
        made.append(x)
    return made
