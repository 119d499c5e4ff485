"""The machine code of kernels, where this Triton can tell it."""

from __future__ import annotations

import pytest

from benchmarks import machine_code

needs_disassembler = pytest.mark.skipif(
    not machine_code.disassembler().exists(), reason="this Triton has no disassembler"
)


def operations(code: bytes) -> list[str]:
    """Each instruction of a cubin, with what qualifies it."""
    return machine_code.operations(code)[0]
