"""ResNet-50 and MobileNetV3-large, written out: channels, strides and blocks as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.built import Built, WithLoss


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a batch of images, and of a ResNet."""

    batch: int
    image: int
    classes: int
    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)


FULL: Final = Sizes(batch=2, image=224, classes=1000)
TINY: Final = Sizes(batch=2, image=32, classes=5, width=8, depths=(1, 2))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each with batch norm, added to what came in."""

    expansion: Final = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, image: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(image)), inplace=True)
        inner = F.relu(self.norm2(self.conv2(inner)), inplace=True)
        return F.relu(self.norm3(self.conv3(inner)) + self.shortcut(image), inplace=True)


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, global pooling, a classifier."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(sizes.depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = Bottleneck.expansion * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks(self.stem(image))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One line of MobileNetV3's table."""

    kernel: int
    expanded: int
    outputs: int
    squeeze: bool
    activation: type[nn.ReLU] | type[nn.Hardswish]
    stride: int


MOBILENET_LARGE: Final = (
    BlockPlan(3, 16, 16, False, nn.ReLU, 1),
    BlockPlan(3, 64, 24, False, nn.ReLU, 2),
    BlockPlan(3, 72, 24, False, nn.ReLU, 1),
    BlockPlan(5, 72, 40, True, nn.ReLU, 2),
    BlockPlan(5, 120, 40, True, nn.ReLU, 1),
    BlockPlan(5, 120, 40, True, nn.ReLU, 1),
    BlockPlan(3, 240, 80, False, nn.Hardswish, 2),
    BlockPlan(3, 200, 80, False, nn.Hardswish, 1),
    BlockPlan(3, 184, 80, False, nn.Hardswish, 1),
    BlockPlan(3, 184, 80, False, nn.Hardswish, 1),
    BlockPlan(3, 480, 112, True, nn.Hardswish, 1),
    BlockPlan(3, 672, 112, True, nn.Hardswish, 1),
    BlockPlan(5, 672, 160, True, nn.Hardswish, 2),
    BlockPlan(5, 960, 160, True, nn.Hardswish, 1),
    BlockPlan(5, 960, 160, True, nn.Hardswish, 1),
)


def _multiple_of_eight(channels: int) -> int:
    """The nearest one, but not more than a tenth below."""
    nearest = max(8, (channels + 4) // 8 * 8)
    return nearest if 10 * nearest >= 9 * channels else nearest + 8


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the means of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = _multiple_of_eight(channels // 4)
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        gate = F.relu(self.reduce(F.adaptive_avg_pool2d(image, 1)), inplace=True)
        return image * F.hardsigmoid(self.expand(gate))


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution that keeps the size (up to the stride), and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel alone, gate, narrow; added to what came in if the size stays."""

    def __init__(self, inputs: int, plan: BlockPlan) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        if plan.expanded != inputs:
            steps += [_normed(inputs, plan.expanded, 1), plan.activation(inplace=True)]
        depthwise = _normed(plan.expanded, plan.expanded, plan.kernel, plan.stride, plan.expanded)
        steps += [depthwise, plan.activation(inplace=True)]
        if plan.squeeze:
            steps.append(SqueezeExcite(plan.expanded))
        steps.append(_normed(plan.expanded, plan.outputs, 1))
        self.steps = nn.Sequential(*steps)
        self.residual = plan.stride == 1 and inputs == plan.outputs

    def forward(self, image: Tensor) -> Tensor:
        result = self.steps(image)
        return image + result if self.residual else result


class MobileNetV3(nn.Module):
    """Stem, inverted residuals, a wide last convolution, global pooling, two linear layers."""

    def __init__(self, plans: Sequence[BlockPlan], classes: int) -> None:
        super().__init__()
        first, last = 16, plans[-1].outputs
        channels = [first, *(plan.outputs for plan in plans)]
        self.features = nn.Sequential(
            _normed(3, first, 3, stride=2),
            nn.Hardswish(inplace=True),
            *(InvertedResidual(n, plan) for n, plan in zip(channels, plans, strict=False)),
            _normed(last, 6 * last, 1),
            nn.Hardswish(inplace=True),
        )
        self.head = nn.Sequential(
            nn.Linear(6 * last, 1280), nn.Hardswish(inplace=True), nn.Linear(1280, classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(image), 1).flatten(1))


def resnet50(sizes: Sizes, train: bool) -> Built:
    """ResNet-50, at its full sizes."""
    return _classifier(ResNet(sizes), sizes, train)


def mobilenetv3(sizes: Sizes, train: bool) -> Built:
    """MobileNetV3-large; small images and few classes are what makes it small."""
    return _classifier(MobileNetV3(MOBILENET_LARGE, sizes.classes), sizes, train)


def _classifier(model: nn.Module, sizes: Sizes, train: bool) -> Built:
    images = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    if train:
        classes = torch.randint(sizes.classes, (sizes.batch,))
        return Built(WithLoss(model, F.cross_entropy), (images, classes))
    return Built(model, (images,))
