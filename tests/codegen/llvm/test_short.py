"""Flat kernels with a short last axis: when its points are written out; nothing else changes."""

from __future__ import annotations

from typing import Final

import pytest

from stator.codegen.llvm.short import MOST_WRITTEN_OUT, with_last_written_out
from stator.core.dtypes import DType
from stator.loops.parse import parse
from stator.loops.verify import verify
from tests.codegen.llvm.execute import ODD, TYPES, compiled

PIXELS: Final = """
kernel pixels
  buffer x: {dtype}[{all}*n]
  buffer out: {dtype}[{all}*n]
  outer b: 2, i: n, c: {count}
  stage
    out[{count}*b*n + {count}*i + c] = x[{count}*b*n + c*n + i]
"""
QUANTISED: Final = """
kernel quantised
  buffer x: f32[3*n]
  buffer scale: f32[3]
  buffer image: u8[3*n]
  buffer whole: u8[3*n]
  buffer real: f32[3*n]
  outer i: n, c: 3
  stage
    real[3*i + c] = mul(f32(image[3*i + c]), scale[c])
    whole[3*i + c] = u8(min(max(mul(x[c*n + i], 32.0:f32), 0.0:f32), 255.0:f32))
"""


@pytest.mark.parametrize("count", [2, 3, MOST_WRITTEN_OUT])
@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_pixels_of_odd_images(dtype: DType, count: int) -> None:
    kernel = compiled(PIXELS.format(dtype=repr(dtype), count=count, all=2 * count))
    written_out = with_last_written_out(kernel.kernel)
    verify(written_out)
    assert len(written_out.outer) == 2
    assert len(written_out.statements) == count

    for n in (0, 1, *ODD, 64, 100, 131):
        kernel.require({"n": n})


def test_several_results_and_numbers_for_each_channel() -> None:
    kernel = compiled(QUANTISED)
    assert len(with_last_written_out(kernel.kernel).statements) == 6

    for n in (0, *ODD, 100):
        kernel.require({"n": n})


PARTS: Final = {
    "last": "c: 3",
    "length": "i: n",
    "load": "x[3*b*n + c*n + i]",
    "store": "out[3*b*n + 3*i + c] =",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"last": "c: s0"},  # of unknown size
        {"last": "c: 1"},
        {"last": "c: 8"},
        {"length": "i: 63"},  # few pixels
        {"store": "out[3*b*n + 4*i + c] ="},  # with gaps
        {"store": "out[3*b*n + c*n + i] ="},
        {"store": "out[3*b*n + 3*i + c] sum="},
        {"load": "x[3*b*n + 2*i]"},  # every second one
        {"load": "within(c, 2, x[3*b*n + c*n + i], 0.0:f32)"},
    ],
    ids=str,
)
def test_others_stay_as_they_are(changes: dict[str, str]) -> None:
    text = PIXELS.format(dtype="f32", count=3, all=6)
    assert len(with_last_written_out(parse(text)).statements) == 3
    for part, other in changes.items():
        assert PARTS[part] in text
        text = text.replace(PARTS[part], other)
    kernel = parse(text)
    assert with_last_written_out(kernel) is kernel


def test_much_to_compute_stays_in_a_loop() -> None:
    text = PIXELS.format(dtype="f32", count=3, all=6)
    value = PARTS["load"]
    for _ in range(200):
        value = f"add({value}, 1.5:f32)"
    kernel = parse(text.replace(PARTS["load"], value))
    assert with_last_written_out(kernel) is kernel


def test_what_is_stored_over_stays_as_it_is() -> None:
    kernel = parse("""
kernel inplace
  buffer x: f32[3*n]
  buffer bias: f32[3]
  buffer out: f32[3*n]
  shares out: x
  outer i: n, c: 3
  stage
    out[3*i + c] = add(x[3*i + c], bias[c])
""")
    assert with_last_written_out(kernel) is kernel
