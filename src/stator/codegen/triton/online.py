"""The largest of a row and the sum of its exponentials, in one pass.

before: acc0 max= x[r];  acc1 sum= exp(x[r] - acc0)          the row is read twice
after:  each thread keeps the largest it met and the sum below it, which shrinks when a larger one
        comes; at the end threads agree on one

So does softmax's, and cross entropy's, where a row is too long to be held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stator.codegen.triton.emitter import Emitter
from stator.codegen.triton.prims import TYPES
from stator.core.dtypes import DType
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
    Combine,
    Kernel,
    Load,
    Stage,
    Store,
    loads_of,
    walk,
)
from stator.loops.prims import Prim

LOG2_E: Final = 1.4426950408889634
AT_ONCE: Final = 4  # blocks that are met together: they shrink the sum once


def together(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with such pairs side by side: what stands between, and stores for the row, waits.

    The totals may be results too: then the largest is stored before the sum begins.
    """
    ordered = list(stages)
    for number in range(len(ordered)):
        last = number + 1
        while last < len(ordered) and not ordered[last].inner:
            last += 1
        between = ordered[number + 1 : last]
        if last == len(ordered) or not between or not is_online(ordered[number], ordered[last]):
            continue
        stored = {s.buffer for stage in between for s in stage.body if isinstance(s, Store)}
        if not any(load.buffer in stored for s in ordered[last].body for load in loads_of(s.value)):
            ordered[number + 1 : last + 1] = [ordered[last], *between]
    return ordered


def is_online(first: Stage, second: Stage) -> bool:
    """Whether two stages are such a pair."""
    if first.inner != second.inner or len(first.body) != 1 or len(second.body) != 1:
        return False
    (largest,), (total,) = first.body, second.body
    if not isinstance(largest, Accumulate) or not isinstance(total, Accumulate):
        return False
    if (largest.combine, total.combine) != (Combine.MAX, Combine.SUM):
        return False
    value, top = largest.value, Accumulated(largest.value.dtype, largest.name)
    if first.in_order or second.in_order or not value.dtype.is_float:
        return False
    below = Apply(value.dtype, Prim.SUB, (value, top))
    return total.value is Apply(value.dtype, Prim.EXP, (below,))


def stores_along(kernel: Kernel, stages: Sequence[Stage], number: int) -> list[int]:
    """Later stages whose stores need nothing but what the pair that begins there reads.

    A copy of the row, say: it is written while it is read, and the row is not read again.
    """
    pair = stages[number]
    loaded = {load.buffer for stage in stages for s in stage.body for load in loads_of(s.value)}
    loaded |= {written for written, read in kernel.shares if read in loaded}
    found = []
    for later in range(number + 2, len(stages)):
        stage = stages[later]
        values = [part for s in stage.body for part in walk(s.value)]
        made = [p for p in values if isinstance(p, Load) and p.buffer in kernel.written]
        is_free = not made and not any(isinstance(part, Accumulated) for part in values)
        if stage.inner == pair.inner and is_free and not stage.in_order:
            written = {s.buffer for s in stage.body if isinstance(s, Store)}
            if len(written) == len(stage.body) and not written & loaded:
                found.append(later)
    return found


def open_totals(e: Emitter, dtype: DType) -> None:
    """What threads keep: nothing yet."""
    shape = e.shape(("x", "r"))
    e.line(f'tops_ = tl.full({shape}, float("-inf"), {TYPES[dtype]})')
    e.line(f"sums_ = tl.full({shape}, 0.0, {TYPES[dtype]})")


def take_in(e: Emitter, dtype: DType, blocks: Sequence[str]) -> None:
    """Blocks of the row; beyond its end they hold -inf."""
    top = "tops_"
    for block in blocks:
        top = e.let(f"larger_or_nan({top}, {block})")
    base = _finite(e, top)
    total = f"sums_ * {exp_text(e, dtype, f'tops_ - {base}')}"
    for block in blocks:
        total += f" + {exp_text(e, dtype, f'{block} - {base}')}"
    e.line(f"sums_ = {total}")
    e.line(f"tops_ = {top}")


def close_totals(e: Emitter, first: Stage, second: Stage) -> None:
    """One largest, and one sum."""
    largest, total = first.body[0], second.body[0]
    assert isinstance(largest, Accumulate)
    assert isinstance(total, Accumulate)
    top = e.let("reduced(tops_, 1, larger_or_nan, keep_dims=True)", "acc")
    shrunk = exp_text(e, largest.value.dtype, f"tops_ - {_finite(e, top)}")
    e.accumulated(largest.name, top)
    e.accumulated(total.name, e.let(f"reduced(sums_ * {shrunk}, 1, add, keep_dims=True)", "acc"))


def _finite(e: Emitter, top: str) -> str:
    """What is subtracted: where all is -inf so far, -inf less itself would be NaN."""
    return e.let(f'tl.where({top} == float("-inf"), 0.0, {top})')


def exp_text(e: Emitter, dtype: DType, value: str) -> str:
    """An exponential, as fine as the kernel needs it.

    The coarse one makes 0 of what is less than 1e-38, which does not count beside the largest's 1;
    asked for more, the hardware takes five instructions in place of two.
    """
    is_coarse = e.is_coarse and dtype is DType.F32
    return f"power_of_two(({value}) * {LOG2_E})" if is_coarse else f"libdevice.exp({value})"
