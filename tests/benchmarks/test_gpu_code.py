"""The table of machine code, for a card that need not be there."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_code import COLUMNS, ROWS, lines_of
from tests.codegen.triton.assembly import needs_disassembler


@needs_disassembler
def test_a_kernel_is_told_by_what_its_threads_do() -> None:
    (line,) = lines_of(replace(ROWS["softmax"], full=(1 << 12, 4096)))
    told = dict(zip(COLUMNS, line, strict=True))

    assert (told["kernel"], told["times"], told["spilled"]) == ("rows", "1", "0")
    assert told["reads"] == told["writes"] == "4 of 128"
    assert 0 < int(told["registers"]) < 128
