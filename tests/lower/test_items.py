"""What lowering leaves: loops, scatters, checks, sizes and calls, and what each of them reads."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from stator.core.dtypes import DType
from stator.loops.index import Axis, Element, Index, Symbol
from stator.loops.ir import Apply, Buffer, Combine, Expr, Load
from stator.loops.prims import Prim
from stator.lower.items import (
    Check,
    Compute,
    Extern,
    Item,
    Scatter,
    Size,
    place_of,
    without_unread,
)
from tests.lower.graphs import lowered

aten = torch.ops.aten

N: Final = Index.of(Symbol("n"))
ROW: Final = Axis("i", Index.of(4))
J: Final = Axis("j", N)
R: Final = Axis("r", Index.of(5))


def buffer(name: str, dtype: DType = DType.F32) -> Buffer:
    return Buffer(name, dtype, Index.of(100))


def load(name: str, index: Index, dtype: DType = DType.F32) -> Expr:
    return Load(dtype.computed_in, buffer(name, dtype), index)


def copy_of(name: str, source: str) -> Compute:
    """A loop that copies."""
    return Compute(
        buffer(name),
        (ROW.size,),
        (Index.of(1),),
        (ROW,),
        (),
        None,
        load(source, Index.of(ROW)),
    )


def row_sums() -> Compute:
    """sum over r of x[i, j, r], stored transposed"""
    value = load("x", (Index.of(ROW) * N + J) * 5 + R)
    size, stride = (ROW.size, J.size), (Index.of(1), Index.of(4))
    return Compute(buffer("sums"), size, stride, (ROW, J), (R,), Combine.SUM, value)


def scatter(combine: Combine | None = None) -> Scatter:
    """into[rows[i]] += a[i] * b[i]"""
    place = Index.of(Element(load("rows", Index.of(ROW), DType.I64)))
    a, b = load("a", Index.of(ROW)), load("b", Index.of(ROW))
    return Scatter(buffer("into"), (ROW,), place, Apply(DType.F32, Prim.MUL, (a, b)), combine)


def test_an_element_lies_where_the_strides_say() -> None:
    i, j = Index.of(ROW), Index.of(J)

    assert place_of((i, j), (Index.of(7), N)) is i * 7 + j * N
    assert place_of((), ()) is Index.of(0)


def test_a_reduction_computes_its_results_and_visits_all_points() -> None:
    item = row_sums()

    assert item.name == "sums"
    assert item.total is 4 * N
    assert item.work is 20 * N
    assert item.store is Index.of(ROW) + 4 * Index.of(J)
    assert item.reads == {"x"}


def test_reductions_and_scans_give_rows_and_other_loops_do_not() -> None:
    plain, value = copy_of("y", "x"), load("x", Index.of(ROW))
    scan = Compute(
        buffer("y"), (ROW.size,), (Index.of(1),), (ROW,), (), Combine.SUM, value, scan=ROW
    )

    assert row_sums().leads
    assert scan.leads
    assert not plain.leads


def test_a_loop_reads_what_its_indices_read() -> None:
    place = Index.of(Element(load("rows", Index.of(ROW), DType.I64)))
    item = Compute(buffer("y"), (ROW.size,), (Index.of(1),), (ROW,), (), None, load("table", place))

    assert item.reads == {"table", "rows"}


def test_a_scatter_needs_its_own_buffer_and_the_places() -> None:
    item = scatter(Combine.SUM)

    assert item.reads == {"into", "rows", "a", "b"}
    assert item.work is Index.of(4)
    assert item.name == "into"


def test_checks_read_their_flag_and_sizes_nothing() -> None:
    check, size = Check("flag", IndexError, "out of range"), Size("n", N)

    assert (check.reads, check.name) == ({"flag"}, "flag_checked")
    assert (size.reads, size.name) == (set(), "n")


def test_a_call_reads_every_node_that_it_takes() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.create_node("call_function", aten.cat.default, ([x, y],), {}, name="joined")

    assert Extern(node).reads == {"x", "y"}
    assert Extern(node).name == "joined"


# What nobody reads


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]


def test_loops_that_nobody_reads_are_left_out() -> None:
    items: list[Item] = [copy_of("a", "x"), copy_of("b", "x"), copy_of("c", "a")]

    assert names(without_unread(items, {"c"})) == ["a", "c"]
    assert names(without_unread(items, {"b"})) == ["b"]
    assert names(without_unread(items, set())) == []


def test_a_scatter_keeps_what_it_scatters_into() -> None:
    items: list[Item] = [copy_of("into", "x"), copy_of("a", "x"), scatter(), copy_of("z", "into")]

    assert names(without_unread(items, {"z"})) == ["into", "a", "into", "z"]
    assert names(without_unread(items, {"a"})) == ["a"]


def test_checks_and_calls_stay_and_keep_what_they_read() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.sin.default, (graph.placeholder("a"),))
    check = Check("flag", IndexError, "no")
    items: list[Item] = [copy_of("a", "x"), copy_of("flag", "x"), Extern(node), check]

    assert without_unread(items, set()) == items


def test_a_rule_s_unread_results_are_not_computed() -> None:
    """Layer norm also returns its statistics."""
    both = lowered(lambda x: torch.var_mean(x, -1), torch.empty(4, 8))
    one = lowered(lambda x: torch.var_mean(x, -1)[1], torch.empty(4, 8))

    assert len(one.items) < len(both.items)
