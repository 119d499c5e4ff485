"""A two-layer LSTM over a sequence, with a classifier on its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.built import Built, WithLoss


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the network and of a batch."""

    batch: int
    length: int
    features: int
    hidden: int
    classes: int


FULL: Final = Sizes(batch=16, length=64, features=256, hidden=512, classes=10)
TINY: Final = Sizes(batch=2, length=3, features=4, hidden=5, classes=3)


class Recurrent(nn.Module):
    """torch's own LSTM, and a linear layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.encoder = nn.LSTM(sizes.features, sizes.hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, sequence: Tensor) -> Tensor:
        steps, _ = self.encoder(sequence)
        return self.head(steps[:, -1])


def lstm(sizes: Sizes, train: bool) -> Built:
    """The classifier."""
    sequence = torch.randn(sizes.batch, sizes.length, sizes.features)
    if train:
        classes = torch.randint(sizes.classes, (sizes.batch,))
        return Built(WithLoss(Recurrent(sizes), F.cross_entropy), (sequence, classes))
    return Built(Recurrent(sizes), (sequence,))
