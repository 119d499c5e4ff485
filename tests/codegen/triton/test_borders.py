"""Rows that begin and end anywhere are moved in the widest accesses, and are right."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from stator.codegen.triton.borders import row_of
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import Shape
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from tests.codegen.llvm.execute import contents
from tests.fuzz.arguments import evaluate, overrun, with_margins
from tests.fuzz.compare import difference

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.loops import interp
from stator.loops.access import buffers
from tests.codegen.triton.assembly import needs_disassembler, operations

SHAPE: Final = Shape("rows", 1, 64, 1)

# The copy of a row, beside its largest and the sum of its exponentials.
LOSS: Final = """
kernel loss
  buffer x: bf16[{size}]
  buffer kept: bf16[{size}]
  buffer largest: f32[5]
  buffer total: f32[5]
  outer i0: 5
  stage i1: {columns}
    acc0 max= x[{stride}*i0 + i1]
  stage
    largest[i0] = acc0
  stage i2: {columns}
    acc1 sum= exp(sub(x[{stride}*i0 + i2], acc0))
  stage
    total[i0] = acc1
  stage i3: {columns}
    kept[{stride}*i0 + i3] = x[{stride}*i0 + i3]
"""

# What its backward stores over the copy.
GRADIENT: Final = """
kernel gradient
  buffer target: i64[5]
  buffer x: bf16[{size}]
  buffer total: f32[5]
  buffer y: bf16[{size}]
  shares y: x
  outer i0: 5
  stage i1: {columns}
    let t0 = where(eq(target[i0], value(i1)), 1.0:f32, 0.0:f32)
    y[{stride}*i0 + i1] = sub(t0, mul(x[{stride}*i0 + i1], total[i0]))
"""

# One row lies eight elements before the other, one elsewhere altogether.
SHIFTED: Final = """
kernel shifted
  buffer x: bf16[{size}]
  buffer y: f32[{size}]
  buffer z: f32[5]
  outer i0: 5
  stage i1: {columns}
    acc0 sum= mul(x[{stride}*i0 + i1], y[{stride}*i0 + i1 + 3])
    acc1 sum= y[{stride}*i0 + i1 + 8]
  stage
    z[i0] = add(acc0, acc1)
"""

TEXTS: Final = {"loss": LOSS, "gradient": GRADIENT, "shifted": SHIFTED}


def kernel_of(name: str, columns: int, stride: int) -> Kernel:
    text = TEXTS[name].format(columns=columns, stride=stride, size=5 * stride + 8)
    return parse(text)


@pytest.mark.parametrize("stride", [0, 1, 7])
@pytest.mark.parametrize("columns", [257, 319, 320, 321, 327, 383])
@pytest.mark.parametrize("name", TEXTS)
def test_every_element_is_met_once(name: str, columns: int, stride: int) -> None:
    kernel = kernel_of(name, columns, columns + stride)
    random = np.random.default_rng(columns)
    given = {b.name: contents(b.dtype, evaluate(b.size, {}), random) for b in buffers(kernel)}
    if "target" in given:
        given["target"][:] = [0, columns - 1, -100, columns, 1 << 40]
    for written, read in kernel.shares:
        given[written.name][:] = given[read.name]  # it lies there
    expected = {buffer: array.copy() for buffer, array in given.items()}
    interp.run(kernel, expected, {})
    actual, memory = with_margins(given)

    places = [actual[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]
    interpreted(kernel, SHAPE)(*places, 1)

    wrong = overrun(memory) or difference(kernel, actual, expected)
    assert wrong is None, f"{wrong}\n{to_text(kernel)}\n{write_kernel(kernel, SHAPE).source}"


def test_a_copy_is_written_while_the_row_is_read() -> None:
    source = write_kernel(kernel_of("loss", 3001, 3001), SHAPE).source

    assert source.count("for r_") == 3  # the first block, those inside of the row, the last ones
    assert source.count("tl.load(x") == source.count("tl.store(kept") == 6


def test_a_copy_over_the_row_itself_waits_for_the_sum() -> None:
    text = LOSS.format(columns=3001, stride=3001, size=15013)
    kernel = parse(text.replace("  outer", "  shares kept: x\n  outer"))

    assert write_kernel(kernel, SHAPE).source.count("for r_") == 6


@pytest.mark.parametrize(("columns", "stride"), [(4096, 4096), (4096, 8192)])
def test_rows_at_borders_are_left_as_they_are(columns: int, stride: int) -> None:
    (stage,) = kernel_of("gradient", columns, stride).stages

    assert row_of(stage.inner, stage.body, 64) is None


def test_a_row_of_few_blocks_is_left_as_it_is() -> None:
    (stage,) = kernel_of("gradient", 255, 255).stages

    assert row_of(stage.inner, stage.body, 64) is None


@needs_disassembler
@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_threads_move_sixteen_bytes_at_once(name: str) -> None:
    kernel = kernel_of(name, 50257, 50257)
    (cubin,) = compile_all([write_kernel(kernel, Shape("rows", 1, 1024, 4))], 90)

    found = operations(cubin.code)

    assert "LDG.E.128" in found
    assert "STG.E.128" in found
