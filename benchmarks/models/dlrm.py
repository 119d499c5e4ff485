"""DLRM, a recommender: tables of embeddings beside a dense network, their dot products, a head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.built import Built, WithLoss


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the networks, the tables and a batch; the bottom network ends in the tables' width."""

    batch: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]  # its hidden layers
    tables: int
    rows: int
    lookups: int  # rows that are summed, a table and example


# Features and networks of the Criteo set-up; tables cut so that they fit everywhere.
CRITEO: Final = Sizes(2048, (13, 512, 256, 64), (512, 256), tables=26, rows=20_000, lookups=4)
TINY: Final = Sizes(4, (5, 8, 6), (8,), tables=3, rows=11, lookups=2)


def _network(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU after each."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Dense features and bags of indices in, the logit of a click out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, features = sizes.bottom[-1], sizes.tables + 1
        self.bottom = _network(sizes.bottom)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(sizes.rows, width, mode="sum") for _ in range(sizes.tables)
        )
        pairs = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("left", pairs[0])
        self.register_buffer("right", pairs[1])
        self.top = _network((width + pairs.shape[1], *sizes.top))
        self.head = nn.Linear(sizes.top[-1], 1)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        low = self.bottom(dense)
        looked_up = [table(bag) for table, bag in zip(self.tables, indices.unbind(), strict=True)]
        features = torch.stack([low, *looked_up], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.left, self.right]
        return self.head(self.top(torch.cat([low, products], 1)))[:, 0]


def dlrm(sizes: Sizes, train: bool) -> Built:
    """The recommender; in training, with the loss of a click that came or not."""
    dense = torch.randn(sizes.batch, sizes.bottom[0])
    indices = torch.randint(sizes.rows, (sizes.tables, sizes.batch, sizes.lookups))
    if train:
        clicks = torch.randint(2, (sizes.batch,)).float()
        model = WithLoss(DLRM(sizes), F.binary_cross_entropy_with_logits)
        return Built(model, (dense, indices, clicks))
    return Built(DLRM(sizes), (dense, indices))
