"""Models that torchao quantises by PT2E, as its quantizer for x86 says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Images(nn.Module):
    """Convolutions, one of them of groups, around an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 32, 3, padding=1)
        self.inner = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.pool = nn.MaxPool2d(2)
        self.last = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.pool(torch.relu(self.inner(x) + x))
        found: Tensor = self.last(x.flatten(1))
        return found


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            layer(y).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return found


class Layers(nn.Module):
    """Products with activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Joined(nn.Module):
    """Integers that are read through joins, pools and views, and by several readers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 1)
        self.both, self.after = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.one, self.other = nn.Linear(8 * 16, 10), nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([torch.relu(self.wide(x)), torch.relu(self.narrow(x))], 1)
        y = self.after(self.pool(torch.relu(self.both(y)))).flatten(1)
        found: Tensor = self.one(y) + self.other(y)
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (Images, (2, 8, 8, 8)),
    "block": (Block, (2, 16, 64)),
    "layers": (Layers, (20, 64)),
    "joined": (Joined, (2, 8, 8, 8)),
}


def quantized_model(name: str, *, dynamic: bool, any_batch: bool = False) -> tuple[Any, Tensor]:
    """The model, calibrated with one input, which comes with it."""
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},) if any_batch else None
    torch.manual_seed(0)
    make, size = MODELS[name]
    x = torch.randn(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        pytest.importorskip("torchao")
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        config = x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(config)
        with torch.no_grad():
            exported = torch.export.export(make().eval(), (x,), dynamic_shapes=sizes).module()
            prepared = prepare_pt2e(exported, quantizer)
            prepared(x)
            model = convert_pt2e(prepared)
            move_exported_model_to_eval(model)
    return model, x


def with_quantized_weights(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Products whose weights are torchao's tensors; `kind` names a way of its to make them."""
    torch.manual_seed(0)
    model, x = Layers().eval().to(dtype), torch.randn(8, 64).to(dtype)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        if kind == "smooth":
            _smooth(model, x)
        elif kind == "int4":
            place = "torchao.prototype.quantization.int4.inference_workflow"
            make = pytest.importorskip(place).PrototypeInt4WeightOnlyConfig
            quantization.quantize_(model, make(group_size=32, set_inductor_config=False))
        else:
            quantization.quantize_(model, getattr(quantization, kind)())
    return model, x


def _smooth(model: nn.Module, x: Tensor) -> None:
    """Inputs are divided by what weights are multiplied by."""
    quantization = pytest.importorskip("torchao.quantization")
    make = pytest.importorskip("torchao.prototype.smoothquant").SmoothQuantConfig
    base = quantization.Int8DynamicActivationInt8WeightConfig()
    quantization.quantize_(model, make(base_config=base, step="prepare", alpha=0.5))
    model(x)
    quantization.quantize_(model, make(base_config=base, step="convert", alpha=0.5))
