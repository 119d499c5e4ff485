"""Views of views, casts of casts: what two steps do, one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stator.graph.rules import Rewrite, Rule, rule

aten = torch.ops.aten

# Types whose every value the other type has too.
WIDER: Final[dict[torch.dtype, frozenset[torch.dtype]]] = {
    torch.bool: frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
        | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    ),
    torch.uint8: frozenset(
        {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
        | {torch.float32, torch.float64}
    ),
    torch.int8: frozenset(
        {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
        | {torch.float32, torch.float64}
    ),
    torch.int16: frozenset({torch.int32, torch.int64, torch.float32, torch.float64}),
    torch.int32: frozenset({torch.int64, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}


def loses_nothing(x: Tensor, first: torch.dtype) -> bool:
    """Whether a cast to `first` keeps every value of x."""
    return first == x.dtype or first in WIDER.get(x.dtype, frozenset())


@rule(
    when=loses_nothing,
    example=lambda: (torch.randn(3, 4).bfloat16(), torch.float32, torch.float16),
    rejects=[
        lambda: (torch.randn(3, 4), torch.bfloat16, torch.float32),  # rounded in between
        lambda: (torch.arange(9), torch.float32, torch.int64),  # large ones are rounded
        lambda: (torch.randn(3), torch.int32, torch.float32),  # cut off in between
        lambda: (torch.randn(3) * 300, torch.bool, torch.float32),
    ],
)
def cast_of_cast(x: Tensor, first: torch.dtype, second: torch.dtype) -> Rewrite:
    """cast(cast(x, first), second)  -->  cast(x, second)    if first has all values of x"""
    inside = aten._to_copy.default(x, dtype=first)
    return Rewrite(
        before=aten._to_copy.default(inside, dtype=second),
        after=aten._to_copy.default(x, dtype=second),
    )


@rule(
    example=lambda: (torch.randn(8, 4), torch.bfloat16, 0, 2, 5),
    rejects=[
        lambda: (torch.randn(8, 4), torch.bfloat16, 1, 0, 2),  # rows would lie closer
        lambda: (torch.randn(8, 4).t(), torch.bfloat16, 0, 0, 2),
    ],
)
def slice_of_cast(x: Tensor, dtype: torch.dtype, dim: int, start: int, end: int) -> Rewrite:
    """slice(cast(x))  -->  cast(slice(x))    where the rows lie as before"""
    return Rewrite(
        before=aten.slice.Tensor(aten._to_copy.default(x, dtype=dtype), dim, start, end),
        after=aten._to_copy.default(aten.slice.Tensor(x, dim, start, end), dtype=dtype),
    )


@rule(example=lambda: (torch.randn(2, 3, 4), [6, 4], [4, 6]))
def view_of_view(x: Tensor, first: list[int], second: list[int]) -> Rewrite:
    """view(view(x, first), second)  -->  view(x, second)"""
    inside = aten.view.default(x, first)
    return Rewrite(before=aten.view.default(inside, second), after=aten.view.default(x, second))


@rule(example=lambda: (torch.randn(3, 4),))
def transpose_of_transpose(x: Tensor) -> Rewrite:
    """t(t(x))  -->  x"""
    return Rewrite(before=aten.t.default(aten.t.default(x)), after=x)


def _composed(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [first[axis] for axis in second]


@rule(example=lambda: (torch.randn(2, 3, 4), [2, 0, 1], [0, 2, 1]))
def permute_of_permute(x: Tensor, first: list[int], second: list[int]) -> Rewrite:
    """permute(permute(x, first), second)  -->  permute(x, first[second])"""
    return Rewrite(
        before=aten.permute.default(aten.permute.default(x, first), second),
        after=lambda: aten.permute.default(x, _composed(first, second)),
    )


def is_same_swap(a: int, b: int, c: int, d: int, x: Tensor) -> bool:
    """Whether both exchange the same two dimensions."""
    rank = max(x.ndim, 1)
    return {a % rank, b % rank} == {c % rank, d % rank}


@rule(
    when=is_same_swap,
    example=lambda: (torch.randn(2, 3, 4), 1, 2, -1, -2),
    rejects=[lambda: (torch.randn(2, 3, 4), 1, 2, 0, 1)],
)
def swap_of_swap(x: Tensor, a: int, b: int, c: int, d: int) -> Rewrite:
    """transpose(transpose(x, a, b), a, b)  -->  x"""
    inside = aten.transpose.int(x, a, b)
    return Rewrite(before=aten.transpose.int(inside, c, d), after=x)


@rule(example=lambda: (torch.randn(1, 4), [2, 4], [3, 2, 4]))
def expand_of_expand(x: Tensor, first: list[int], second: list[int]) -> Rewrite:
    """expand(expand(x, first), second)  -->  expand(x, second)"""
    inside = aten.expand.default(x, first)
    return Rewrite(before=aten.expand.default(inside, second), after=aten.expand.default(x, second))


@rule(example=lambda: (torch.randn(3, 1, 4), 1))
def unsqueeze_of_squeeze(x: Tensor, dim: int) -> Rewrite:
    """unsqueeze(squeeze(x, d), d)  -->  x    if it has that dimension"""
    return Rewrite(before=aten.unsqueeze.default(aten.squeeze.dim(x, dim), dim), after=x)


@rule(example=lambda: (torch.randn(3, 4), 1))
def squeeze_of_unsqueeze(x: Tensor, dim: int) -> Rewrite:
    """squeeze(unsqueeze(x, d), d)  -->  x"""
    return Rewrite(before=aten.squeeze.dim(aten.unsqueeze.default(x, dim), dim), after=x)


VIEWS: Final[tuple[Rule, ...]] = (
    cast_of_cast,
    slice_of_cast,
    view_of_view,
    transpose_of_transpose,
    permute_of_permute,
    swap_of_swap,
    expand_of_expand,
    unsqueeze_of_squeeze,
    squeeze_of_unsqueeze,
)
