"""What a compilation did: stages, passes, kernels, calls, memory; as text, data and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from stator.backend import compile_fx
from stator.core.events import Compilation, collected_records
from stator.debug.explain_text import explain_text, plan_text
from stator.debug.page import page
from stator.debug.report import report
from stator.options import read_options
from stator.torch_api import compiled_frames

WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """One captured graph."""

    data: Mapping[str, Any]

    @property
    def plans(self) -> dict[str, str]:
        """The plan of the forward, and of the backward if it ran, with their memory."""
        return {half["name"]: plan_text(half) for half in self.data["halves"]}

    @property
    def kernels(self) -> list[Mapping[str, Any]]:
        """Every kernel, of both directions."""
        return [kernel for half in self.data["halves"] for kernel in half["kernels"]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The graphs of a program, in the order in which they were compiled; `str` is the text."""

    data: Mapping[str, Any]

    @property
    def graphs(self) -> tuple[GraphExplanation, ...]:
        """The graphs, each by itself."""
        return tuple(GraphExplanation(graph) for graph in self.data["graphs"])

    def __str__(self) -> str:
        return self.text(WIDTH)

    def text(self, width: int) -> str:
        """For a terminal that wide."""
        return explain_text(self.data, width)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; docs/debugging.md says what there is."""
        return dict(self.data)

    def json(self) -> str:
        """The same as text."""
        return json.dumps(self.data)

    def html(self) -> str:
        """One page, which needs nothing beside itself."""
        return page(self.data)

    def save(self, path: str | Path) -> Path:
        """Write the page, or the data if the name ends in .json; returns where."""
        file = Path(path)
        text = self.json() if file.suffix == ".json" else self.html()
        file.write_text(text, encoding="utf-8")
        return file


def explain(
    function: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any
) -> Explanation:
    """Compile `function`, call it once with the arguments, and say what was done.

    Compiled anew, whatever the cache holds: a program from there has no stages to show.  A backward
    is explained if the call itself runs one.  `options` are those of torch.compile.
    """
    wanted = replace(read_options(None, options), explain=True)

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, options=wanted)

    with watched() as seen:
        torch.compile(function, backend=backend)(*args, **kwargs)
    return seen.explanation()


@dataclass(slots=True)
class Seen:
    """What is compiled meanwhile."""

    records: list[Compilation]
    before: list[Any] = field(default_factory=compiled_frames)

    def explanation(self) -> Explanation:
        """What there is to say of it by now."""
        known = {id(frame) for frame in self.before}
        frames = [frame for frame in compiled_frames() if id(frame) not in known]
        asked = [record for record in self.records if record.details is not None]
        return Explanation(report(asked, _recompilations(frames), _uncaptured(frames)))


@contextmanager
def watched() -> Iterator[Seen]:
    """Explains what is compiled inside, under Options.explain."""
    with collected_records() as records:
        yield Seen(records)


def _recompilations(frames: list[Any]) -> Iterator[dict[str, Any]]:
    """Frames that Dynamo compiled again, and the guard that made it do so."""
    for frame in frames:
        if frame.recompile_reason:
            yield {
                "function": frame.co_name,
                "line": f"{frame.co_filename}:{frame.co_firstlineno}",
                "number": str(frame.compile_id),
                "reason": str(frame.recompile_reason),
            }


def _uncaptured(frames: list[Any]) -> Iterator[dict[str, Any]]:
    """Frames that Dynamo gave up, which eager runs: where, and what it says of that."""
    for frame in frames:
        if frame.fail_reason:
            reason, *_ = str(frame.fail_reason).split("\n\n")  # what follows is for its developers
            line = f"{frame.fail_user_frame_filename}:{frame.fail_user_frame_lineno}"
            yield {"function": frame.co_name, "line": line, "reason": reason}
