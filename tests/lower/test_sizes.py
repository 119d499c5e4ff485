"""Symbolic sizes: what the inputs show becomes an index, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource

from stator.loops.index import Index, Symbol
from stator.lower.sizes import Sizes
from tests.fuzz.arguments import evaluate
from tests.lower.graphs import known_sizes, placeholders

POLYNOMIALS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "itself": lambda n, m: n,
    "sum": lambda n, m: n + m + 3,
    "difference": lambda n, m: 2 * n - m,
    "product": lambda n, m: n * m * 5,
    "square": lambda n, m: n * n,
    "cube": lambda n, m: n**3 + m**2,
    "half": lambda n, m: n // 2,
    "quotient of sizes": lambda n, m: (n * 7) // m,
    "rounded up": lambda n, m: -(-n // 4),
    "remainder": lambda n, m: (n + 1) % 6,
    "remainder of sizes": lambda n, m: (n * 3) % m,
    "convolution": lambda n, m: (n + 2 * 1 - 3) // 2 + 1,
    "nested": lambda n, m: ((n // 2) * m + n % 3) // 5,
}
VALUES: Final = ((2, 2), (5, 7), (16, 3), (100, 1000))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_a_polynomial_of_sizes_means_the_same_as_an_index(name: str) -> None:
    make = POLYNOMIALS[name]
    sizes, (x,) = known_sizes(torch.empty(5, 7))
    names = [symbol.name for symbol in sizes.sources]

    index = sizes.index(make(*x.size()))

    assert index is not None
    for values in VALUES:
        assert evaluate(index, dict(zip(names, values, strict=True))) == make(*values)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_the_hint_is_the_size_at_capture(name: str) -> None:
    make = POLYNOMIALS[name]
    sizes, (x,) = known_sizes(torch.empty(5, 7))

    index = sizes.index(make(*x.size()))

    assert index is not None
    assert sizes.hint(index) == make(5, 7)


def test_a_number_is_a_constant() -> None:
    assert Sizes().index(12) is Index.of(12)
    assert Sizes().hint(Index.of(12)) == 12


def test_an_input_s_dimensions_are_the_sources_of_its_symbols() -> None:
    sizes, (x,) = known_sizes(torch.empty(5, 7))

    first, second = (sizes.index(n) for n in x.size())

    name = placeholders(torch.empty(5, 7))[0].name
    assert [str(shown) for shown in sizes.sources.values()] == [
        f"{name}.size(0)",
        f"{name}.size(1)",
    ]
    assert [sizes.hint(index) for index in (first, second) if index is not None] == [5, 7]


def test_equal_sizes_have_one_source_the_first_that_shows_them() -> None:
    sizes, (x, y) = known_sizes(torch.empty(5, 7), torch.empty(7, 9))

    assert len(sizes.sources) == 3
    assert sizes.index(x.size(1)) is sizes.index(y.size(0))


def test_a_dimension_of_one_is_no_symbol() -> None:
    sizes, (x,) = known_sizes(torch.empty(1, 7))

    assert sizes.index(x.size(0)) is Index.of(1)
    assert len(sizes.sources) == 1


def test_a_number_among_the_inputs_is_its_own_source() -> None:
    (node,) = placeholders(torch.empty(5))
    node.meta["val"], node.name = node.meta["val"].size(0), "n_1"
    sizes = Sizes()

    sizes.learn(node)

    assert [str(shown) for shown in sizes.sources.values()] == ["n_1"]


DERIVED: Final[dict[str, tuple[Callable[[Any], Any], str]]] = {
    "longer": (lambda n: n + 3, "(x - 3) // 1"),
    "shorter": (lambda n: n - 1, "(x - -1) // 1"),
    "twice": (lambda n: 2 * n, "(x - 0) // 2"),
    "twice and more": (lambda n: 2 * n + 5, "(x - 5) // 2"),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_size_is_found_from_another_that_follows_from_it(name: str) -> None:
    """The backward of a padded tensor takes the padded one alone."""
    make, source = DERIVED[name]
    (node,) = placeholders(torch.empty(5))
    size = node.meta["val"].size(0)
    sizes = Sizes()

    sizes.learn(_number(node, make(size)))

    index = sizes.index(size)
    assert index is not None
    assert sizes.hint(index) == 5
    assert [str(shown) for shown in sizes.sources.values()] == [source.replace("x", "k")]
    for n in (2, 5, 100):
        assert eval(source, {"x": make(n)}) == n


@pytest.mark.parametrize("make", [lambda n: n // 2, lambda n: n * n, lambda n: n % 3, lambda n: -n])
def test_a_size_that_does_not_follow_from_another_is_unknown(make: Callable[[Any], Any]) -> None:
    (node,) = placeholders(torch.empty(5))
    size = node.meta["val"].size(0)
    sizes = Sizes()

    sizes.learn(_number(node, make(size)))

    assert sizes.index(size) is None


def test_a_symbol_that_no_input_shows_is_unknown() -> None:
    (x,) = placeholders(torch.empty(5, 7))

    assert Sizes().index(x.meta["val"].size(0)) is None
    assert Sizes().index(x.meta["val"].size(0) * 2) is None


def test_a_sum_with_one_unknown_symbol_is_unknown() -> None:
    _, y = nodes = placeholders(torch.empty(5), torch.empty(7))
    sizes = Sizes()
    sizes.learn(y)
    first, second = (node.meta["val"].size(0) for node in nodes)

    assert sizes.index(second + 1) is not None
    assert sizes.index(first + second) is None


def test_a_size_that_depends_on_data_is_unknown() -> None:
    (x,) = placeholders(torch.empty(5))
    mode = x.meta["val"].fake_mode
    data_dependent = mode.shape_env.create_unbacked_symint()
    sizes = Sizes()
    sizes.learn(_number(x, data_dependent))

    assert not sizes.sources
    assert sizes.index(data_dependent) is None


def test_what_is_no_polynomial_is_unknown() -> None:
    sizes, (x,) = known_sizes(torch.empty(5, 7))
    n, m = x.size()

    assert sizes.index(torch.sym_max(n, m)) is None
    assert sizes.index(torch.sym_max(n, m) + 1) is None
    assert sizes.index(2.5) is None
    assert sizes.index(None) is None


def test_a_sparse_input_shows_nothing() -> None:
    (x,) = placeholders(torch.empty(5))
    x.meta["val"] = torch.eye(3).to_sparse()
    sizes = Sizes()

    sizes.learn(x)

    assert not sizes.sources


# Numbers that are no sizes


def _number(node: fx.Node, value: Any) -> fx.Node:
    """An input of a graph that is a number."""
    node.meta["val"], node.name = value, "k"
    return node


def signed_number() -> tuple[Sizes, torch.SymInt, Tensor]:
    """Sizes that know an integer of unknown sign, and one size."""
    (x,) = placeholders(torch.empty(5))
    tensor = x.meta["val"]
    env = tensor.fake_mode.shape_env
    sizes = Sizes()
    sizes.learn(x)
    source = ConstantSource("k")
    k = env.create_symintnode(env.create_unspecified_symbol(-3, source), hint=-3, source=source)
    sizes.learn(_number(x, k))
    return sizes, k, tensor


def test_a_number_that_may_be_negative_is_signed_and_sizes_are_not() -> None:
    sizes, k, x = signed_number()

    signed = {symbol.name: symbol.is_signed for symbol in sizes.sources}

    assert sorted(signed.values()) == [False, True]
    assert sizes.index(k) is Index.of(next(s for s in sizes.sources if s.is_signed))
    assert sizes.index(x.size(0)) is Index.of(next(s for s in sizes.sources if not s.is_signed))


def test_nothing_is_divided_by_a_number_that_may_be_negative() -> None:
    sizes, k, x = signed_number()

    assert sizes.index(k // 2) is not None
    assert sizes.index(x.size(0) // k) is None
    assert sizes.index(x.size(0) % k) is None


def test_a_size_and_a_signed_number_of_one_name_are_different_symbols() -> None:
    assert Symbol("s0") is Symbol("s0", is_signed=False)
    assert Symbol("s0") is not Symbol("s0", is_signed=True)
