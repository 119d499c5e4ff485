"""An explanation for a terminal."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.table import Table

MEBIBYTE: Final = 1 << 20
MOST_ROWS: Final = 24  # of a table; what is left out is counted

Data = Mapping[str, Any]


def explain_text(data: Data, width: int) -> str:
    """All graphs, one after the other."""
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    for number, graph in enumerate(data["graphs"]):
        if number:
            console.print()
        for part in _graph(graph):
            console.print(part)
    if not data["graphs"]:
        console.print("nothing was compiled")
    for what, key in (("compiled again", "recompilations"), ("left to eager", "uncaptured")):
        for one in data[key]:
            console.print(f"\n{what}: {one['function']}, {one['line']}")
            console.print(f"  {one['reason']}")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def plan_text(half: Data) -> str:
    """The steps of a compiled graph, and its buffers with their places and lives."""
    memory = half["memory"]
    steps = [f"  {step}" for step in half["steps"]]
    buffers = [
        f"  {one['name']}: {one['bytes']} bytes, steps {one['first']} to {one['last']}, "
        + ("its own" if one["offset"] is None else f"arena at {one['offset']}")
        for one in memory["buffers"]
    ]
    head = f"memory: arena of {memory['arena']} bytes, peak {memory['peak']}"
    return "\n".join(["plan", *steps, "", head, *buffers])


def _graph(graph: Data) -> Iterator[RenderableType]:
    yield f"graph {graph['number']}: compiled in {graph['seconds']:.3f} s"
    yield f"cache: {graph['cache']}" + (", but compiled anew" if graph["cache"] == "hit" else "")
    if graph["fallback"] is not None:
        yield f"runs in eager mode: {graph['fallback']}"
    yield f"operators: {graph['generated']} in kernels, {graph['called']} called"
    yield from graph["notes"]
    yield ""
    yield _stages(graph)
    yield from _passes(graph)
    yield from _saved(graph)
    for half in graph["halves"]:
        yield from _half(half)


def _stages(graph: Data) -> Table:
    """Stages that take their time; all passes of a graph together."""
    totals: dict[str, float] = {}
    for stage in graph["stages"]:
        whole, _, part = stage["name"].partition("/")
        name = stage["name"] if part in ("", "plan", "executor") else f"{whole}/passes"
        totals[name] = totals.get(name, 0.0) + stage["seconds"]
    rows = [(name, _milliseconds(seconds)) for name, seconds in totals.items()]
    return _table(("stage", "ms"), rows)


def _passes(graph: Data) -> Iterator[RenderableType]:
    rows = [
        (history["name"], one["name"], str(len(one["rewrites"])), _few(one["rewrites"]))
        for history in graph["graphs"]
        for one in history["passes"]
        if one["rewrites"] or one["edits"]
    ]
    yield ""
    if rows:
        yield _table(("graph", "pass", "rewrites", "of"), rows)
    else:
        yield "no pass found anything to rewrite"


def _few(names: Sequence[str]) -> str:
    """The first names, those that repeat once with a count."""
    told = [f"{name} × {count}" if count > 1 else name for name, count in Counter(names).items()]
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


def _saved(graph: Data) -> Iterator[RenderableType]:
    saved = sorted(graph["saved"], key=lambda one: -one["bytes"])
    if not saved:
        return
    kinds = {"primal": "an input", "value": "an output", "extra": "kept for the backward"}
    rows = [
        (_mebibytes(one["bytes"]), one["name"], one["shape"], kinds[one["kind"]], _line(one))
        for one in saved
    ]
    held = sum(one["bytes"] for one in saved if one["kind"] == "extra")
    yield (
        f"\nsaved for the backward: {len(saved)} values, {_mebibytes(held)} MiB beyond what "
        "inputs and outputs hold anyway"
    )
    yield _table(("MiB", "value", "shape", "is", "line"), rows)


def _half(half: Data) -> Iterator[RenderableType]:
    memory = half["memory"]
    yield (
        f"\n{half['name']}: {len(half['steps'])} steps, {len(half['kernels'])} kernels "
        f"({len(half['code'])} that differ), {len(half['calls'])} calls"
    )
    yield (
        f"memory: {_mebibytes(memory['arena'])} MiB in an arena, "
        f"{_mebibytes(memory['peak'])} MiB at the peak beyond inputs"
    )
    if half["kernels"]:
        yield ""
        yield _kernels(half["kernels"])
    if half["calls"]:
        yield ""
        yield _calls(half["calls"])
    if half["unfused"]:
        yield ""
        yield _unfused(half["unfused"])


def _kernels(kernels: Sequence[Data]) -> Table:
    """Those that take most of the time first."""
    ordered = sorted(kernels, key=lambda one: -one["seconds"])
    rows = [
        (
            one["name"],
            _microseconds(one),
            _mebibytes(one["read"]),
            _mebibytes(one["written"]),
            one["title"].replace("+", ", "),
            _line(one),
        )
        for one in ordered
    ]
    return _table(("kernel", "µs", "MiB read", "written", "operators", "line"), rows)


def _calls(calls: Sequence[Data]) -> Table:
    grouped: dict[tuple[str, str], list[Data]] = {}
    for one in calls:
        grouped.setdefault((one["operator"], one["why"]), []).append(one)
    rows = [
        (operator, str(len(ones)), _microseconds_of(ones), why, _line(ones[0]))
        for (operator, why), ones in grouped.items()
    ]
    return _table(("call", "times", "µs", "why it is no kernel", "first line"), rows)


def _unfused(pairs: Sequence[Data]) -> Table:
    grouped: dict[str, list[Data]] = {}
    for pair in pairs:
        grouped.setdefault(pair["reason"], []).append(pair)
    rows = [
        (str(len(ones)), reason, _pair(ones[0]))
        for reason, ones in sorted(grouped.items(), key=lambda item: -len(item[1]))
    ]
    return _table(("pairs", "not fused, because", "such as"), rows)


def _pair(pair: Data) -> str:
    named = zip(pair["nodes"], pair["kernels"], strict=True)
    return " and ".join(str(node or kernel) for node, kernel in named)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    numbers = {"ms", "µs", "MiB", "MiB read", "written", "rewrites", "times", "pairs"}
    for head in heads:
        wide = head in ("operators", "of", "why it is no kernel", "not fused, because")
        table.add_column(
            head,
            justify="right" if head in numbers else "left",
            overflow="fold",
            ratio=1 if wide else None,
        )
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > MOST_ROWS:
        table.add_row(*(f"and {len(rows) - MOST_ROWS} more", *[""] * (len(heads) - 1)))
    return table


def _line(one: Data) -> str:
    lines: Iterable[str] = one["lines"] if "lines" in one else [one["line"]]
    first = next((line for line in lines if line), None)
    return "" if first is None else PurePath(first).name


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _microseconds(one: Data) -> str:
    return f"{1e6 * one['least']:.1f}" if one["runs"] else "–"


def _microseconds_of(ones: Sequence[Data]) -> str:
    return f"{1e6 * sum(one['least'] for one in ones):.1f}" if ones[0]["runs"] else "–"


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:,.2f}"
