"""Models that packages are built of in tests: small, and each with something of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F


class Perceptron(nn.Module):
    """Products with bias, and a view of the input among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and the input, transposed."""
        return torch.softmax(self.second(F.gelu(self.first(x))), -1), x.t()


class Images(nn.Module):
    """Convolutions, batch norms, a residual, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x + F.silu(self.second(x)), 2)
        return self.head(x.mean((2, 3)))


class Counter(nn.Module):
    """A buffer that every call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input times how often this was called."""
        self.calls.add_(1)
        return x * self.calls


class Named(nn.Module):
    """Keywords, numbers, and nested results."""

    def forward(self, x: torch.Tensor, factor: int, *, bias: torch.Tensor) -> dict[str, Any]:
        """A dict."""
        return {"sum": x.sum(), "more": [x * factor + bias, (x.relu(), None)]}


class Tied(nn.Module):
    """One weight under two names, and words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the next word."""
        return torch.log_softmax(self.head(torch.tanh(self.words(words))), -1)


class Sorted(nn.Module):
    """Operators that are calls: some have no C function of their own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values, places, an inverse, a running maximum."""
        values, places = x.sort(-1)
        best, _ = x.topk(2, -1)
        return values, places, torch.linalg.inv(x @ x.mT + torch.eye(x.size(-2))), best


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 10, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last state."""
        return self.cells(x)[0][:, -1]


class Halves(nn.Module):
    """Another type, and a mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Masked and normalised."""
        return torch.where(mask, F.layer_norm(x.float(), x.shape[-1:]), -1.0).to(x.dtype)


def encoder() -> nn.Module:
    """A layer of a transformer."""
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]
_BATCH: Final = Dim("batch", min=2, max=64)
MODELS: Final[dict[str, Callable[[], Made]]] = {
    "perceptron": lambda: (Perceptron(), (torch.randn(5, 8),), {}, None),
    "images": lambda: (Images(), (torch.randn(2, 3, 8, 8),), {}, None),
    "counter": lambda: (Counter(), (torch.randn(3),), {}, None),
    "named": lambda: (Named(), (torch.randn(3, 4), 3), {"bias": torch.randn(4)}, None),
    "tied": lambda: (Tied(), (torch.randint(20, (2, 6)),), {}, None),
    "sorted": lambda: (Sorted(), (torch.randn(3, 4),), {}, None),
    "recurrent": lambda: (Recurrent(), (torch.randn(2, 5, 6),), {}, None),
    "halves": lambda: (
        Halves(),
        (torch.randn(4, 8, dtype=torch.bfloat16), torch.rand(4, 8) > 0.5),
        {},
        None,
    ),
    "encoder": lambda: (encoder(), (torch.randn(2, 7, 16),), {}, None),
    "dynamic": lambda: (Perceptron(), (torch.randn(5, 8),), {}, {"x": {0: _BATCH}}),
}


def made(name: str) -> Made:
    """A model with its arguments, keywords and dynamic sizes; the same in every process."""
    torch.manual_seed(0)
    model, args, kwargs, dynamic = MODELS[name]()
    return model.eval(), args, kwargs, dynamic
