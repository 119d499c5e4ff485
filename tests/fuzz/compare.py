"""How near two results have to be.

Where a result follows from IEEE 754 alone, it has to be equal; where a float sum may have been
reassociated or a function has some ulp of freedom, near.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from stator.core.dtypes import DType
from stator.loops.access import nodes
from stator.loops.interp import bf16_value
from stator.loops.ir import Buffer, Kernel
from tests.fuzz.arguments import Array

EXACT: Final = "exact"  # names of buffers in which two right results are equal begin so

_RELATIVE: Final = {DType.F64: 1e-12, DType.F32: 3e-5, DType.F16: 2**-9, DType.BF16: 2**-7}
_ABSOLUTE: Final = {DType.F64: 1e-280, DType.F32: 1e-30, DType.F16: 2**-23, DType.BF16: 1e-30}


def difference(
    kernel: Kernel, actual: Mapping[str, Array], expected: Mapping[str, Array]
) -> str | None:
    """Where two results of a kernel differ by more than they may; None if nowhere."""
    for buffer in kernel.written:
        got, want = actual[buffer.name], expected[buffer.name]
        for place in np.flatnonzero(~_agree(kernel, buffer, got, want)):
            return f"{buffer.name}[{place}] is {got[place]!r}, not {want[place]!r}"
    shared = {read for _, read in kernel.shares}
    for buffer in (buffer for buffer in kernel.read if buffer not in shared):
        if actual[buffer.name].tobytes() != expected[buffer.name].tobytes():
            return f"{buffer.name} is written to"
    return None


def _agree(kernel: Kernel, buffer: Buffer, got: Array, want: Array) -> Array:
    dtype = buffer.dtype
    if not dtype.is_float:
        return np.asarray(got == want)
    if dtype is DType.BF16:
        got, want = (np.array([bf16_value(bits) for bits in x], np.float32) for x in (got, want))
    if buffer.name.startswith(EXACT):
        return np.asarray((got == want) | (np.isnan(got) & np.isnan(want)))
    computed = {node.dtype for statement in kernel.statements for node in nodes(statement)}
    # An f64 may have been computed from an f32.
    precision = DType.F32 if dtype is DType.F64 and DType.F32 in computed else dtype
    return np.isclose(
        got.astype(np.float64),
        want.astype(np.float64),
        rtol=_RELATIVE[precision],
        atol=_ABSOLUTE[dtype],
        equal_nan=True,
    )
