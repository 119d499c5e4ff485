"""Loops that kernels of one library have in common."""

from __future__ import annotations

from typing import Any, Final

import pytest

from stator.codegen.llvm import jit
from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import load_object
from stator.codegen.llvm.share import LEAST
from stator.loops.parse import parse
from tests.codegen.llvm.execute import Compiled

ROWS: Final = """
kernel {name}
  buffer x: f32[{all}]
  buffer scale: f32[{width}]
  buffer out: f32[{all}]
  outer i: {rows}, j: {width}
  stage
    out[{width}*i + j] = mul(x[{width}*i + j], scale[j])
"""
SUM: Final = """
kernel {name}
  buffer x: f32[{all}]
  buffer out: f32[{rows}]
  outer i: {rows}
  stage j: {width}
    acc sum= x[{width}*i + j]
  stage
    out[i] = acc
"""
STRIDED: Final = """
kernel {name}
  buffer x: f32[{all}]
  buffer out: f32[{all}]
  outer i: {width}, j: {rows}
  stage
    out[{rows}*i + j] = neg(x[{width}*j + i])
"""
SPLIT: Final = """
kernel {name}
  buffer x: f32[{all}]
  buffer out: f32[{all}]
  outer i: {rows}, j: {width}
  stage
    out[{width}*i + j] = x[{width}*i + (j // {half})]
"""


class Together(Compiled):
    """A kernel out of an object file of several."""

    code: Any

    def __post_init__(self) -> None:
        """Nothing of its own."""


def loaded(*texts: str) -> tuple[list[Together], str]:
    """Kernels that were compiled together for any x86-64, and their text."""
    kernels = [parse(text) for text in texts]
    code = load_object(jit.compile_kernels(kernels, "x86-64", 4), library_function)
    entries = {k.name: jit._signature(k)(code.address(k.name)) for k in kernels}
    found = []
    for kernel in kernels:
        one = Together(kernel)
        one.module = jit.Module((kernel,), code, entries, b"")
        found.append(one)
    return found, jit.module_text(kernels, 4, shares=True)


def rows(text: str) -> int:
    """How many loops a module has."""
    return text.count("_rows(ptr noalias")


def given(form: str, *sizes: tuple[int, int]) -> list[str]:
    """Kernels of a form, of several sizes."""
    return [
        form.format(name=f"k{place}", rows=height, width=width, half=width // 2, all=height * width)
        for place, (height, width) in enumerate(sizes)
    ]


def test_widths_of_one_loop_are_its_parameters() -> None:
    kernels, text = loaded(*given(ROWS, (7, 65), (3, 128), (2, 257)))
    assert rows(text) == 1

    for kernel in kernels:
        kernel.require()


def test_the_same_loops_for_several_counts_are_there_once() -> None:
    kernels, text = loaded(*given(ROWS, (7, 40), (9, 40)))
    assert rows(text) == 1
    assert "%shared" not in text

    for kernel in kernels:
        kernel.require()


@pytest.mark.parametrize("form", [SUM, STRIDED, SPLIT], ids=["length", "stride", "divisor"])
def test_what_loops_over_vectors_are_made_of_stays_a_constant(form: str) -> None:
    kernels, text = loaded(*given(form, (20, 64), (24, 96)))
    assert rows(text) == 2

    for kernel in kernels:
        kernel.require()


def test_small_numbers_stay_constants() -> None:
    kernels, text = loaded(*given(ROWS, (5, LEAST - 1), (5, 4 * LEAST), (5, 8 * LEAST)))
    assert rows(text) == 2

    for kernel in kernels:
        kernel.require()


def test_kernels_by_themselves_share_nothing() -> None:
    kernels = [parse(text) for text in given(ROWS, (7, 33), (3, 64))]
    assert rows(jit.module_text(kernels)) == 2
