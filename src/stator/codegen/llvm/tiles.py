"""Transposed reads: square tiles go through registers, so that memory is read and written in lines.

A flat kernel stores along its last axis; where some loads lie along another axis, a plain loop
would fetch a whole cache line for each of their elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stator.codegen.llvm.flat import Flat
from stator.codegen.llvm.shape import SIDE, transposed
from stator.codegen.llvm.types import MEMORY, from_memory
from stator.codegen.llvm.writer import Vectors
from stator.loops.index import Axis
from stator.loops.ir import Expr, Load

AHEAD: Final = 2 * SIDE  # columns between a tile and those that are fetched meanwhile


@dataclass(slots=True)
class Tiles(Flat):
    """Writes the loops of a flat kernel with transposed loads."""

    tiles: dict[Load, str] = field(default_factory=dict)  # memory of a tile, by rows of the result
    inside: str | None = None  # place in the tiles, while their loop is written

    def emit(self) -> None:
        """Stripes along the last axis, of as many rows as a tile has."""
        shape = transposed(self.kernel)
        assert shape is not None, "the entry saw to it"
        side, loads = shape
        last, w = self.kernel.outer[-1], self.w
        rows = tuple(axis for axis in self.kernel.outer[:-1] if axis is not side)
        for load in loads:
            kind = MEMORY[load.buffer.dtype]
            self.tiles[load] = w.let(f"alloca [{SIDE * SIDE} x {kind}], align 64")
        length, width = self.index(side.size), self.index(last.size)
        padded = w.let(f"add i64 {length}, {SIDE - 1}")
        stripes = w.let(f"udiv i64 {padded}, {SIDE}")
        with w.loop("%begin", "%end", [], "stripe") as loop:
            number = w.let(f"udiv i64 {loop.counter}, {stripes}")
            stripe = w.let(f"urem i64 {loop.counter}, {stripes}")
            self._decode(rows, number)
            start = w.let(f"mul i64 {stripe}, {SIDE}")
            height = self._clip(w.let(f"sub i64 {length}, {start}"), str(SIDE), larger=False)
            is_full = w.let(f"icmp eq i64 {height}, {SIDE}")
            whole = w.let(f"udiv i64 {width}, {SIDE}")
            count = w.let(f"select i1 {is_full}, i64 {whole}, i64 0")
            with w.loop("0", count, [], "tile") as tile:
                self._tile(side, start, w.let(f"mul i64 {tile.counter}, {SIDE}"))
            rest = w.let(f"mul i64 {count}, {SIDE}")
            with w.loop("0", height, [], "row") as row:
                self._enter(side, w.let(f"add i64 {start}, {row.counter}"))
                self._loop(last, rest, width)

    def _tile(self, side: Axis, start: str, first: str) -> None:
        w, last = self.w, self.kernel.outer[-1]
        for load, place in self.tiles.items():
            self._turn(load, place, {side: start, last: first})
        with w.loop("0", str(SIDE), [], "row") as row:
            self._enter(side, w.let(f"add i64 {start}, {row.counter}"))
            line = w.let(f"mul i64 {row.counter}, {SIDE}")
            lanes = self._vectors(last, self.kernel.statements).lanes
            with w.loop("0", str(SIDE), [], "column", Vectors(lanes)) as column:
                self._enter(last, w.let(f"add i64 {first}, {column.counter}"))
                self.inside = w.let(f"add i64 {line}, {column.counter}")
                self._body(self.kernel.stages)
                self.inside = None

    def _turn(self, load: Load, place: str, at: dict[Axis, str]) -> None:
        """Load a tile by columns, turn it in registers, store it by rows."""
        w, kind, last = self.w, MEMORY[load.buffer.dtype], self.kernel.outer[-1]
        vector = f"<{SIDE} x {kind}>"
        lines = []
        for column in range(SIDE):
            # Lines of a tile lie far from each other: no hardware sees the next ones coming.
            coming = self._address_at(
                load, {**at, last: w.let(f"add i64 {at[last]}, {column + AHEAD}")}
            )
            w.line(f"call void @llvm.prefetch.p0(ptr {coming}, i32 0, i32 3, i32 1)")
        for column in range(SIDE):
            address = self._address_at(load, {**at, last: w.let(f"add i64 {at[last]}, {column}")})
            lines.append(w.let(f"load {vector}, ptr {address}, align {load.buffer.dtype.bytes}"))
        distance = SIDE // 2
        while distance:
            lines = self._exchange(lines, vector, distance)
            distance //= 2
        for number, line in enumerate(lines):
            target = w.let(f"getelementptr {kind}, ptr {place}, i64 {number * SIDE}")
            w.line(f"store {vector} {line}, ptr {target}, align {load.buffer.dtype.bytes}")

    def _address_at(self, load: Load, at: dict[Axis, str]) -> str:
        for axis, value in at.items():
            self._enter(axis, value)
        return self._address(load.buffer, load.index)

    def _exchange(self, lines: list[str], vector: str, distance: int) -> list[str]:
        """One step of the transposition: lines `distance` apart swap their blocks of that width."""
        turned = list(lines)
        for number in range(SIDE):
            if number & distance:
                continue
            first, second = lines[number], lines[number + distance]
            low = [k if not k & distance else SIDE + k - distance for k in range(SIDE)]
            high = [k + distance if not k & distance else SIDE + k for k in range(SIDE)]
            for place, lanes in ((number, low), (number + distance, high)):
                mask = ", ".join(f"i32 {lane}" for lane in lanes)
                turned[place] = self.w.let(
                    f"shufflevector {vector} {first}, {vector} {second}, <{SIDE} x i32> <{mask}>"
                )
        return turned

    def _compute(self, expr: Expr) -> str:
        if self.inside is None or not isinstance(expr, Load) or expr not in self.tiles:
            return Flat._compute(self, expr)
        kind = MEMORY[expr.buffer.dtype]
        place = self.w.let(f"getelementptr {kind}, ptr {self.tiles[expr]}, i64 {self.inside}")
        return from_memory(self.w, self.w.let(f"load {kind}, ptr {place}"), expr.buffer.dtype)
