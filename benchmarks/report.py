"""Tables of what was measured: ratios first, then times, limits and compilation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from benchmarks.case import Kind
from benchmarks.record import (
    CONTENDERS,
    EAGER,
    FROZEN,
    INDUCTOR,
    ONNX_RUNTIME,
    OPENVINO,
    OTHERS,
    STATOR,
    STATOR_FROZEN,
    Outcome,
    Row,
)
from benchmarks.results import markdown_table
from benchmarks.spread import Spread

TITLES: Final = {
    EAGER: "eager",
    STATOR: "stator",
    STATOR_FROZEN: "stator frozen",
    INDUCTOR: "Inductor",
    FROZEN: "Inductor frozen",
    ONNX_RUNTIME: "ONNX Runtime",
    OPENVINO: "OpenVINO",
}
DISTURBED: Final = 0.05  # share of the cores
NOTHING: Final = "–"
LEGEND: Final = (
    "Speed is over eager (above 1 is faster): median and quartiles of ratios, contenders called in"
    " turn. *behind* names who is faster than stator, frozen against frozen. *limit* is what the"
    " bytes that must move take at the speed of a copy of that size in the same rounds, or the"
    " products at the speed of a matrix product, whichever is longer. *compile* is the backend's"
    " part of the first call, caches empty and the backward's graph included; *first call* is all"
    " of it, Dynamo too."
    " *foreign* is the share of the cores that other processes used; a star: disturbed."
)


def number(value: float | None, form: str = ".2f") -> str:
    """`value`, if there is one."""
    return NOTHING if value is None else format(value, form)


def speed_cell(row: Row, name: str) -> str:
    """Speed over eager with its quartiles; what went wrong otherwise."""
    outcome = row.outcomes.get(name)
    if outcome is not None and outcome.error:
        return "error"
    speed = row.speed(name, EAGER)
    return NOTHING if speed is None else f"{speed:.2f}"


def name_cell(row: Row) -> str:
    """The row's name; a star if it was disturbed."""
    return f"{row.name} \\*" if is_disturbed(row) else row.name


def is_disturbed(row: Row) -> bool:
    """Others used the machine, or a compiler did, while calls were timed."""
    return row.recompiled or (row.foreign is not None and row.foreign > DISTURBED)


def compiler_names(rows: Sequence[Row]) -> list[str]:
    """The compilers that took part in some row."""
    return [n for n in CONTENDERS if n != EAGER and any(n in row.outcomes for row in rows)]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def complete(rows: Sequence[Row]) -> list[Row]:
    """Rows in which every contender was timed: means over others would not compare."""
    names = [EAGER, *(name for name in compiler_names(rows) if name not in OTHERS)]
    return [row for row in rows if all(row.timed(name) for name in names)]


def median_speed(row: Row, name: str) -> float | None:
    """Median of the speed over eager."""
    speed: Spread | None = row.speed(name, EAGER)
    return speed.median if speed else None


def table(rows: Sequence[Row], first: str) -> str:
    """The Markdown table, with geometric means at the bottom."""
    names = compiler_names(rows)
    compilers = [name for name in names if name not in OTHERS]

    def seconds(row: Row, name: str, of: Callable[[Outcome], float | None]) -> str:
        outcome = row.outcomes.get(name)
        return number(of(outcome) if outcome else None)

    headings = [
        first,
        *(TITLES[n] for n in names),
        "behind",
        *(f"{TITLES[n]} ms" for n in (EAGER, *names)),
        *(f"{TITLES[n]} / limit" for n in names),
        *(f"{TITLES[n]} compile s" for n in compilers),
        *(f"{TITLES[n]} first call s" for n in names),
        "faults a call",
        "foreign",
    ]
    lines = [
        [
            name_cell(row),
            *(speed_cell(row, n) for n in names),
            ", ".join(f"**{TITLES[n]}**" for n in row.ahead_of_stator()),
            *(number(row.milliseconds(n)) for n in (EAGER, *names)),
            *(number(row.over_limit(n), ".1f") for n in names),
            *(seconds(row, n, lambda o: o.backend) for n in compilers),
            *(seconds(row, n, lambda o: o.first_call) for n in names),
            faults_cell(row, [EAGER, *names]),
            number(row.foreign, ".0%"),
        ]
        for row in rows
        if row.outcomes
    ]
    return markdown_table(headings, [*lines, means_line(rows, names, len(headings))])


def faults_cell(row: Row, names: Sequence[str]) -> str:
    """Pages faulted in a call, one number for each contender."""
    timed = [row.timed(name) for name in names]
    return " / ".join(number(outcome.faults if outcome else None, ".0f") for outcome in timed)


def means_line(rows: Sequence[Row], names: Sequence[str], width: int) -> list[str]:
    """Geometric means over the rows that all contenders finished."""
    whole = complete(rows)

    def compile_seconds(name: str) -> list[float | None]:
        outcomes = [row.timed(name) for row in whole]
        return [outcome.backend or None if outcome else None for outcome in outcomes]

    line = [
        f"**geometric mean** of {len(whole)}",
        *(number(geometric_mean(median_speed(row, n) for row in whole)) for n in names),
        f"{sum(bool(row.ahead_of_stator()) for row in rows)} rows",
        *("" for _ in (EAGER, *names)),
        *(number(geometric_mean(row.over_limit(n) for row in whole), ".1f") for n in names),
        *(number(geometric_mean(compile_seconds(n))) for n in names if n not in OTHERS),
    ]
    return [*line, *[""] * (width - len(line))]


def without_folders(text: str) -> str:
    """The text with the folders of this machine cut from its paths."""
    return re.sub(r"(?<!\w)(?:/[\w.-]+)+/(?=[\w.-])", "", text)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What went wrong or was disturbed, a line each."""
    lines = []
    for row in rows:
        if row.error:
            lines.append(f"- {row.name}: not measured: {without_folders(row.error)}")
        for name, outcome in row.outcomes.items():
            if outcome.error:
                lines.append(f"- {row.name}, {TITLES[name]}: {without_folders(outcome.error)}")
            elif name not in (EAGER, *OTHERS) and not outcome.graphs:
                lines.append(f"- {row.name}, {TITLES[name]}: Dynamo captured nothing, eager ran")
        if row.foreign is not None and row.foreign > DISTURBED:
            lines.append(f"- {row.name}: disturbed, others used {row.foreign:.0%} of the cores")
        if row.recompiled:
            lines.append(f"- {row.name}: disturbed, a graph was compiled while calls were timed")
    return lines


def copy_rates(rows: Sequence[Row]) -> str:
    """How fast a copy was, from the slowest row to the fastest."""
    rates = [rate / 1e9 for row in rows if (rate := row.copy_rate())]
    if not rates:
        return "not measured"
    return f"{min(rates):.0f} to {max(rates):.0f} GB/s, by the size of the row"


def section(rows: Sequence[Row], kind: Kind) -> str:
    """The section of RESULTS.md for one kind of row."""
    counts = [len(o.times) for row in rows if (o := row.timed(EAGER))]
    rounds = f"{min(counts)} to {max(counts)} rounds" if counts else "no rounds"
    days = sorted({row.day for row in rows})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    kept = "reused" if all(row.pages_kept for row in rows if row.outcomes) else "not reused"
    note = (
        f"Copies: {copy_rates(rows)}. {rounds}, {when}; freed memory is {kept}. "
        f"{rows[0].conditions}."
    )
    body = table(rows, "kernel" if kind == "micro" else "model")
    parts = [f"{LEGEND} Measured by `make bench`.", body, note, "\n".join(remarks(rows))]
    return "\n\n".join(part for part in parts if part)
