"""What a backward keeps, drawn: the curve of time over peak memory, and the largest values.

As text for a terminal, and as one HTML page that needs nothing from elsewhere.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rich.console import Console
from rich.table import Table

from stator.aot.partition.report import Choices, Point, Value

MEBIBYTE: Final = 1 << 20
MOST_LINES: Final = 20  # values in a terminal
MOST_ROWS: Final = 500  # values on a page
HEIGHT: Final = 12  # lines of a curve in a terminal
TICKS: Final = 5  # at most, on an axis
MARGIN: Final = 0.04  # of an axis, beyond its outermost points
HEADINGS: Final = ("MiB", "operator", "layer", "line", "is", "why")


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of numbers, a little wider than what is shown on it."""

    low: float
    high: float

    @staticmethod
    def over(values: Iterable[float]) -> Axis:
        """The axis that shows them all."""
        shown = list(values)
        low, high = min(shown), max(shown)
        room = MARGIN * (high - low) or 0.05 * abs(high) or 1.0
        return Axis(low - room, high + room)

    def place(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers on it."""
        rough = (self.high - self.low) / TICKS
        power: float = 10.0 ** math.floor(math.log10(rough))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * n for n in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Plane:
    """Time over peak memory: all ways to cut a program that were found, and the chosen one."""

    points: tuple[Point, ...]
    chosen: Point
    across: Axis  # MiB at the peak
    up: Axis  # time, against the quickest

    @staticmethod
    def of(choices: Choices) -> Plane:
        """That of one program."""
        points = tuple(sorted({*choices.points, choices.chosen}, key=lambda one: one.peak))
        across = Axis.over(_mebibytes(point.peak) for point in points)
        return Plane(points, choices.chosen, across, Axis.over(point.time for point in points))

    def places(self) -> Iterator[tuple[Point, float, float]]:
        """Every point with where it stands, from 0 to 1, the chosen one last."""
        for point in sorted(self.points, key=lambda one: one == self.chosen):
            yield point, self.across.place(_mebibytes(point.peak)), self.up.place(point.time)


def _mebibytes(count: int) -> float:
    return count / MEBIBYTE


def _number(value: float) -> str:
    """Short: three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def told(point: Point) -> str:
    """A point in words."""
    return (
        f"{_number(_mebibytes(point.peak))} MiB at the peak, {point.time:.3f} of the quickest's"
        f" time, {_number(_mebibytes(point.saved))} MiB saved for the backward: {point.label}"
    )


def cells(value: Value) -> tuple[str, ...]:
    """A value's row in a table."""
    size = f"{_mebibytes(value.bytes):,.2f}"
    way = "saved" if value.saved else "recomputed"
    return size, value.operator, value.layer, value.line, way, value.why


def summary(choices: Choices) -> list[str]:
    """What there is to say of a program beside its curve, a line each."""
    saved = [value for value in choices.values if value.saved]
    lines = [
        f"chosen: {told(choices.chosen)}",
        f"parameters and inputs: {_number(_mebibytes(choices.inputs))} MiB;"
        f" {len(saved)} values are saved, {len(choices.values) - len(saved)} recomputed",
    ]
    if choices.holders:
        lines.append(f"alive at the least peak that can be had: {', '.join(choices.holders)}")
    return lines


def memory_text(choices: Choices, width: int) -> str:
    """The curve, the choice in words and the largest values, for a terminal that wide."""
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    console.print("\n".join(_curve(Plane.of(choices), width)), no_wrap=True, overflow="crop")
    console.print()
    for line in summary(choices):
        console.print(line)
    console.print()
    console.print(_table(choices.values[:MOST_LINES]))
    if (more := len(choices.values) - MOST_LINES) > 0:
        console.print(f"and {more} smaller ones")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _table(values: Sequence[Value]) -> Table:
    """Values, a row each; a column in which nothing stands would only take room."""
    columns = [*zip(HEADINGS, *map(cells, values), strict=True)]
    shown = [column for column in columns if any(column[1:]) or not values]
    table = Table(box=None, pad_edge=False)
    for heading, *_ in shown:
        table.add_column(
            heading,
            justify="right" if heading == HEADINGS[0] else "left",
            overflow="fold",  # the number of a line is at the end of its path
        )
    for row in list(zip(*shown, strict=True))[1:]:
        table.add_row(*row)
    return table


def _curve(plane: Plane, width: int) -> Iterator[str]:
    """Lines of a drawing: `●` the chosen point, `·` the others."""
    labels = {
        round((HEIGHT - 1) * (1 - plane.up.place(tick))): f"{tick:.4g}" for tick in plane.up.ticks()
    }
    side = max(map(len, labels.values()), default=0)
    columns = max(8, min(width, 100) - side - 3)
    grid = [[" "] * columns for _ in range(HEIGHT)]
    for point, across, up in plane.places():
        row, column = round((HEIGHT - 1) * (1 - up)), round((columns - 1) * across)
        grid[row][column] = "●" if point == plane.chosen else "·"
    yield "time of a step, against the quickest"
    for row, line in enumerate(grid):
        label = labels.get(row, "")
        yield f"{label:>{side}} {'┤' if label else '│'}{''.join(line)}"
    yield f"{'':>{side}} └{'─' * columns}"
    yield f"{'':>{side}}  {_scale(plane.across, columns)}"
    yield f"{'':>{side}}  {'MiB at the peak':>{columns}}"


def _scale(axis: Axis, columns: int) -> str:
    """Numbers below an axis, those left out that would touch the one before."""
    line = ""
    for tick in axis.ticks():
        label, at = _number(tick), round((columns - 1) * axis.place(tick))
        begin = max(0, min(columns - len(label), at - len(label) // 2))
        if not line or begin > len(line):
            line = f"{line:<{begin}}{label}"
    return line


WIDE: Final = 720  # of a drawing, in its own units
TALL: Final = 360
LEFT: Final = 64
BELOW: Final = 48
ABOVE: Final = 16
RIGHT: Final = 24

STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1f23; --soft: #5f6670; --line: #d9dde2;
  --way: #2a6fdb; --chosen: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e7eaee; --soft: #9aa3ad;
  --line: #333940; --way: #7fb1ff; --chosen: #ff9a5c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; max-width: 56rem; height: auto; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); }
.way { fill: none; stroke: var(--way); stroke-opacity: .5; }
.point { fill: var(--way); }
.chosen { fill: var(--chosen); stroke: var(--paper); stroke-width: 2; }
svg .mark { fill: var(--chosen); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: right; font-variant-numeric: tabular-nums; }
td:nth-child(n+2):nth-child(-n+4) { font-family: ui-monospace, monospace; }
tr.recomputed td { color: var(--soft); }
"""


def memory_html(choices: Sequence[Choices]) -> str:
    """One page of all programs."""
    body = "\n".join(_section(one, number) for number, one in enumerate(choices, 1))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What the backward keeps</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What the backward keeps</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(choices: Choices, number: int) -> str:
    lines = "".join(f"<p>{escape(line)}</p>\n" for line in summary(choices))
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    rows = "\n".join(map(_row, choices.values[:MOST_ROWS]))
    more = len(choices.values) - MOST_ROWS
    rest = f"<p>and {more} smaller ones</p>\n" if more > 0 else ""
    return (
        f"<section>\n<h2>Program {number}</h2>\n{_drawing(Plane.of(choices))}\n{lines}"
        f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f"</table></div>\n{rest}</section>"
    )


def _row(value: Value) -> str:
    inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells(value))
    kind = "saved" if value.saved else "recomputed"
    return f'<tr class="{kind}" title="{escape(value.name)}">{inside}</tr>'


def _x(place: float) -> str:
    return f"{LEFT + place * (WIDE - LEFT - RIGHT):.1f}"


def _y(place: float) -> str:
    return f"{TALL - BELOW - place * (TALL - BELOW - ABOVE):.1f}"


def _drawing(plane: Plane) -> str:
    """The curve as SVG; every point says on hovering what it is."""
    parts = [*_grid(plane)]
    ordered = sorted(plane.places(), key=lambda placed: placed[0].peak)
    path = " ".join(f"{_x(across)},{_y(up)}" for _, across, up in ordered)
    parts.append(f'<polyline class="way" points="{path}"/>')
    for point, across, up in plane.places():
        kind, radius = ("chosen", 7) if point == plane.chosen else ("point", 4)
        parts.append(
            f'<circle class="{kind}" cx="{_x(across)}" cy="{_y(up)}" r="{radius}">'
            f"<title>{escape(told(point))}</title></circle>"
        )
        if point == plane.chosen:
            side = "end" if across > 0.85 else "start"
            shift = -12 if across > 0.85 else 12
            parts.append(
                f'<text class="mark" x="{_x(across)}" y="{_y(up)}" dx="{shift}" dy="-8"'
                f' text-anchor="{side}">chosen</text>'
            )
    return (
        f'<svg viewBox="0 0 {WIDE} {TALL}" role="img" aria-label="Time of a step over its peak'
        f' memory; chosen: {escape(told(plane.chosen))}">\n' + "\n".join(parts) + "\n</svg>"
    )


def _grid(plane: Plane) -> Iterator[str]:
    """Lines at round numbers, and what the axes are."""
    left, right, bottom, top = _x(0), _x(1), _y(0), _y(1)
    for tick in plane.across.ticks():
        x = _x(plane.across.place(tick))
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{top}"/>'
        yield f'<text x="{x}" y="{bottom}" dy="18" text-anchor="middle">{_number(tick)}</text>'
    for tick in plane.up.ticks():
        y = _y(plane.up.place(tick))
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left}" y="{y}" dx="-8" dy="4" text-anchor="end">{tick:.4g}</text>'
    yield f'<text x="{right}" y="{TALL - 8}" text-anchor="end">peak memory, MiB</text>'
    yield (
        f'<text transform="translate(14 {top}) rotate(-90)" text-anchor="end">'
        "time, of the quickest's</text>"
    )
