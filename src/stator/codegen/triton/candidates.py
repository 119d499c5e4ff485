"""Shapes to measure a kernel in: the model's, and some around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from stator.codegen.triton.shape import LONGEST_WHOLE, WARP, Shape, shape_of
from stator.loops.ir import Kernel
from stator.loops.values import product
from stator.schedule.columns import is_columnar

MOST: Final = 9  # that are measured, the model's included
MOST_WARPS: Final = 16  # more leave a thread 64 registers
FEWEST_FLAT: Final = 128  # elements of a block
EACH: Final = 64  # elements that a thread may hold: more do not fit its registers
SIDES: Final = ((32, 32, 4), (64, 32, 4), (32, 64, 4), (64, 64, 4), (128, 32, 8), (32, 128, 8))
# Of columns: how many next to each other, elements of each at a time, warps.
COLUMNS: Final = (
    *((32, 32, 4), (64, 64, 8), (128, 32, 8), (64, 16, 4), (32, 128, 8), (128, 16, 4)),
    *((16, 64, 4), (8, 64, 8)),  # of few rows
)
BLOCKS: Final = ((1024, 4), (2048, 8), (4096, 8), (8192, 16))  # of a row that is looped over


def candidates(kernel: Kernel) -> tuple[Shape, ...]:
    """The model's shape first, then others that compute the same."""
    model = shape_of(kernel)
    match model.kind:
        case "flat":
            others: Iterable[Shape] = _flat(model)
        case "tiles":
            others = (replace(model, outer=x, inner=y, warps=n) for x, y, n in SIDES)
        case _ if is_columnar(kernel):
            others = _columns(model)
        case _:
            others = _rows(kernel, model)
    return tuple(dict.fromkeys((model, *others)))[:MOST]


def _flat(model: Shape) -> Iterator[Shape]:
    """More or fewer elements for a thread, more or fewer threads for a block."""
    each = model.outer // (WARP * model.warps)
    for warps, factor in ((4, 0.5), (4, 2), (8, 1), (8, 0.5), (8, 2), (4, 4), (2, 1)):
        block = int(max(each, 1) * factor * warps * WARP)
        if block >= FEWEST_FLAT and block <= EACH * warps * WARP:
            yield replace(model, outer=block, warps=warps)


def _columns(model: Shape) -> Iterator[Shape]:
    for outer, inner, warps in COLUMNS:
        yield replace(model, outer=outer, inner=min(inner, 4 * model.inner), warps=warps)


def _rows(kernel: Kernel, model: Shape) -> Iterator[Shape]:
    """The row whole, by more or fewer threads; or block after block."""
    lengths = [product([axis.size for axis in s.inner]).constant for s in kernel.stages if s.inner]
    longest = max((n or 0 for n in lengths), default=0)
    is_known = None not in lengths
    is_whole = is_known and longest <= model.inner
    if is_whole:
        for warps, factor in ((0.5, 1), (2, 1), (1, 2), (2, 2), (1, 0.5), (0.25, 1)):
            yield from _scaled(model, warps, factor)
    elif is_known and longest <= 2 * LONGEST_WHOLE:
        inner = 1 << (longest - 1).bit_length()
        yield replace(model, outer=1, inner=inner, warps=MOST_WARPS)
    for inner, warps in BLOCKS:
        if not is_known or inner < longest:
            yield replace(model, outer=1, inner=inner, warps=warps)
    if not is_whole:
        yield replace(model, stages=3)  # loads of the next blocks under way


def _scaled(model: Shape, warps: float, rows: float) -> Iterator[Shape]:
    """As many times the warps and the rows of a program, where that makes sense."""
    made = replace(model, warps=int(model.warps * warps), outer=int(model.outer * rows))
    each = made.outer * made.inner / (WARP * max(made.warps, 1))
    if 1 <= made.warps <= MOST_WARPS and made.outer >= 1 and 1 <= each <= EACH:
        yield made
