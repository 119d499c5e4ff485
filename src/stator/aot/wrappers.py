"""Generated prologue and epilogue: from the user's arguments to a graph's, and back.

The code is straight-line Python, written for one program: what a program does not do costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stator.aot.metadata import Mutation, OutputFact, Program, Source
from stator.aot.subclasses import Layout, Plain, Wrapped, put_together, width
from stator.aot.views import View
from stator.core import source as text
from stator.core.torch_types import Boxed
from stator.torch_api import BELOW_AUTOGRAD, below_autograd, preserve_version

Call = Callable[..., tuple[Any, ...]]


def inference_call(program: Program, graph: Boxed) -> Call:
    """A function from the program's inputs to its outputs, around a forward graph."""
    writer = Writer(program)
    writer.open("call", [writer.argument(i) for i in range(len(program.inputs))])
    writer.run_graph(graph, writer.plain_values())
    writer.rebuild_values()
    writer.epilogue()
    return writer.load("call")


def training_call(program: Program, apply: Callable[..., Any], cloned: list[int]) -> Call:
    """A function from inputs to outputs, around the autograd function `apply`.

    Inputs in `cloned` are about to be overwritten while higher derivatives may need them: a clone
    taken here, where autograd sees it, goes along.
    """
    writer = Writer(program)
    arguments = [writer.argument(i) for i in range(len(program.inputs))]
    writer.open("call", arguments)
    clones = ", ".join(f"{i}: x{i}.clone()" for i in cloned)
    names = [f"v{i}" for i in range(len(program.values))]
    writer.source.names |= {"apply": apply, "enable_grad": torch.enable_grad}
    # Traced with grad mode off, yet with a backward: the program turns it on inside.
    mode = "" if torch.is_grad_enabled() else "with enable_grad(): "
    writer.source.add(f"{mode}{', '.join(names)}, = apply({{{clones}}}, {', '.join(arguments)})")
    writer.epilogue()
    return writer.load("call")


@dataclass(slots=True)
class Writer:
    """Writes the parts of wrappers for one program."""

    program: Program
    source: text.Source = field(default_factory=text.Source)
    _views: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source.names |= {
            "below_autograd": below_autograd,
            "BELOW": BELOW_AUTOGRAD,
            "increment_version": torch.autograd.graph.increment_version,
            "no_grad": torch.no_grad,
            "preserve_version": preserve_version,
            "put_together": put_together,
        }

    def open(self, name: str, arguments: list[str]) -> None:
        """Begin the function."""
        self.source.add(f"def {name}({', '.join(arguments)}):", 0)

    def load(self, name: str) -> Call:
        """The finished function."""
        function: Call = self.source.load("wrapper")[name]
        return function

    def argument(self, index: int) -> str:
        """Name of an input."""
        return f"x{index}"

    def plain_inputs(self) -> list[str]:
        """Expressions for the inputs, subclasses taken apart."""
        return [
            expression
            for index, fact in enumerate(self.program.inputs)
            for expression in parts_of(f"x{index}", fact.layout)
        ]

    def plain_values(self) -> list[str]:
        """Names of what the forward graph returns."""
        return [
            f"v{index}" if isinstance(fact.layout, Plain) else f"v{index}_{part}"
            for index, fact in enumerate(self.program.values)
            for part in range(width(fact.layout))
        ]

    def run_graph(self, graph: Boxed, results: list[str]) -> None:
        """Call a graph on the plain inputs."""
        self.source.names["graph"] = graph
        target = f"{', '.join(results)}, = " if results else ""
        self.source.add("with below_autograd(BELOW):")
        self.source.add(f"{target}graph([{', '.join(self.plain_inputs())}])", 2)

    def rebuild_values(self) -> None:
        """Put subclasses together again."""
        for index, fact in enumerate(self.program.values):
            if not isinstance(fact.layout, Plain):
                parts = ", ".join(f"v{index}_{part}" for part in range(width(fact.layout)))
                layout = self.source.bind(fact.layout, "layout")
                self.source.add(f"v{index} = put_together({layout}, iter(({parts},)))")

    def epilogue(self) -> None:
        """Write mutations back, make views again, return the outputs."""
        for index, value in enumerate(self.program.values):
            if value.of_input is not None:
                self._update(value.of_input, index)
        for index, fact in enumerate(self.program.inputs):
            if fact.mutation in (Mutation.IN_GRAPH, Mutation.STORAGE) and fact.bumps:
                self.source.add(f"if not x{index}.is_inference(): increment_version(x{index})")
        names: list[str] = []
        for output in self.program.outputs:
            names.append(self._output(output, names))
        if self.program.grad_mode_after is not None:
            self.source.names["set_grad_enabled"] = torch.set_grad_enabled
            self.source.add(f"set_grad_enabled({self.program.grad_mode_after})")
        self.source.add(f"return ({''.join(name + ', ' for name in names)})")

    def _update(self, index: int, value: int) -> None:
        x, v = f"x{index}", f"v{value}"
        match self.program.inputs[index].mutation:
            case Mutation.COPY:
                self.source.add(f"{x}.copy_({v})")
            case Mutation.METADATA | Mutation.COPY_AND_METADATA:
                self.source.names["become"] = become
                self.source.add(f"become({x}, {v})")
            case Mutation.STORAGE:
                self.source.add(f"with no_grad(), preserve_version({x}): {x}.set_({v})")
            case other:
                raise AssertionError(f"{other} returns no value")

    def _output(self, fact: OutputFact, earlier: list[str]) -> str:
        match fact.source:
            case Source.CONSTANT:
                return self.source.literal(fact.constant)
            case Source.INPUT:
                return f"x{fact.index}"
            case Source.OUTPUT:
                return earlier[fact.index]
            case Source.GRAPH:
                return self._fresh(fact)
            case Source.VIEW_OF_INPUT:
                return self._view(f"x{fact.index}", fact)
            case Source.VIEW_OF_VALUE:
                return self._view(f"v{fact.index}", fact)

    def _fresh(self, fact: OutputFact) -> str:
        value = self.program.values[fact.index]
        if fact.requires_grad and not value.differentiable:  # a leaf made inside
            self.source.add(f"v{fact.index}.requires_grad_()")
        return f"v{fact.index}"

    def _view(self, base: str, fact: OutputFact) -> str:
        """Code for a view; operators that several outputs share run once."""
        view = fact.view
        assert view is not None, "aliasing outputs were given their views after the trace"
        if view.geometry is not None or view.template is not None:
            template = f", v{view.template}" if view.template is not None else ""
            plain = self.source.bind(View(geometry=view.geometry), "view")
            name = self._view_step((base, id(view)), f"{plain}.replay({base}{template})", view)
        else:
            name = base
            for depth, step in enumerate(view.steps):
                key = (base, view.no_grad, *(repr(s) for s in view.steps[: depth + 1]))
                given = [name, *(self.source.literal(arg) for arg in step.args)]
                given += [f"{k}={self.source.literal(v)}" for k, v in step.kwargs]
                target = self.source.bind(step.target, "view")
                name = self._view_step(key, f"{target}({', '.join(given)})", view)
        return f"{name}.detach()" if view.detach or name == base else name

    def _view_step(self, key: Any, expression: str, view: View) -> str:
        if key not in self._views:
            self._views[key] = f"o{len(self._views)}"
            mode = "with no_grad(): " if view.no_grad else ""
            self.source.add(f"{mode}{self._views[key]} = {expression}")
        return self._views[key]


def become(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give `target` the size, stride and data of `value`, in place."""
    storage = target.untyped_storage()
    if storage.data_ptr() == value.untyped_storage().data_ptr():
        target.as_strided_(value.size(), value.stride(), value.storage_offset())
        return
    if storage.nbytes() < value.untyped_storage().nbytes():  # `resize_` made room
        target.resize_(value.size())
    target.as_strided_(value.size(), value.stride(), target.storage_offset())
    target.copy_(value)


def parts_of(expression: str, layout: Layout) -> list[str]:
    """Expressions for the plain values inside of `expression`, in the order of `take_apart`."""
    if not isinstance(layout, Wrapped):
        return [expression] if isinstance(layout, Plain) else []
    parts = [
        part for name, inner in layout.parts for part in parts_of(f"{expression}.{name}", inner)
    ]
    parts += [f"{expression}.size({d})" for d, n in enumerate(layout.size) if n is None]
    parts += [f"{expression}.stride({d})" for d, n in enumerate(layout.stride) if n is None]
    return parts
