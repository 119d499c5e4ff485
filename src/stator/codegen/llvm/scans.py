"""Scans of several rows at a time: each waits for its own additions, so others go on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.emitter import neutral
from stator.codegen.llvm.rows import Rows
from stator.codegen.llvm.sums import total_type
from stator.codegen.llvm.types import register
from stator.loops.index import Axis
from stator.loops.ir import Accumulate, Kernel

ABREAST: Final = 4  # rows


def is_scan(kernel: Kernel) -> bool:
    """Whether the kernel is one scan along its rows."""
    if len(kernel.stages) != 1 or not kernel.outer:
        return False
    (stage,) = kernel.stages
    accumulates = any(isinstance(s, Accumulate) for s in stage.body)
    return stage.in_order and accumulates and len(stage.inner) == 1


@dataclass(slots=True)
class Scans(Rows):
    """Writes the loops of a scan."""

    def emit(self) -> None:
        """Blocks of rows; those that are left over one by one."""
        w = self.w
        count = w.let("sub i64 %end, %begin")
        blocks = w.let(f"sdiv i64 {count}, {ABREAST}")
        with w.loop("0", blocks, [], "block") as loop:
            first = w.let(f"mul i64 {loop.counter}, {ABREAST}")
            start = w.let(f"add i64 %begin, {first}")
            places: list[dict[Axis, str]] = []
            for row in range(ABREAST):
                self._decode(self.kernel.outer, w.let(f"add i64 {start}, {row}"))
                places.append(dict(self.axes))
            self._abreast(places)
        done = w.let(f"mul i64 {blocks}, {ABREAST}")
        rest = w.let(f"add i64 %begin, {done}")
        with w.loop(rest, "%end", [], "row") as loop:
            self._decode(self.kernel.outer, loop.counter)
            self._stage(self.kernel.stages[0])

    def _abreast(self, places: list[dict[Axis, str]]) -> None:
        (stage,) = self.kernel.stages
        (axis,) = stage.inner
        sums = [s for s in stage.body if isinstance(s, Accumulate)]
        kinds = [total_type(s, stage) for s in sums]
        start = [(register(k), neutral(s.combine, k)) for s, k in zip(sums, kinds, strict=True)]
        with self.w.loop("0", self.index(axis.size), start * len(places), "inner") as loop:
            carried, following = loop.carried, []
            for row, place in enumerate(places):
                self.axes = dict(place)
                self._enter(axis, loop.counter)
                own = carried[row * len(sums) : (row + 1) * len(sums)]
                following += self._point(stage, own)
            loop.carried = following
        self.values.clear()
