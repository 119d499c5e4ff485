"""Tensors side by side, moved, padded, put in place: against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.fused import FLOATS, TYPES, check_fused, sample

MOVES: dict[str, Callable[[Tensor], Any]] = {
    "flip": lambda x: (x.flip(0), x.flip(-1, 1), x.flip(())),
    "fliplr": lambda x: (x.fliplr(), x.flipud()),
    "rot90": lambda x: [x.rot90(k, dims) for k in range(4) for dims in ((0, 1), (2, 0))],
    "rot90 back": lambda x: (x.rot90(-1, (-1, -2)), x.rot90(7, (0, 2))),
    "roll": lambda x: (x.roll(1, 0), x.roll((1, -2), (0, 2)), x.roll(13, -1), x.roll(0, 1)),
    "roll flat": lambda x: (x.roll(5), x.roll(-1)),
    "roll all": lambda x: x.roll((1, 2, 3), (0, 1, 2)),
    "roll twice": lambda x: x.roll((1, 2), (0, 0)),
    "repeat": lambda x: (x.repeat(2, 1, 3), x.repeat(2, 3, 1, 1), x.repeat(1, 1, 1)),
    "tile": lambda x: (x.tile(2), x.tile(3, 1, 1, 2)),
    "repeat_interleave": lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3)),
    "tril": lambda x: [x.tril(k) for k in (-9, -2, -1, 0, 1, 3, 9)],
    "triu": lambda x: [x.triu(k) for k in (-9, -2, -1, 0, 1, 3, 9)],
    "diag_embed": lambda x: (x.diag_embed(), x.diag_embed(1), x.diag_embed(-2, 0, -2)),
    "meshgrid": lambda x: [m + 1 for m in torch.meshgrid(x[0, 0], x[0, :, 0], indexing="xy")],
}


@pytest.mark.parametrize("name", MOVES)
def test_move(name: str) -> None:
    """Elements in another place, and their gradients back."""
    check_fused(MOVES[name], sample(4, 3, 5))


JOINS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, y: (torch.cat([x, y]), torch.cat([y, x, y], -2)),
    "cat last": lambda x, y: torch.cat([x, y[:, :, :1], y], -1),
    "cat one": lambda x, y: torch.cat([x], 1),
    "cat many": lambda x, y: torch.cat([x * n for n in range(9)], 2),
    "cat computed": lambda x, y: torch.cat([x.exp(), y * 2], 1).relu(),
    "cat of views": lambda x, y: torch.cat([x.transpose(0, 1), y.transpose(1, 0)], 2),
    "stack": lambda x, y: (torch.stack([x, y]), torch.stack([y, x, y], -1), torch.stack([x], 1)),
    "stacks": lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])),
    "column_stack": lambda x, y: torch.column_stack([x[0, 0], y[0, 0]]),
    "block_diag": lambda x, y: torch.block_diag(x[0], y[0, 0], y[0, 0, 0], x[1]),
    "atleast": lambda x, y: torch.cat([torch.atleast_1d(x[0, 0, 0]), y[0, 0]]),
    "cartesian_prod": lambda x, y: torch.cartesian_prod(x[0, 0], y[0, 0]),
}


@pytest.mark.parametrize("name", JOINS)
def test_join(name: str) -> None:
    """Several tensors as one, and the gradient of each."""
    check_fused(JOINS[name], sample(4, 3, 5), sample(4, 3, 5))


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Every type goes through unchanged; zeros are its own."""

    def read(x: Tensor, y: Tensor) -> Any:
        joined = torch.cat([x, y.flip(1), x.roll(1, 0)], 1)
        padded = F.pad(joined, (1, 2, -1, 1), value=1)
        return padded, torch.stack([x, y], 1).tril(-1), x.repeat(1, 2), x[0].diag_embed()

    check_fused(read, sample(3, 5, dtype=dtype), sample(3, 5, dtype=dtype))


def test_cat_promotes() -> None:
    """Parts of several types take the widest."""

    def read(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return torch.cat([x, y, z]), torch.cat([z, y]), torch.stack([x, z], -1)

    whole, half = sample(4, dtype=torch.int64), sample(4, dtype=torch.bfloat16)
    check_fused(read, whole, half, sample(4, dtype=torch.float64))
    check_fused(lambda x, y: torch.cat([x, y]), whole, sample(3, dtype=torch.bool))


def test_cat_without_elements() -> None:
    """Parts without elements count for nothing; torch takes those."""

    def read(x: Tensor, none: Tensor, flat: Tensor) -> Any:
        return torch.cat([none, x, none], 1), torch.cat([flat, x], 0)

    check_fused(read, sample(2, 3), sample(2, 0), sample(0), stays=("cat", "zeros", "add", "slice"))


def test_odd_inputs() -> None:
    """Inputs that are transposed, expanded, strided, of one element."""

    def read(x: Tensor, y: Tensor, z: Tensor, one: Tensor) -> Any:
        return (
            torch.cat([x, y], 1),
            x.flip(0),
            y.tril(),
            z.roll(2, 0),
            F.pad(y, (1, 1)),
            torch.stack([one, one * 2]),
            one.flip(()),
            one.roll(1, ()),
        )

    x = sample(5, 4, grad=False).t()
    y = sample(1, 5, grad=False).expand(4, 5)
    check_fused(read, x, y, sample(12, grad=False)[::2], sample())


def test_shuffles() -> None:
    """Channels to pixels and back."""

    def read(x: Tensor) -> Any:
        wide = F.pixel_shuffle(x, 2)
        return wide, F.pixel_unshuffle(x[:, :3], 2), F.channel_shuffle(x, 4)

    check_fused(read, sample(2, 8, 4, 6))
    check_fused(lambda x: F.pixel_shuffle(x, 3) * 2, sample(1, 2, 9, 2, 3))
    check_fused(
        lambda x: F.pixel_shuffle(x, 2), sample(2, 8, 4, 6).to(memory_format=torch.channels_last)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_gates(dtype: torch.dtype) -> None:
    """One half decides about the other."""

    def read(x: Tensor) -> Any:
        return F.glu(x), F.glu(x * 2, 0), F.glu(x, -2)

    check_fused(read, sample(4, 6, 2, dtype=dtype))


# --- padding ---

PADS = {
    "reflect": ((3, 1), (1, 0), (2, 2, 1, 0), (0, 1, 1, 1, 2, 0)),
    "replicate": ((3, 1), (1, 0), (2, 2, 1, 0), (0, 1, 1, 1, 1, 0)),
    "circular": ((3, 1), (1, 0), (2, 2, 1, 0), (0, 1, 1, 1, 2, 0)),
    "constant": ((3, 1), (-1, 0), (2, -2, 1, 0), (0, 1, 1, 1, 2, 0)),
}


@pytest.mark.parametrize("mode", PADS)
def test_pad(mode: str) -> None:
    """Borders around one, two and three dimensions."""
    for pad in PADS[mode]:
        size = (2, 3, 4, 5, 4)[: 2 + len(pad) // 2]
        check_fused(lambda x, pad=pad: F.pad(x, pad, mode=mode), sample(*size))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pad_types(dtype: torch.dtype) -> None:
    """Borders in every type of floats, read once more."""

    def read(x: Tensor) -> Any:
        return F.pad(x, (2, 1, 1, 2), mode="reflect") * 2, F.pad(x, (2, 1, 1, 2), mode="replicate")

    check_fused(read, sample(2, 3, 4, 5, dtype=dtype))


def test_pad_without_batch() -> None:
    """The same without a batch, wide, cropped, and of numbers that need care."""
    check_fused(lambda x: F.pad(x, (4, 4, 3, 3), mode="reflect"), sample(2, 5, 5))
    check_fused(lambda x: F.pad(x, (-1, 2), mode="replicate"), sample(2, 5, grad=False))
    check_fused(lambda x: F.pad(x, (1, 1), value=float("-inf")), sample(3))
    check_fused(lambda x: F.pad(x, (1, 1), value=float("nan")), sample(3))
    check_fused(lambda x: F.pad(x, (1, 1), value=2.75), sample(3, dtype=torch.int32))
    check_fused(lambda x: F.pad(x, (9, 9), mode="replicate"), sample(2, 3, 5))


# --- parts in their place ---

PLACES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "slice_scatter": lambda x, y: x.slice_scatter(y[:, :2], 1, 1, 3),
    "slice_scatter by steps": lambda x, y: x.slice_scatter(y[1:3], 0, 1, 4, 2),
    "slice_scatter whole": lambda x, y: x.slice_scatter(y, -1),
    "select_scatter": lambda x, y: (x.select_scatter(y[1], 0, -1), x.select_scatter(y[:, 1], 1, 0)),
    "diagonal_scatter": lambda x, y: x.diagonal_scatter(y[:3, 0].T, 0, 1, 0),
    "diagonal_scatter off": lambda x, y: x[0].diagonal_scatter(y[0, 0, :2], -1),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(name: str) -> None:
    """A copy with one part replaced."""
    check_fused(PLACES[name], sample(4, 3, 5), sample(4, 3, 5))


def test_assignment() -> None:
    """What assignments to parts become."""

    def write(x: Tensor, y: Tensor) -> Any:
        z = x.clone()
        z[:, 1:3] = y[:, :2]
        z[0] = 1
        z[-1, ::2] += y[0, ::2]
        z.diagonal(0, 0, 1).mul_(2)
        return z

    check_fused(write, sample(4, 3, 5), sample(4, 3, 5))


@pytest.mark.parametrize("dtype", TYPES)
def test_assignment_types(dtype: torch.dtype) -> None:
    """Replaced parts take the type of the whole."""

    def write(x: Tensor, y: Tensor) -> Any:
        return x.select_scatter(y[0], 0, 1), x.slice_scatter(y[1:], 0, 2)

    check_fused(write, sample(4, 3, dtype=dtype), sample(3, 3, dtype=dtype))


def test_backward_of_unfold() -> None:
    """Windows that overlap, touch, and leave gaps."""
    for size, step in ((3, 1), (2, 2), (2, 3), (5, 2), (1, 1)):
        check_fused(lambda x, s=size, n=step: x.unfold(1, s, n) * 2, sample(2, 9))


def test_dynamic_sizes() -> None:
    """Sizes that are known when it runs."""

    def read(x: Tensor, y: Tensor) -> Any:
        return (
            torch.cat([x, y]),
            torch.stack([x[0], y[0]], 1),
            F.pad(x, (1, 2)),
            x.flip(0),
            x.roll(1, 0),
            x.tril(),
            x.repeat(2, 1),
            x.select_scatter(y[0], 0, 1),
        )

    check_fused(read, sample(5, 6), sample(7, 6), dynamic=True)
