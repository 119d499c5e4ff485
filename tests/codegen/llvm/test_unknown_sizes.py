"""Loops of unknown sizes as machine code: rows counted on, parts of any length, clamped bounds."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from stator.loops.index import Symbol
from stator.loops.parse import parse
from stator.lower.sizes import Sizes
from stator.schedule.split_choices import split_choices
from tests.codegen.llvm.execute import Compiled, compiled

LENGTHS: Final = (0, 1, 7, 16, 31, 64, 65, 130)  # around vectors, one and several


@pytest.mark.parametrize("kind", ["f32", "f64", "bf16", "i8", "i64"])
def test_stores_of_every_length(kind: str) -> None:
    kernel = compiled(f"""
kernel k
  buffer x: {kind}[3*n]
  buffer out: {kind}[3*n]
  outer i: 3
  stage j: n
    out[i*n + j] = add(x[i*n + j], x[i*n + j])
""")

    for n in LENGTHS:
        kernel.require({"n": n})


def test_flat_rows_of_every_length() -> None:
    kernel = compiled("""
kernel k
  buffer x: f32[n]
  buffer y: f32[5*n]
  buffer out: f32[5*n]
  outer i: 5, j: n
  stage
    out[i*n + j] = mul(x[j], y[i*n + j])
""")

    for n in LENGTHS:
        kernel.require({"n": n})


ROWS: Final = """
kernel k
  buffer x: f32[a*b*c*n]
  buffer y: f32[b*n]
  buffer out: f32[a*b*c*n]
  outer i: a, j: b, k0: c{last}
  stage{inner}
    out[i*b*c*n + j*c*n + k0*n + l] = add(x[i*b*c*n + j*c*n + k0*n + l], y[j*n + l])
"""


@pytest.mark.parametrize("is_flat", [False, True])
def test_rows_of_several_unknown_axes(is_flat: bool) -> None:
    text = ROWS.format(last=", l: n" if is_flat else "", inner="" if is_flat else " l: n")
    kernel = compiled(text)

    for a, b, c, n in itertools.product((0, 1, 3), (0, 1, 2), (1, 4), (0, 1, 18)):
        kernel.require({"a": a, "b": b, "c": c, "n": n})


def test_every_second_element_of_rows() -> None:
    kernel = compiled("""
kernel k
  buffer x: f32[4*m + 3*n]
  buffer out: f32[2*n]
  size m
  outer i: 2
  stage j: n
    out[i*n + j] = add(x[i*m + 2*j], x[2*i*m - i*m + 2*j + 1])
""")

    for n, m in itertools.product((0, 1, 8, 17, 40), (41, 100)):
        kernel.require({"n": n, "m": m})


SPLIT: Final = {
    "joined": "within(i, m, x[i], y[i])",
    "padded": "within(i - 3, m, x[i - 3], 0.5:f32)",
    "padded by a number": "within(i - shift, m, x[i - shift], y[i])",
    "window": "add(within(2*i - 1, m, x[2*i - 1], y[i]), within(2*i + 1, m, x[2*i + 1], y[i]))",
    "backward": "within(-2*i + m, n, x[-2*i + m], y[i])",
}


@pytest.mark.parametrize("name", SPLIT)
def test_parts_of_every_length(name: str) -> None:
    whole = parse(f"""
kernel k
  size m
  number shift
  buffer x: f32[400]
  buffer y: f32[400]
  buffer out: f32[20*n]
  outer r: 20
  stage i: n
    out[n*r + i] = {SPLIT[name]}
""")
    hints = {Symbol("n"): 40, Symbol("m"): 30, Symbol("shift", is_signed=True): 2}
    kernel = Compiled(split_choices(whole, Sizes(hints=hints)))

    assert len(kernel.kernel.stages) > 1
    for n, m, shift in itertools.product((0, 1, 20, 75), (0, 1, 33, 80), (-2, 0, 5, 90)):
        kernel.require({"n": n, "m": m, "shift": shift}, threads=(1, 3))
