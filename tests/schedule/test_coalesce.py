"""Fewer axes: joined where every index steps through them as one."""

from __future__ import annotations

from typing import Final

import pytest

from stator.loops.index import Index, Symbol
from stator.loops.ir import Kernel, Store
from stator.loops.parse import parse
from stator.schedule.coalesce import coalesce
from tests.fuzz.cases import decisions_of
from tests.fuzz.choices import Recorded
from tests.fuzz.kernels import make_kernel
from tests.schedule.interpret import require_equal, require_equal_on_random

# A flat kernel over three axes, and how many are left.
FLAT: Final = {
    "contiguous": ("out[20*i0 + 5*i1 + i2] = x[20*i0 + 5*i1 + i2]", 1),
    "transposed": ("out[20*i0 + 5*i1 + i2] = x[i0 + 3*i1 + 12*i2]", 3),
    "last two of the other": ("out[20*i0 + 5*i1 + i2] = x[5*i1 + i2]", 2),
    "first two of the other": ("out[20*i0 + 5*i1 + i2] = x[4*i0 + i1]", 2),
    "padded rows": ("out[20*i0 + 5*i1 + i2] = x[28*i0 + 7*i1 + i2]", 2),
    "one number": ("out[20*i0 + 5*i1 + i2] = x[0]", 1),
    "reversed": ("out[20*i0 + 5*i1 + i2] = x[-20*i0 - 5*i1 - i2 + 59]", 1),
    "folded": ("out[20*i0 + 5*i1 + i2] = x[(i2 // 2)]", 2),
    "gathered": ("out[20*i0 + 5*i1 + i2] = x[[n[5*i1 + i2]]]", 3),
    "chosen": ("out[20*i0 + 5*i1 + i2] = within(i2 - 1, 3, x[i2], 0.0:f32)", 2),
    "chosen by a row": ("out[20*i0 + 5*i1 + i2] = within(5*i1 + i2, 7, x[i2], 0.0:f32)", 3),
}


def flat(statement: str) -> Kernel:
    return parse(f"""
kernel k
  buffer x: f32[90]
  buffer n: i64[90]
  buffer out: f32[60]
  outer i0: 3, i1: 4, i2: 5
  stage
    {statement}
""")


@pytest.mark.parametrize("name", FLAT)
def test_axes_are_joined_where_all_indices_step_as_one(name: str) -> None:
    statement, left = FLAT[name]

    kernel = coalesce(flat(statement))

    assert len(kernel.outer) == left
    require_equal(flat(statement), kernel)


def test_the_joined_axis_has_all_points() -> None:
    (axis,) = coalesce(flat(FLAT["contiguous"][0])).outer

    assert axis.size.constant == 60


def test_every_statement_has_a_say() -> None:
    both = flat(
        f"{FLAT['contiguous'][0]}\n    out2[20*i0 + 5*i1 + i2] = x[i2]".replace("out2", "out")
    )

    assert len(coalesce(both).outer) == 2


SYMBOLIC: Final = {
    "two sizes": ("x[i0*s1 + i1]", "i0: s0, i1: s1", "s0*s1"),
    "three sizes": ("x[i0*s1*s2 + i1*s2 + i2]", "i0: s0, i1: s1, i2: s2", "s0*s1*s2"),
    "rows of a number": ("x[7*i0 + i1]", "i0: s0, i1: 7", "7*s0"),
    "a number of rows": ("x[i0*s0 + i1]", "i0: 7, i1: s0", "7*s0"),
    "sizes around a number": ("x[4*i0*s1 + i1*s1 + i2]", "i0: s0, i1: 4, i2: s1", "4*s0*s1"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_axes_of_unknown_sizes_become_one_loop_without_divisions(name: str) -> None:
    load, outer, size = SYMBOLIC[name]
    kernel = parse(f"""
kernel k
  buffer x: f32[{size}]
  buffer out: f32[{size}]
  outer {outer}
  stage
    {load.replace("x", "out")} = neg({load})
""")

    joined = coalesce(kernel)

    (axis,) = joined.outer
    (store,) = joined.statements
    assert isinstance(store, Store)
    assert store.index is Index.of(axis)
    for sizes in ({"s0": 2, "s1": 3, "s2": 4}, {"s0": 5, "s1": 1, "s2": 2}):
        require_equal(kernel, joined, sizes)


def test_inner_axes_of_each_stage_are_joined() -> None:
    kernel = parse("""
kernel k
  buffer x: f32[60]
  buffer out: f32[3]
  buffer turned: f32[60]
  outer i0: 3
  stage r0: 4, r1: 5
    acc sum= x[20*i0 + 5*r0 + r1]
  stage r0: 4, r1: 5
    turned[20*i0 + 4*r1 + r0] = sub(x[20*i0 + 5*r0 + r1], acc)
  stage
    out[i0] = acc
""")

    joined = coalesce(kernel)

    assert [len(stage.inner) for stage in joined.stages] == [1, 2, 0]
    require_equal(kernel, joined)


def test_points_that_run_in_order_still_do() -> None:
    """The joined axis visits them in the same order: the last one stays."""
    kernel = parse("""
kernel k
  buffer x: f32[20]
  buffer n: i64[20]
  buffer out: f32[20]
  scan r0: 4, r1: 5
    out[[n[5*r0 + r1]]] sum= x[5*r0 + r1]
""")

    joined = coalesce(kernel)

    assert [stage.in_order for stage in joined.stages] == [True]
    require_equal(kernel, joined)


def test_an_axis_of_a_symbol_that_may_be_one_of_two_is_left() -> None:
    n, m = Index.of(Symbol("n")), Index.of(Symbol("m"))
    assert n is not m
    kernel = parse("""
kernel k
  buffer x: f32[n*m]
  buffer out: f32[n*m]
  outer i0: n, i1: m
  stage
    out[i0*m + i1] = x[i0*n + i1]
""")

    assert coalesce(kernel) is kernel


@pytest.mark.parametrize("shard", range(4))
def test_random_kernels_mean_the_same(shard: int) -> None:
    for number in range(5000 + shard, 5100, 4):
        kernel = make_kernel(Recorded(decisions_of(number)))
        if not kernel.shares and not kernel.is_list:
            require_equal_on_random(kernel, coalesce(kernel), number)
