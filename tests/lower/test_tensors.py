"""Tensors of a graph in memory: sizes, strides, what loops cannot read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stator.core.dtypes import DType
from stator.loops.index import Axis, Index, Symbol
from stator.loops.ir import Buffer, Load
from stator.lower.sizes import Sizes
from stator.lower.tensors import (
    axes_of,
    contiguous,
    extent,
    from_memory,
    layout_of,
    point_of,
    result_of,
    stored,
    why_unsupported,
)
from tests.lower.graphs import fake, known_sizes, placeholders, traced

N: Final = Index.of(Symbol("n"))


def sizes(*numbers: int) -> tuple[Index, ...]:
    return tuple(Index.of(n) for n in numbers)


def test_axes_are_named_after_what_they_belong_to() -> None:
    axes = axes_of("sum1", "r", sizes(3, 4))

    assert axes == (Axis("sum1_r0", Index.of(3)), Axis("sum1_r1", Index.of(4)))


def test_an_axis_of_one_position_stands_at_zero() -> None:
    first, second, third = axes_of("x", "o", (*sizes(3, 1), N))

    assert point_of((first, second, third)) == (Index.of(first), Index.of(0), Index.of(third))


@pytest.mark.parametrize("size", [(), (5,), (2, 3), (4, 1, 7), (2, 3, 4, 5)], ids=str)
def test_contiguous_strides_are_torch_s(size: tuple[int, ...]) -> None:
    assert contiguous(sizes(*size)) == sizes(*torch.empty(size).stride())


def test_contiguous_strides_of_symbolic_sizes_are_products() -> None:
    assert contiguous((N, Index.of(4), N)) == (4 * N, N, Index.of(1))


LAYOUTS: Final[dict[str, Callable[[], Tensor]]] = {
    "contiguous": lambda: torch.empty(3, 4),
    "transposed": lambda: torch.empty(4, 3).t(),
    "every other": lambda: torch.empty(6, 8)[::2, ::3],
    "expanded": lambda: torch.empty(1, 4).expand(5, 4),
    "number": lambda: torch.empty(()),
    "overlapping": lambda: torch.empty(9).unfold(0, 4, 1),
    "channels last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_extent_reaches_from_the_first_to_the_last_element(name: str) -> None:
    tensor = LAYOUTS[name]()
    steps = [(n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True)]

    assert extent(sizes(*tensor.size()), sizes(*tensor.stride())).constant == 1 + sum(steps)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_s_layout_is_found(name: str) -> None:
    tensor = LAYOUTS[name]()

    assert layout_of(fake(tensor), Sizes()) == (sizes(*tensor.size()), sizes(*tensor.stride()))
    assert why_unsupported(fake(tensor), Sizes()) is None


def test_a_symbolic_layout_is_found_in_the_symbols_of_the_inputs() -> None:
    known, (x,) = known_sizes(torch.empty(5, 7))
    n, m = (Index.of(symbol) for symbol in known.sources)

    assert layout_of(x, known) == ((n, m), (m, Index.of(1)))


def test_a_load_finds_its_element_by_strides() -> None:
    buffer = Buffer("x", DType.BF16, Index.of(20))
    value = stored(buffer, sizes(4, 5), sizes(1, 4))

    loaded = value.load((Index.of(2), Index.of(3)))

    assert loaded is Load(DType.F32, buffer, Index.of(14))
    assert value.dtype is DType.BF16


def test_an_input_is_a_value_in_memory() -> None:
    graph = traced(lambda x: x.clone(), torch.empty(3, 4, dtype=torch.int16).t()).graph
    (node,) = graph.find_nodes(op="placeholder")

    value = from_memory(node, Sizes())

    assert value.size == sizes(4, 3)
    buffer = Buffer(node.name, DType.I16, Index.of(12))
    assert value.load((Index.of(1), Index.of(2))) is Load(DType.I16, buffer, Index.of(9))


def test_a_result_has_the_size_and_type_of_the_tensor() -> None:
    result = result_of(fake(torch.empty(2, 3, dtype=torch.bool)), Sizes())

    assert (result.size, result.dtype) == (sizes(2, 3), DType.BOOL)


# What loops cannot read


UNSUPPORTED: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "a number": (lambda: 3, "not a plain tensor"),
    "a real tensor": (lambda: torch.empty(3), "not a plain tensor"),
    "another device": (lambda: fake(torch.empty(3, device="meta")), "on meta"),
    "complex numbers": (lambda: fake(torch.empty(3, dtype=torch.complex64)), "complex64"),
    "a conjugate": (lambda: fake(torch.empty(3, dtype=torch.complex64)).conj(), "not a strided"),
    "numbers without a type of ours": (lambda: fake(torch.empty(3, dtype=torch.uint16)), "uint16"),
    "no elements": (lambda: fake(torch.empty(3, 0)), "no elements"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_loops_cannot_read_has_a_reason(name: str) -> None:
    make, reason = UNSUPPORTED[name]

    assert reason in (why_unsupported(make(), Sizes()) or "nothing")


def test_a_size_that_no_input_shows_is_a_reason() -> None:
    (node,) = placeholders(torch.empty(5, 7))

    assert "which the inputs do not show" in (why_unsupported(node.meta["val"], Sizes()) or "")
