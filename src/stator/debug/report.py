"""What a compilation did, as plain data: the one source of text, JSON and page.

Sizes are bytes, times are seconds, lines are `file:line` of the user's program.  A graph's history
is its first text, and for each pass the edits that lead to the next: `[at, removed, added lines]`.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from importlib.metadata import version
from typing import Any, Final

from stator.core.events import Compilation, Details, NodeText, PassNote
from stator.debug.report_kernels import half_report
from stator.package.archive import own_version

Data = dict[str, Any]

GETITEM: Final = str(operator.getitem)  # it takes a part, and runs nothing


def report(
    records: Sequence[Compilation],
    recompilations: Iterable[Data] = (),
    uncaptured: Iterable[Data] = (),
) -> Data:
    """All that is known of some compilations, and of functions that Dynamo left to eager."""
    graphs = [graph_report(record) for record in records]
    told = {"stator": own_version(), "torch": version("torch")}
    data: Data = {**told, "recompilations": list(recompilations), "graphs": graphs}
    data["uncaptured"] = list(uncaptured)
    data["sources"] = _sources(data)
    return data


def graph_report(record: Compilation) -> Data:
    """One captured graph, with its backward if that was compiled."""
    details = record.details or Details()
    halves = [half_report(name, details) for name in details.plans]
    called = [call for half in halves for call in half["calls"] if call["operator"] != GETITEM]
    return {
        "number": record.number,
        "seconds": record.seconds,
        "cache": record.cache,
        "fallback": record.fallback,
        "generated": record.generated,  # operators in kernels
        "called": len(called),
        "inputs": record.inputs,
        "outputs": record.outputs,
        "step_peak": record.step_peak,
        "stages": [asdict(stage) for stage in record.stages],
        "graphs": histories(details.passes),
        "saved": [asdict(saved) for saved in details.saved],
        "halves": halves,
        "notes": [note for note in record.notes if not _is_told_elsewhere(note)],
    }


def _is_told_elsewhere(note: str) -> bool:
    return ": not fused: " in note or " stays with torch: " in note


def histories(passes: Iterable[PassNote]) -> list[Data]:
    """Graphs, each with what its passes made of it, in order."""
    found: list[Data] = []
    now: dict[str, tuple[Data, tuple[NodeText, ...]]] = {}  # by name: the one that goes on
    for note in passes:
        history, last = now.get(note.graph, ({}, ()))
        if last != note.before or not history:
            history = _begun(note, found)
            found.append(history)
        history["passes"].append(_pass(note))
        history["lines"] |= {name: line for name, _, line in note.after if line}
        now[note.graph] = (history, note.after)
    return found


def _begun(note: PassNote, before: Sequence[Data]) -> Data:
    count = sum(other["graph"] == note.graph for other in before)
    return {
        "name": f"{note.graph}_{count + 1}" if count else note.graph,
        "graph": note.graph,
        "text": [text for _, text, _ in note.before],
        "lines": {name: line for name, _, line in note.before if line},
        "passes": [],
    }


def _pass(note: PassNote) -> Data:
    return {
        "name": note.name,
        "seconds": note.seconds,
        "rewrites": [rewrite.removeprefix(f"{note.name}: ") for rewrite in note.rewrites],
        "edits": list(_edits(note.before, note.after)),
    }


def _edits(before: Sequence[NodeText], after: Sequence[NodeText]) -> Iterator[list[Any]]:
    """What to replace, from the first line to the last, by places in the text before."""
    if before is after:
        return
    old, new = [text for _, text, _ in before], [text for _, text, _ in after]
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind != "equal":
            yield [i1, i2 - i1, new[j1:j2]]


def _sources(data: Data) -> dict[str, str]:
    """The text of every line of the user's program that is mentioned."""
    mentioned: dict[str, None] = {}
    for graph in data["graphs"]:
        for history in graph["graphs"]:
            mentioned |= dict.fromkeys(history["lines"].values())
        for half in graph["halves"]:
            for one in (*half["kernels"], *half["calls"]):
                mentioned |= dict.fromkeys(one["lines"])
    return {line: _source(line) for line in mentioned}


def _source(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
