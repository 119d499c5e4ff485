"""Kernels without names: equal ones are one object, and arguments stand where the entry wants."""

from __future__ import annotations

from typing import Final
from unittest import mock

import pytest
import torch
from torch import Tensor

from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.core.dtypes import DType
from stator.loops import interp
from stator.loops.build import apply
from stator.loops.index import Axis, Element, Index, Symbol
from stator.loops.ir import Buffer, Kernel, Load, Stage, Store
from stator.loops.parse import parse
from stator.loops.prims import Prim
from stator.loops.text import to_text
from stator.loops.verify import verify
from stator.schedule.canonical import LONG_ENOUGH, Canonical, _Renaming, canonical
from tests.fuzz.arguments import Array, inputs
from tests.fuzz.cases import decisions_of
from tests.fuzz.choices import Recorded
from tests.fuzz.compare import difference
from tests.fuzz.kernels import make_kernel
from tests.schedule.programs import scheduled

SCALE: Final = """
kernel scale
  buffer x: f32[{n}]
  buffer out: f32[{n}]
  outer i: {n}
  stage
    out[i] = mul(x[i], 2.0:f32)
"""
SOFTMAX: Final = """
kernel softmax
  buffer x: f32[33*s0]
  buffer out: f32[33*s0]
  scratch e: f32[33]
  outer i0: s0
  stage i1: 33
    e[i1] = exp(x[33*i0 + i1])
    acc sum= e[i1]
  stage i1: 33
    out[33*i0 + i1] = div(e[i1], acc)
"""


def named(text: str, **names: str) -> Kernel:
    """The kernel with other names."""
    for old, new in names.items():
        text = text.replace(f" {old}:", f" {new}:").replace(f"{old}[", f"{new}[")
    return parse(text)


def scaled(length: int) -> Kernel:
    return parse(SCALE.format(n=length))


# One object


def test_names_of_kernel_and_buffers_do_not_matter() -> None:
    one = canonical(parse(SOFTMAX))
    other = canonical(named(SOFTMAX.replace("kernel softmax", "kernel k7"), x="a", out="b", e="c"))

    assert one.kernel is other.kernel
    assert [b.name for b in one.buffers] == ["out", "x"]
    assert [b.name for b in other.buffers] == ["b", "a"]


def test_names_of_axes_do_not_matter() -> None:
    assert canonical(parse(SOFTMAX)).kernel is (
        canonical(parse(SOFTMAX.replace("i0", "rows").replace("i1", "columns"))).kernel
    )


def test_names_of_sizes_do_not_matter() -> None:
    one, other = canonical(parse(SOFTMAX)), canonical(parse(SOFTMAX.replace("s0", "size_s77")))

    assert one.kernel is other.kernel
    assert [str(size) for size in other.sizes] == ["size_s77"]


def test_flat_kernels_of_any_length_are_one_with_the_length_as_an_argument() -> None:
    one, other = canonical(scaled(64)), canonical(scaled(1000))

    assert one.kernel is other.kernel
    assert [size.constant for size in one.sizes] == [64]
    assert [size.constant for size in other.sizes] == [1000]


def test_a_short_kernel_keeps_its_length() -> None:
    short = canonical(scaled(LONG_ENOUGH - 1))

    assert short.sizes == ()
    assert short.kernel is not canonical(scaled(LONG_ENOUGH)).kernel
    assert short.kernel is not canonical(scaled(LONG_ENOUGH - 2)).kernel


def test_a_kernel_over_rows_keeps_its_lengths() -> None:
    text = SOFTMAX.replace("33*s0", "3300").replace("i0: s0", "i0: 100")

    assert canonical(parse(text)).sizes == ()


def test_an_update_in_place_is_of_any_length_but_one() -> None:
    text = """
kernel update
  buffer x: f32[{n}]
  buffer new: f32[{n}]
  shares new: x
  outer i: {n}
  stage
    new[i] = add(x[i], 1.0:f32)
"""
    two, many = canonical(parse(text.format(n=2))), canonical(parse(text.format(n=999)))

    assert two.kernel is many.kernel
    assert [b.name for b in many.buffers] == ["new"]
    assert many.kernel.shares


def test_programs_of_other_shapes_are_one_kernel() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.tanh() * 2

    kernels = [
        canonical(scheduled(fn, torch.empty(size)).only).kernel
        for size in ((100,), (10, 20), (4, 5, 6), (7, 11, 2, 3))
    ]

    assert len(set(kernels)) == 1


def test_layers_that_repeat_are_one_kernel() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x + 1).softmax(-1)

    one, other = (scheduled(fn, torch.empty(n, 24)).only for n in (8, 8))

    assert canonical(one).kernel is canonical(other).kernel


# Different


DIFFERENT: Final = {
    "type": SCALE.replace("x: f32", "x: bf16"),
    "result's type": SCALE.replace("out: f32", "out: f16"),
    "number": SCALE.replace("2.0", "3.0"),
    "operation": SCALE.replace("mul", "add"),
    "stride": SCALE.replace("x[i]", "x[2*i]"),
    "offset": SCALE.replace("x[i]", "x[i + 1]"),
    "same buffer": SCALE.replace("x[i]", "out[i]"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_kernels_that_compute_otherwise_are_different(name: str) -> None:
    one, other = SCALE.format(n=100), DIFFERENT[name].format(n=100)

    assert canonical(parse(one)).kernel is not canonical(parse(other)).kernel


def test_which_buffer_is_read_twice_makes_a_difference() -> None:
    text = """
kernel k
  buffer x: f32[100]
  buffer y: f32[100]
  buffer out: f32[100]
  outer i: 100
  stage
    out[i] = sub(sub(x[i], y[i]), x[i])
"""
    other = text.replace("y[i]), x[i]", "y[i]), y[i]")

    assert canonical(parse(text)).kernel is not canonical(parse(other)).kernel


def test_a_number_that_may_be_negative_is_no_size() -> None:
    text = SCALE.format(n="n").replace("2.0:f32", "f32(value((k // 2)))").replace("(k //", "(s9 //")
    size = text.replace("  outer", "  size s9\n  outer")
    number = text.replace("kernel scale\n", "kernel scale\n  number s9\n")

    one, other = canonical(parse(size)), canonical(parse(number))

    assert one.kernel is not other.kernel
    assert [s.is_signed for s in symbols_of(other.kernel)] == [False, True]
    assert str(other.sizes[1]) == "s9"


# Arguments


def in_the_order_of_the_entry(found: Canonical) -> bool:
    """Whether buffers and sizes are given in the order in which machine code takes them."""
    kinds = [buffer.dtype for buffer in arguments_of(found.kernel)]
    return (
        [buffer.dtype for buffer in found.buffers] == kinds
        and len(found.sizes) == len(symbols_of(found.kernel))
        and list(symbols_of(found.kernel)) == sorted(symbols_of(found.kernel), key=str)
    )


@pytest.mark.parametrize("shard", range(4))
def test_random_kernels_mean_the_same_on_arguments_by_position(shard: int) -> None:
    for number in range(6000 + shard, 6100, 4):
        kernel = make_kernel(Recorded(decisions_of(number)))
        if kernel.shares or kernel.is_list:
            continue
        found = canonical(kernel)
        expected, sizes = inputs(kernel, number)
        actual = {name: array.copy() for name, array in expected.items()}
        interp.run(kernel, expected, sizes)
        _run_by_position(found, actual, sizes)
        assert in_the_order_of_the_entry(found)
        wrong = difference(kernel, actual, expected)
        assert wrong is None, f"{wrong}\n{to_text(kernel)}{to_text(found.kernel)}"


def _run_by_position(found: Canonical, arrays: dict[str, Array], sizes: dict[str, int]) -> None:
    """Run the nameless kernel, each argument where `found` says."""
    own = arguments_of(found.kernel)
    given = {new.name: arrays[old.name] for new, old in zip(own, found.buffers, strict=True)}
    symbols = symbols_of(found.kernel)
    numbers = {
        symbol.name: sizes[str(index)] if index.constant is None else index.constant
        for symbol, index in zip(symbols, found.sizes, strict=True)
    }
    interp.run(_with_sizes(found), given, numbers)


def _with_sizes(found: Canonical) -> Kernel:
    """The kernel with its buffers' sizes, which it has forgotten."""
    text = to_text(found.kernel)
    for buffer in arguments_of(found.kernel):
        text = text.replace(
            f"{buffer.name}: {buffer.dtype!r}[0]", f"{buffer.name}: {buffer.dtype!r}[99999]"
        )
    return parse(text)


def test_buffers_and_sizes_stand_in_the_order_of_the_entry() -> None:
    found = canonical(parse(SOFTMAX))

    assert in_the_order_of_the_entry(found)
    assert symbols_of(found.kernel) == (Symbol("n000"),)


def test_the_nameless_kernel_can_be_written_and_read() -> None:
    kernel = canonical(parse(SOFTMAX)).kernel

    assert parse(to_text(kernel)) is kernel
    verify(_with_sizes(canonical(parse(SOFTMAX))))


def test_a_gather_of_gathers_is_renamed_once() -> None:
    """Each asks twice where the one before it led: there are 2**16 ways through them."""
    table = Buffer("t", DType.I64, Index.of(8))
    value = Load(DType.I64, table, Index.of(Axis("i", Index.of(8))))
    for _ in range(16):
        twice = apply(Prim.MUL, value, value)
        value = Load(DType.I64, table, Index.of(Element(twice)) + 2 * Index.of(Element(value)))
    store = Store(Buffer("y", DType.I64, Index.of(8)), Index.of(Axis("i", Index.of(8))), value)
    kernel = Kernel("gathers", (Axis("i", Index.of(8)),), (Stage((), (store,)),))

    with mock.patch.object(_Renaming, "load", autospec=True, side_effect=_Renaming.load) as renamed:
        canonical(kernel)

    assert renamed.call_count == 17
