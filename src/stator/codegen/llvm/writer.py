"""LLVM text: values numbered as they come, blocks named for what they do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

LANES: Final = "lanes:"  # in loop marks, until the module numbers them
# Vectors are as many as is good for them: to unroll what has them makes code, not speed.  And LLVM
# would unroll a short loop of known length before it looks for vectors.
_NO_UNROLLING: Final = '!"llvm.loop.unroll.disable"'
_FOLLOWING: Final = '!"llvm.loop.vectorize.followup_all", !{!"llvm.loop.isvectorized", i32 1}'


@dataclass(frozen=True, slots=True)
class Vectors:
    """How a loop becomes vectors: of how many lanes, how many of them side by side."""

    lanes: int = 0  # none: the loop stays as it is
    copies: int = 1
    written_out: bool = False  # whether vectors of a loop of known length stand in line, no loop


def numbered(text: str, registers: int = 1) -> str:
    """Module text with its loop marks numbered, as LLVM wants metadata.

    `registers`: how many a vector takes.  Where that is several there are fewer copies: all of them
    side by side would not fit, and be kept in memory.

    before: br i1 %v, label %a, label %b, !llvm.loop !{lanes:16x1}
    after:  br i1 %v, label %a, label %b, !llvm.loop !0      and !0 at the end says 16
    """
    notes: list[str] = []

    def number(mark: re.Match[str]) -> str:
        lanes, copies = int(mark.group(1)), max(int(mark.group(2)) // registers, 1)
        name, value = ("width", f"i32 {lanes}") if lanes else ("enable", "i1 false")
        parts = [f'!"llvm.loop.vectorize.{name}", {value}']
        if lanes:
            then = '!"llvm.loop.unroll.full"' if mark.group(3) else _NO_UNROLLING
            parts += [f'!"llvm.loop.interleave.count", i32 {copies}', _NO_UNROLLING]
            parts.append(f"{_FOLLOWING}, !{{{then}}}")
        own = f"!{len(notes)}"
        notes.append(f"{own} = distinct !{{{', '.join([own, *(f'!{{{p}}}' for p in parts)])}}}")
        return own

    body = re.sub(rf"!\{{{LANES}(\d+)x(\d+)(!?)\}}", number, text)
    return "\n".join([body, *notes])


SCALAR: Final = Vectors()


@dataclass(slots=True)
class Loop:
    """A loop that is being written."""

    counter: str
    carried: list[str]  # names of the carried values inside of the loop
    results: list[str]  # their values behind it


@dataclass(slots=True)
class Writer:
    """Lines of one function."""

    lines: list[str] = field(default_factory=list)
    block: str = "entry"  # the block that lines go to now
    _count: int = 0

    def name(self, hint: str = "v") -> str:
        """A new name for a value or block."""
        self._count += 1
        return f"{hint}{self._count}"

    def line(self, text: str) -> None:
        """An instruction without a result."""
        self.lines.append("  " + text)

    def let(self, text: str) -> str:
        """An instruction; the name of its result."""
        value = "%" + self.name()
        self.lines.append(f"  {value} = {text}")
        return value

    def open_block(self, label: str) -> None:
        """Begin a block."""
        self.lines.append(f"{label}:")
        self.block = label

    @contextmanager
    def loop(
        self,
        start: str,
        end: str,
        carried: list[tuple[str, str]],
        hint: str = "loop",
        vectors: Vectors = SCALAR,
    ) -> Iterator[Loop]:
        """Count from `start` to below `end`; `carried` are (type, initial value) pairs.

        The body replaces `loop.carried` by the values for the next iteration; after the loop,
        `loop.results` holds the last ones.  Nothing runs where start >= end.
        """
        head, done = self.name(hint + "_"), self.name(hint + "_done")
        before = self.block
        nonempty = self.let(f"icmp slt i64 {start}, {end}")
        self.line(f"br i1 {nonempty}, label %{head}, label %{done}")
        self.open_block(head)
        counter = "%" + self.name("i")
        mark = len(self.lines)
        inside = ["%" + self.name("c") for _ in carried]
        loop = Loop(counter, list(inside), [])
        yield loop
        following = self.let(f"add nuw nsw i64 {counter}, 1")
        more = self.let(f"icmp slt i64 {following}, {end}")
        last = self.block
        how = f"{vectors.lanes}x{vectors.copies}{'!' * vectors.written_out}"
        note = f"!llvm.loop !{{{LANES}{how}}}"
        self.line(f"br i1 {more}, label %{head}, label %{done}, {note}")
        phis = [f"  {counter} = phi i64 [ {start}, %{before} ], [ {following}, %{last} ]"]
        for (kind, initial), value, next_value in zip(carried, inside, loop.carried, strict=True):
            phis.append(
                f"  {value} = phi {kind} [ {initial}, %{before} ], [ {next_value}, %{last} ]"
            )
        self.lines[mark:mark] = phis
        self.open_block(done)
        for (kind, initial), next_value in zip(carried, loop.carried, strict=True):
            result = "%" + self.name("r")
            self.lines.append(
                f"  {result} = phi {kind} [ {initial}, %{before} ], [ {next_value}, %{last} ]"
            )
            loop.results.append(result)
