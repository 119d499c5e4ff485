"""ViT, a transformer over patches of an image, with random weights and no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.models.built import Built, WithLoss
from benchmarks.models.text import Field


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the configuration depends on; `batch` images go in."""

    layers: int
    width: int
    heads: int
    inner: int
    image: int
    patch: int
    classes: int
    batch: int = 1


VIT_BASE: Final = Sizes(
    layers=12, width=768, heads=12, inner=3072, image=224, patch=16, classes=1000
)
TINY: Final = Sizes(layers=1, width=32, heads=4, inner=48, image=16, patch=4, classes=5)


def vit(sizes: Sizes, train: bool) -> Built:
    """The classifier."""
    config = ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_labels=sizes.classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = Field(ViTForImageClassification(config), ("pixel_values",), "logits")
    images = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    if train:
        classes = torch.randint(sizes.classes, (sizes.batch,))
        return Built(WithLoss(model, F.cross_entropy), (images, classes))
    return Built(model, (images,))
