"""Training of small networks: after some steps as near to float64 as eager is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, check, compiled, randn

STEPS: Final = 6


class Block(nn.Module):
    """Attention and a feed-forward network, each normed before and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    """Tokens in, the loss of the next one out."""

    def __init__(self, words: int = 60, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(32, width) * 0.1)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens[:, :-1]) + self.places[: tokens.shape[1] - 1]
        logits = self.norm(self.blocks(x)) @ self.words.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Images(nn.Module):
    """Convolutions with batch norm, pooled, classified; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
        )
        self.head = nn.Linear(32, 7)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        features = self.layers(images).mean((2, 3))
        return F.cross_entropy(self.head(features), classes)


Step = Callable[..., Tensor]


def trained(model: nn.Module, run: Step, batches: list[tuple[Tensor, ...]]) -> list[float]:
    """Losses of some steps; the model has learnt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def distance(one: nn.Module, exact: nn.Module) -> float:
    """Of all parameters, over their norm."""
    pairs = list(zip(one.parameters(), exact.parameters(), strict=True))
    off = sum(float((a.detach().double() - e.detach()).square().sum()) for a, e in pairs)
    return float((off / sum(float(e.detach().square().sum()) for _, e in pairs)) ** 0.5)


def as_near_as_eager(model: nn.Module, batches: list[tuple[Tensor, ...]]) -> None:
    """Train three copies: eagerly, compiled, in float64."""
    eager, ours, exact = model, copy.deepcopy(model), copy.deepcopy(model).double()
    wide = [
        tuple(value.double() if value.is_floating_point() else value for value in batch)
        for batch in batches
    ]
    theirs = trained(eager, eager, batches)
    mine = trained(ours, compiled(ours), batches)
    truth = trained(exact, exact, wide)

    for one, two, three in zip(mine, theirs, truth, strict=True):
        assert abs(one - three) <= 2 * abs(two - three) + 1e-4 * abs(three)
    assert distance(ours, exact) <= 2 * distance(eager, exact) + 1e-6


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32 as well, so that roundings do not hide mistakes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_a_transformer() -> None:
    batches = [(torch.randint(60, (8, 32), device=DEVICE),) for _ in range(STEPS)]

    as_near_as_eager(Language().to(DEVICE), batches)


def test_a_convolutional_network() -> None:
    batches = [(randn(8, 3, 24, 24), torch.randint(7, (8,), device=DEVICE)) for _ in range(STEPS)]

    as_near_as_eager(Images().to(DEVICE), batches)


def test_a_transformer_in_bfloat16() -> None:
    """One step: later ones go their own ways."""
    check(
        Language().to(DEVICE, torch.bfloat16),
        torch.randint(60, (8, 32), device=DEVICE),
        tolerance_scale=3.0,
    )


def test_compiled_step_of_an_optimizer() -> None:
    weights = [randn(33, 17), randn(50)]
    gradients = [torch.randn_like(weight) for weight in weights]

    def stepped(run: Callable[[Any], Any]) -> list[Tensor]:
        parameters = [weight.clone().requires_grad_() for weight in weights]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=True)
        step = run(optimizer.step)
        for _ in range(3):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            step()
        return [parameter.detach() for parameter in parameters]

    for mine, theirs in zip(stepped(compiled), stepped(lambda step: step), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """Products in bfloat16 by autocast, norms and the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            logits = self.head(self.layers(x))
        return torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)


def test_autocast_inside() -> None:
    check(Mixed().to(DEVICE), randn(16, 32, grad=True), precision=torch.bfloat16)


def test_autocast_around() -> None:
    def use(fn: Callable[..., Any], *inputs: Any) -> Any:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return fn(*inputs)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(F.relu(x @ weight), -1) + x.sum()

    check(formula, randn(24, 32), randn(32, 16), use=use, precision=torch.bfloat16)
