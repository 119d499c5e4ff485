"""Views as index maps: every kind against eager, read by loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.fused import TYPES, check_fused, sample

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(6, 4, 2),
    "view through": lambda x: x.reshape(2, 12, 2).view(48),
    "reshape": lambda x: x.transpose(0, 1).reshape(24, 2),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "expand": lambda x: x[:, :1].expand(4, 5, 4),
    "expand in front": lambda x: x.expand(3, 4, 3, 4),
    "permute": lambda x: x.permute(2, -3, 1),
    "transpose": lambda x: x.transpose(-1, 0),
    "movedim": lambda x: x.movedim((0, 2), (1, 0)),
    "mT": lambda x: x.mT,
    "slice": lambda x: x[1:-1, ::2, -3:],
    "slice beyond": lambda x: x[-9:9, 1:100],
    "slice by steps": lambda x: x[1::3, :, 0:4:3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: (x[2], x[:, -1], x.select(-1, 0)),
    "squeeze": lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x[:1, :1].squeeze((0, 1))),
    "squeeze nothing": lambda x: x.squeeze(1),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(-2)),
    "diagonal": lambda x: (x.diagonal(), x.diagonal(1, 0, 2), x.diagonal(-2, -1, 1)),
    "unfold": lambda x: (x.unfold(0, 2, 1), x.unfold(-1, 3, 1), x.unfold(1, 2, 2)),
    "split": lambda x: x.split(3, 0),
    "split with sizes": lambda x: x.split([1, 2], -2),
    "chunk": lambda x: x.chunk(2, -1),
    "tensor_split": lambda x: x.tensor_split(3, 2),
    "unbind": lambda x: x.unbind(1),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "view_as": lambda x: x.view_as(x.new_empty(3, 16)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str) -> None:
    """Each view read by arithmetic, with its backward."""

    def read(x: Tensor) -> Any:
        views = VIEWS[name](x)
        return [v * 2 for v in views] if isinstance(views, tuple | list) else views * 2

    check_fused(read, sample(4, 3, 4))


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Moves through views in every type."""

    def read(x: Tensor) -> Any:
        first, second = x.transpose(0, 1)[1:].split(1, 0)
        flat = (first.squeeze(0) == second.diagonal(0, 0, 2)[0]).reshape(-1)
        return torch.where(flat.view(4, 4), first[0], second[0])

    check_fused(read, sample(4, 3, 4, dtype=dtype))


def test_views_of_odd_inputs() -> None:
    """Inputs that are transposed, expanded, strided or without dimensions."""

    def read(x: Tensor, y: Tensor, z: Tensor, one: Tensor) -> Any:
        return (
            x[1:].transpose(0, 1) + 1,
            y.reshape(-1) * 2,
            z.unfold(0, 2, 2) + z[:1],
            one.view(1, 1) + one.expand(3).unsqueeze(0) + one.reshape(()),
            one.unfold(0, 1, 1) * 3,
        )

    check_fused(
        read,
        sample(4, 6, grad=False).t(),
        sample(1, 5, grad=False).expand(4, 5),
        sample(12, grad=False)[::2],
        sample(),
    )


def test_parts_reach_torch() -> None:
    """Parts of a split that torch reads, and one that is returned."""

    def read(x: Tensor) -> Any:
        a, b, c = x.chunk(3, -1)
        return torch.mm(a * 2, b.t()), c, torch.mm(b, c.t())

    check_fused(read, sample(4, 12), stays=("mm",))


def test_copies() -> None:
    """Operators that are views in all but name."""

    def read(x: Tensor) -> Any:
        return (
            x.diag(),
            torch.diagonal_copy(x, 1),
            torch.permute_copy(x, (1, 0)),
            torch.slice_copy(x, 0, 1, 3),
            torch.unsqueeze_copy(x, 1),
            [part * 2 for part in torch.unsafe_chunk(x, 2, 1)],
        )

    check_fused(read, sample(4, 4))


def test_dynamic_sizes() -> None:
    """Bounds that are known without the sizes."""

    def read(x: Tensor) -> Any:
        return (
            x[1:] * 2,
            x[:-1] + 1,
            x[-2:] * 3,
            x[1:3, 0] + x[0, -1],
            x.unsqueeze(0).expand(2, -1, -1) * 2,
            x.t().reshape(-1) + 1,
            x.flatten() * 2,
        )

    check_fused(read, sample(5, 6), dynamic=True)
