"""ConvNeXt-T, written out: depths and widths as published, layer scale included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.built import Built, WithLoss


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a batch of images, and of the network."""

    batch: int
    image: int
    classes: int
    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 9, 3)


FULL: Final = Sizes(batch=2, image=224, classes=1000)
TINY: Final = Sizes(batch=2, image=32, classes=5, widths=(8, 16), depths=(1, 1))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.norm(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


class Block(nn.Module):
    """7x7 depthwise, layer norm, two products with gelu between, scaled, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, image: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(image).permute(0, 2, 3, 1))
        inner = self.scale * self.narrow(F.gelu(self.widen(inner)))
        return image + inner.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches of four, stages of blocks with halvings between, global pooling, a classifier."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        first, *_ = sizes.widths
        layers: list[nn.Module] = [nn.Conv2d(3, first, 4, stride=4), ChannelNorm(first)]
        before = first
        for width, depth in zip(sizes.widths, sizes.depths, strict=True):
            if width != before:
                layers += [ChannelNorm(before), nn.Conv2d(before, width, 2, stride=2)]
            layers += [Block(width) for _ in range(depth)]
            before = width
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(before, eps=1e-6)
        self.head = nn.Linear(before, sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.features(image).mean((2, 3))))
        return result


def convnext(sizes: Sizes, train: bool) -> Built:
    """ConvNeXt-T at its full sizes."""
    images = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    model = ConvNeXt(sizes)
    if train:
        classes = torch.randint(sizes.classes, (sizes.batch,))
        return Built(WithLoss(model, F.cross_entropy), (images, classes))
    return Built(model, (images,))
