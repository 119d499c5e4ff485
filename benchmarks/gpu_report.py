"""Tables of what was measured on a GPU: for the screen, and as a section of RESULTS.md.

`python -m benchmarks.gpu_report FILE …` joins files of `python -m benchmarks.gpu` into
benchmarks/gpu.json and writes the section; without files it writes what gpu.json has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu_cases import ORDER
from benchmarks.gpu_record import (
    ALONE,
    DYNAMO,
    EAGER,
    FILE,
    GRAPHS,
    INDUCTOR,
    STATOR,
    GpuRow,
    GpuRun,
    load,
    merged,
    store,
)
from benchmarks.report import NOTHING, geometric_mean, number, without_folders
from benchmarks.results import RESULTS, markdown_table, write_section

NAMES: Final = (EAGER, INDUCTOR, STATOR)
TITLES: Final = {
    EAGER: "eager",
    INDUCTOR: "Inductor",
    STATOR: "stator",
    INDUCTOR + GRAPHS: "Inductor, CUDA graphs",
    STATOR + GRAPHS: "stator, CUDA graphs",
    DYNAMO: "Dynamo, nothing behind it",
    INDUCTOR + ALONE: "Inductor's graph, without Dynamo",
    STATOR + ALONE: "stator's graph, without Dynamo",
}
SECTION: Final = "gpu"
GIB: Final = 2**30
WANTED: Final = 0.8  # of copy bandwidth, on the device, where memory is the limit
KERNEL_LEGEND: Final = (
    "Kernels: *speed* is over eager (above 1 is faster), of a call that is waited for, so host time"
    " is in it; median and quartiles of ratios, contenders called in turn. *device* is the time on"
    " the device alone, of calls that wait in its queue, with inputs that take turns. *of copy* is"
    " the bytes that must move (each input read once, each output written once) over device time,"
    " as a share of what a large copy moves. *error* is against float64, the largest of an element;"
    " *compile* the first call less a warm one, caches empty, Dynamo included; in brackets, after"
    " Dynamo."
)
MODEL_LEGEND: Final = (
    "Models in bfloat16, random weights, no dropout: *speed* is of steps one after the other, host"
    " time included. Training is forward, loss and backward; no optimizer. *peak* is what a step"
    " holds on the device beyond model and batch. *error* is the largest of a result or gradient,"
    " over its norm."
)


# ---------------------------------------------------------------------------------------------
# Cells


def three(row: GpuRow, of: str, scale: float, form: str) -> str:
    """Medians of the three contenders."""
    medians = [row.median(name, of) for name in NAMES]
    return " / ".join(number(None if m is None else scale * m, form) for m in medians)


def speed_cell(row: GpuRow, name: str) -> str:
    """Speed over eager with its quartiles; what went wrong otherwise."""
    outcome = row.outcomes.get(name)
    if outcome is not None and outcome.error:
        return "error"
    speed = row.speed(name, EAGER)
    return NOTHING if speed is None else f"{speed:.2f}"


def error_cell(row: GpuRow) -> str:
    """Errors of eager and Stator."""
    pair = [row.outcomes.get(name) for name in (EAGER, STATOR)]
    return " / ".join(number(one.off if one else None, ".1e") for one in pair)


def compile_cell(row: GpuRow) -> str:
    """Seconds of Inductor and Stator, and what of them came after Dynamo."""
    pair = [row.outcomes.get(name) for name in (INDUCTOR, STATOR)]
    whole, own = (
        " / ".join(number(getattr(one, part) if one else None) for one in pair)
        for part in ("compile", "backend")
    )
    return f"{whole} ({own})"


def peak_cell(row: GpuRow) -> str:
    """GiB of the three contenders."""
    peaks = [outcome.peak if (outcome := row.outcomes.get(name)) else None for name in NAMES]
    return " / ".join(number(None if p is None else p / GIB) for p in peaks)


def copy_cell(row: GpuRow) -> str:
    """Shares of copy bandwidth, of the three contenders; rates of products otherwise."""
    if row.memory_bound:
        return " / ".join(number(row.of_copy(name)) for name in NAMES)
    if not row.flops:
        return NOTHING
    medians = [row.median(name, "device") for name in NAMES]
    rates = [None if m is None else row.flops / m / 1e12 for m in medians]
    return " / ".join(number(rate, ".0f") for rate in rates) + " TFLOP/s"


def behind_cell(row: GpuRow) -> str:
    """Who is faster than Stator."""
    return ", ".join(f"**{TITLES[name]}**" for name in row.ahead_of_stator())


# ---------------------------------------------------------------------------------------------
# For the screen


def progress_line(row: GpuRow) -> str:
    """One line while rows are measured."""
    if row.error:
        return f"{row.name:18} {row.error}"
    speeds = [f"{name} {speed_cell(row, name)}" for name in row.outcomes if name != EAGER]
    said = [f"{name}: {o.error}" for name, o in row.outcomes.items() if o.error]
    return "  ".join([f"{row.name:18} {row.seconds:5.1f} s", *speeds, *said])


def _screen_line(row: GpuRow) -> str:
    whole = three(row, "whole", 1e6, ".0f")
    device = three(row, "device", 1e6, ".0f")
    cells = [f"{row.name:18}", f"{whole:>22}", f"{device:>22}", f"{copy_cell(row):>18}"]
    if row.kind in ("infer", "train"):
        cells[-1] = f"{peak_cell(row):>18}"
    ahead = ",".join(row.ahead_of_stator())
    wrong = " ".join(f"{n} WRONG" for n, outcome in row.outcomes.items() if outcome.is_wrong)
    return " ".join([*cells, f"{compile_cell(row):>27}", f"{error_cell(row):>17}", ahead, wrong])


def text_table(run: GpuRun) -> str:
    """A short table: medians of eager / Inductor / Stator."""
    machine = ", ".join(f"{key} {number_or_text(value)}" for key, value in run.machine.items())
    lines = [
        machine,
        f"{'e / i / s':18} {'whole us':>22} {'device us':>22} {'of copy|peak GiB':>18}"
        f" {'compile i / s (backend)':>27} {'error e / s':>17} ahead of stator",
    ]
    for row in run.rows:
        if row.error or not row.outcomes:
            lines.append(f"{row.name:18} {row.error}")
        elif row.kind == "host":
            lines.append(f"host us: {host_line(row)}")
        else:
            lines.append(_screen_line(row).rstrip())
    lines += [f"{row.name}: {line}" for row in run.rows for line in _failures(row)]
    slow = [row for row in run.rows if row.memory_bound and (row.of_copy(STATOR) or 1) < WANTED]
    if slow:
        lines.append(f"below {WANTED} of copy: {', '.join(row.name for row in slow)}")
    return "\n".join(lines)


def number_or_text(value: object) -> str:
    """A short form of either."""
    return format(value, ".4g") if isinstance(value, float) else str(value)


def host_line(row: GpuRow) -> str:
    """Medians of every way to call."""
    return ", ".join(f"{TITLES.get(name, name)} {micro_tenths(row, name)}" for name in row.outcomes)


def micro_tenths(row: GpuRow, name: str) -> str:
    """Microseconds with their quartiles."""
    spread = row.spread(name, "whole")
    if spread is None:
        return NOTHING
    return f"{1e6 * spread.median:.1f} ({1e6 * spread.low:.1f}–{1e6 * spread.high:.1f})"


def _failures(row: GpuRow) -> Iterator[str]:
    for name, outcome in row.outcomes.items():
        if outcome.error:
            yield f"{name}: {outcome.error}"
    if row.recompiled:
        yield "a graph was compiled while calls were timed"


# ---------------------------------------------------------------------------------------------
# RESULTS.md


def kernel_table(rows: Sequence[GpuRow]) -> str:
    """The Markdown table of kernels."""
    headings = ["whole µs, eager / Inductor / stator", "device µs", "of copy"]
    return _table(rows, ["kernel", *headings], (1e6, ".0f"), copy_cell)


def model_table(rows: Sequence[GpuRow]) -> str:
    """The Markdown table of models."""
    headings = ["step ms, eager / Inductor / stator", "device ms", "peak GiB"]
    return _table(rows, ["model", *headings], (1e3, ".2f"), peak_cell)


def _table(
    rows: Sequence[GpuRow],
    own: Sequence[str],
    unit: tuple[float, str],
    last: Callable[[GpuRow], str],
) -> str:
    """Rows with times in a unit, and one column that is of their kind."""
    headings = [own[0], "size", "stator", "Inductor", "behind", *own[1:]]
    headings += ["error, eager / stator", "compile s, Inductor / stator"]
    lines = [
        [
            row.name,
            row.size,
            speed_cell(row, STATOR),
            speed_cell(row, INDUCTOR),
            behind_cell(row),
            three(row, "whole", *unit),
            three(row, "device", *unit),
            last(row),
            error_cell(row),
            compile_cell(row),
        ]
        for row in rows
        if row.outcomes
    ]
    return markdown_table(headings, [*lines, _means(rows, len(headings))])


def _means(rows: Sequence[GpuRow], width: int) -> list[str]:
    """Geometric means over the rows that all three finished, and over compile times."""
    whole = [row for row in rows if all(row.median(name, "whole") for name in NAMES)]
    means = []
    for name in (STATOR, INDUCTOR):
        speeds = [speed.median if (speed := row.speed(name, EAGER)) else None for row in whole]
        means.append(number(geometric_mean(speeds)))
    behind = f"{sum(bool(row.ahead_of_stator()) for row in rows)} rows"
    seconds = [
        number(geometric_mean(row.outcomes[name].compile or None for row in whole))
        for name in (INDUCTOR, STATOR)
    ]
    line = [f"**geometric mean** of {len(whole)}", "", *means, behind]
    return [*line, *[""] * (width - len(line) - 1), " / ".join(seconds)]


def host_table(row: GpuRow) -> str:
    """The Markdown table of the host row."""
    lines = [[TITLES.get(name, name), micro_tenths(row, name)] for name in row.outcomes]
    return markdown_table([f"host time of {row.size}", "µs a call"], lines)


def graph_lines(rows: Sequence[GpuRow]) -> list[str]:
    """What CUDA graphs gain, where they took part."""
    lines = []
    for row in rows:
        cells = [
            f"{TITLES[name]} {speed:.2f}"
            for name in (STATOR + GRAPHS, INDUCTOR + GRAPHS)
            if (speed := row.speed(name, EAGER))
        ]
        if cells:
            lines.append(f"- {row.name}, over eager: {', '.join(cells)}")
    return lines


def remarks(rows: Sequence[GpuRow]) -> list[str]:
    """What went wrong, a line each."""
    lines = [f"- {row.name}: not measured: {row.error}" for row in rows if row.error]
    lines += [f"- {row.name}, {line}" for row in rows for line in _failures(row)]
    return [without_folders(line) for line in lines]


def section(run: GpuRun) -> str:
    """The section of RESULTS.md."""
    kernels, models = run.of_kinds("kernel"), run.of_kinds("infer", "train")
    hosts = [row for row in run.of_kinds("host") if row.outcomes]
    machine = ", ".join(f"{key} {number_or_text(value)}" for key, value in run.machine.items())
    parts = [
        f"Measured by `make gpu-bench` ({machine}).",
        *([KERNEL_LEGEND, kernel_table(kernels)] if any(row.outcomes for row in kernels) else []),
        *([MODEL_LEGEND, model_table(models)] if any(row.outcomes for row in models) else []),
        "\n".join(graph_lines(models)),
        *(host_table(row) for row in hosts),
        "\n".join(remarks(run.rows)),
    ]
    return "\n\n".join(part for part in parts if part)


def write_results(run: GpuRun, file: Path = RESULTS) -> None:
    """Put the section into RESULTS.md; at its end, if it has none yet."""
    text = file.read_text(encoding="utf-8")
    if f"<!-- {SECTION} -->" not in text:
        marked = f"\n## NVIDIA GPUs\n\n<!-- {SECTION} -->\n<!-- /{SECTION} -->\n"
        file.write_text(text.rstrip("\n") + "\n" + marked, encoding="utf-8")
    write_section(SECTION, section(run), file)


def main(arguments: Sequence[str]) -> None:
    """Join files, keep them as gpu.json, write the section."""
    if arguments:
        store(merged([load(Path(name)) for name in arguments], ORDER), FILE)
    run = load(FILE)
    write_results(run)
    print(text_table(run))


if __name__ == "__main__":
    main(sys.argv[1:])
