"""How much memory a training step takes, and what more or less time would make of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from stator.aot.partition.report import Choices
from stator.backend import compile_fx
from stator.core.events import last_compilation
from stator.debug.memory_page import memory_html, memory_text
from stator.errors import OptionError
from stator.options import read_options

WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The curves of a program's graphs; `str` draws them, `save` writes them as a page."""

    graphs: tuple[Choices, ...]

    def __str__(self) -> str:
        return "\n\n".join(memory_text(choices, WIDTH) for choices in self.graphs)

    def html(self) -> str:
        """One page, which needs nothing beside itself."""
        return memory_html(self.graphs)

    def save(self, path: str | Path) -> Path:
        """Write the page; returns where."""
        file = Path(path)
        file.write_text(self.html(), encoding="utf-8")
        return file


def memory_plan(
    model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any
) -> MemoryPlan:
    """Time and peak memory of a training step of `model`, over all budgets.

    The model is compiled and called once with the arguments; its buffers and the random generator
    are left as they were.  `options` are those of torch.compile: the point that they choose is
    marked.
    """
    wanted = replace(read_options(None, options), explain_memory=True)
    found: list[Choices] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled = compile_fx(module, inputs, options=wanted)
        record = last_compilation()
        if record is not None and record.choices is not None:
            found.append(record.choices)
        return compiled

    with _left_alone(model), torch.enable_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    if not found:
        raise OptionError(
            "nothing of this program needs a gradient, so its backward keeps nothing",
            hint="give a model whose parameters, or arguments that require gradients",
        )
    return MemoryPlan(tuple(found))


@contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    """Put buffers and the random generator back to what they were."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
