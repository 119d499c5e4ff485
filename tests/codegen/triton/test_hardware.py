"""Functions of one instruction: what the hardware has, and what the interpreter runs for it."""

from __future__ import annotations

import pytest

from stator.loops.parse import parse
from tests.codegen.triton.kernels import POINTWISE

pytest.importorskip("triton")

from stator.codegen.triton import device, hardware
from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import shape_of
from tests.codegen.triton.assembly import needs_disassembler, operations


def test_they_take_the_place_of_functions_of_the_device() -> None:
    stood_in_for = {function.__name__ for function in device.FUNCTIONS}

    assert {function.__name__ for function in hardware.FUNCTIONS} <= stood_in_for


@needs_disassembler
def test_an_element_of_gelu_takes_a_reciprocal_and_a_power_and_few_more() -> None:
    kernel = parse(POINTWISE.replace("100003", "16777216"))
    written = write_kernel(kernel, shape_of(kernel))
    (cubin,) = compile_all([written], 90)
    each = written.shape.outer // (32 * written.shape.warps)

    found = operations(cubin.code)

    assert found.count("MUFU.RCP") == found.count("MUFU.EX2") == each
    assert len(found) < 20 * each  # 25, where a division guards against its divisor
