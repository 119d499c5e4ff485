"""What a compilation did, in words: stages, cache, plans with their memory, decisions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stator.backend import compile_fx
from stator.core.events import Compilation, last_compilation
from stator.options import read_options


@dataclass(frozen=True, slots=True)
class Explanation:
    """The graphs of one call, in the order in which they were compiled; `str` is the text."""

    graphs: tuple[GraphExplanation, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs))


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """One captured graph."""

    record: Compilation
    plans: Mapping[str, str]  # of the forward, and of the backward if it ran, with their memory

    def __str__(self) -> str:
        record = self.record
        lines = [f"graph {record.number}: compiled in {record.seconds:.3f} s"]
        lines += [f"  {stage.name}: {1e3 * stage.seconds:.1f} ms" for stage in record.stages]
        if record.fallback is not None:
            lines.append(f"runs in eager mode: {record.fallback}")
        lines += [f"operators: {record.generated} in kernels, {len(record.called)} called"]
        lines += [f"  {note}" for note in record.notes]
        for name, text in self.plans.items():
            lines += [f"{name}:", *(f"  {line}" for line in text.splitlines())]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Compile `function`, call it once with the arguments, and say what was done.

    Compiled anew, whatever the cache holds: a program from there has no stages to show.  A backward
    is explained if the call itself runs one.
    """
    found: list[GraphExplanation] = []
    with tempfile.TemporaryDirectory() as folder:
        records: list[tuple[Compilation, Path]] = []

        def backend(module: Any, inputs: Any) -> Any:
            own = Path(folder) / str(len(records))
            compiled = compile_fx(module, inputs, options=read_options(None, {"dump_dir": own}))
            record = last_compilation()
            assert record is not None, "a compilation leaves a record"
            records.append((record, own))
            return compiled

        torch.compile(function, backend=backend)(*args, **kwargs)
        for record, own in records:
            files = sorted(own.rglob("*_plan.txt"))
            plans = {file.name.removesuffix("_plan.txt"): file.read_text() for file in files}
            found.append(GraphExplanation(record, plans))
    return Explanation(tuple(found))
