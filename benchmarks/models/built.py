"""A model as a benchmark takes it: a module and its inputs; in training, it returns a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn


class Built(NamedTuple):
    """A module, and what it is called with."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


Builder: TypeAlias = Callable[[bool], Built]  # the argument: whether it is for training


class WithLoss(nn.Module):
    """A model that is called with a target at the end, and returns the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model(*inputs[:-1]), inputs[-1])
