"""How much memory a training step takes, and what more or less time would make of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch

from stator.aot.partition.report import Choices
from stator.backend import compile_fx
from stator.core.events import Compilation, last_compilation
from stator.debug.memory_page import memory_html, memory_text
from stator.errors import OptionError
from stator.graph.generators import gpus_in_use, preserved
from stator.options import read_options

WIDTH: Final = 100
_numbers = count()


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

    The model is compiled and called once with the arguments; buffers, arguments and the random
    generators are left as they were.  `options` are those of torch.compile: the point that they
    choose is marked.
    """
    wanted = replace(read_options(None, options), explain_memory=True)
    if not wanted.kernels:
        raise OptionError(
            "kernels=False keeps what eager would keep: there is no other budget to plan for",
            hint="leave the option out",
        )
    records: list[Compilation] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled = compile_fx(module, inputs, options=wanted)
        if (record := last_compilation()) is not None:
            records.append(record)

        def call(*arguments: Any) -> Any:
            before.note(filter(_may_be_written, arguments))  # a closure's buffers are among them
            return compiled(*arguments)

        return call

    def step(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    with _left_alone(model) as before, torch.enable_grad():
        torch.compile(_with_code_of_its_own(step), backend=backend)(*args, **kwargs)
    found = tuple(record.choices for record in records if record.choices is not None)
    if not found:
        raise _nothing_to_plan(records)
    return MemoryPlan(found)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo has never seen.

    It keeps programs by code, up to a limit, and takes sizes that differ from call to call for ones
    that vary.
    """
    assert isinstance(function, FunctionType), "it is written in Python"
    code = function.__code__
    code = code.replace(co_name=f"{code.co_name}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def _nothing_to_plan(records: Sequence[Compilation]) -> OptionError:
    """Why no graph has a curve."""
    if not records:
        return OptionError(
            "no graph of this program was captured: Dynamo left it to eager mode",
            hint="its log says why; where that is the limit of programs for one function, "
            "torch.compiler.reset() empties it",
        )
    reason = next((record.fallback for record in records if record.fallback is not None), None)
    if reason is not None:
        return OptionError(f"this program could not be compiled: {reason}")
    return OptionError(
        "nothing of this program needs a gradient, so its backward keeps nothing",
        hint="give a model whose parameters, or arguments that require gradients",
    )


@dataclass(frozen=True, slots=True)
class _Before:
    """What tensors held that the program may write to."""

    held: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by identity

    def note(self, values: Iterable[Any]) -> None:
        """Remember those that are new."""
        for value in values:
            if isinstance(value, torch.Tensor) and id(value) not in self.held:
                self.held[id(value)] = value, value.detach().clone()

    def put_back(self) -> None:
        """Write what they held into those that hold something else now: writes are counted."""
        with torch.no_grad():
            for value, was in self.held.values():
                is_same = _is_plain(value) and torch.equal(value, was)
                if value.size() == was.size() and not is_same:
                    value.copy_(was)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def _may_be_written(value: Any) -> bool:
    """Whether a graph may update the argument: weights are not, and would take most to remember."""
    return _is_plain(value) and not value.requires_grad


@contextmanager
def _left_alone(model: Any) -> Iterator[_Before]:
    """Put buffers, what is noted besides, and the random generators back to what they were."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    homes = [module.__dict__["_buffers"] for module in modules]
    buffers = [dict(home) for home in homes]
    before = _Before()
    before.note(value for known in buffers for value in known.values())
    with preserved(gpus_in_use()):
        try:
            yield before
        finally:
            for home, known in zip(homes, buffers, strict=True):
                home.update(known)  # the module may have put others in their place
            before.put_back()
