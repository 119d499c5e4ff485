"""An exported program as a graph that a library runs: constants, inputs, outputs, all tensors.

What torch.export lifts (parameters, buffers, constants) are constants of the library.  What the
program writes to is written within the graph; outputs that are views are made within it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from stator.aot.compile import Tools, trace_and_cut
from stator.aot.graphs import facts_of
from stator.aot.metadata import Mutation, OutputFact, Program, Source
from stator.aot.subclasses import PLAIN
from stator.aot.views import View
from stator.core.dtypes import has_number
from stator.core.torch_types import Flat
from stator.errors import Unsupported
from stator.torch_api import (
    FakeTensorMode,
    guard_count,
    pytree,
    size_conditions,
    size_expression,
    size_hint,
)

_LIFTED: Final = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITTEN: Final = ("BUFFER_MUTATION", "USER_INPUT_MUTATION", "PARAMETER_MUTATION")
TENSOR: Final = object()
PARAMETER: Final = 1  # a kind of constant
aten: Final = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the library carries."""

    name: str
    value: torch.Tensor
    kind: int  # by AOTInductor's numbers: 1 parameter, 2 buffer, 3 another tensor, 4 folded
    trains: bool = False  # whether it has gradients
    device: str = "cpu"  # the kind that it lies on where the library runs
    is_state: bool = True  # whether the model's state_dict has it


@dataclass(slots=True)
class Exported:
    """An exported program, taken apart: its tensors, in the order that it takes them."""

    program: ExportedProgram
    mode: FakeTensorMode
    fakes: list[torch.Tensor] = field(default_factory=list)
    constants: dict[int, Constant] = field(default_factory=dict)  # by place among the tensors
    names: dict[int, str] = field(default_factory=dict)  # what the caller gives, by the same
    places: dict[str, int] = field(default_factory=dict)  # by name
    fixed: list[Any] = field(default_factory=list)  # all inputs; TENSOR stands for a tensor
    asking: set[int] = field(default_factory=set)  # what the caller gives and wants a gradient of
    conditions: list[Any] = field(default_factory=list)  # on sizes, as sympy says them
    forms: tuple[str, str] = ("", "")  # how arguments and results are nested

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the caller gives: TENSOR, or what is fixed."""
        specs = self.program.graph_signature.input_specs
        pairs = zip(specs, self.fixed, strict=True)
        return tuple(value for spec, value in pairs if spec.kind is InputKind.USER_INPUT)

    @staticmethod
    def of(program: ExportedProgram) -> Exported:
        """Take a program apart; what a library cannot have is refused."""
        nodes = program.graph_module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in nodes]
        modes = [value.fake_mode for value in values if hasattr(value, "fake_mode")]
        found = Exported(program, modes[0] if modes else FakeTensorMode())
        for spec, value in zip(program.graph_signature.input_specs, values, strict=True):
            found._take(spec, value)
        conditions = size_conditions(found.mode, program)
        found.conditions = [one for one in conditions if str(one) != "True"]
        spec = program.call_spec
        found.forms = (_text(spec.in_spec, "arguments"), _text(spec.out_spec, "results"))
        return found

    def _take(self, spec: Any, value: Any) -> None:
        name = spec.arg.name
        if isinstance(value, torch.Tensor):
            if not has_number(value.dtype):
                told = f"{spec.target or name} is of {value.dtype}, as no tensor of a library is"
                raise Unsupported("package", told)
            _set_apart_0_and_1(value)
            place = len(self.fakes)
            self.fakes.append(value)
            self.fixed.append(TENSOR)
            self.places |= {name: place, str(spec.target or name): place}
        if spec.kind in _LIFTED:
            kind = _LIFTED.index(spec.kind) + 1
            device = value.device.type
            value = self._lifted(spec)
            trains = value.requires_grad and kind == PARAMETER
            target = str(spec.target)
            is_state = target in self.program.state_dict
            found = Constant(target, value.detach(), kind, trains, device, is_state)
            self.constants[place] = found
        elif spec.kind is not InputKind.USER_INPUT:
            raise Unsupported(
                "package",
                f"input {name} is a {spec.kind.name.lower()}",
                hint="a library takes and holds tensors alone",
            )
        elif isinstance(value, torch.Tensor):
            self.names[place] = name
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise Unsupported(
                "package",
                f"input {name} is a number that varies",
                hint="a library takes tensors; give the number as a tensor, or a fixed one",
            )
        else:
            self.fixed.append(getattr(spec.arg, "value", None))

    def _lifted(self, spec: Any) -> torch.Tensor:
        program, name = self.program, spec.target
        held: Any = program.constants if name in program.constants else program.state_dict
        value = held[name]
        known = value.device.type in ("cpu", "cuda")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not known:
            raise Unsupported(
                "package",
                f"{name} is a {type(value).__name__} on {value.device}",
                hint="a library holds plain tensors, on the CPU or on one GPU",
            )
        plain: torch.Tensor = value
        return plain

    def leaves(self) -> list[torch.Tensor]:
        """Fakes of all tensors as a step of training takes them: parameters with gradients."""
        with self.mode:
            return [self._leaf(place, fake) for place, fake in enumerate(self.fakes)]

    def _leaf(self, place: int, fake: torch.Tensor) -> torch.Tensor:
        twin = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype)
        trains = place in self.constants and self.constants[place].trains
        if trains:
            return torch.nn.Parameter(twin)
        return twin.requires_grad_(place in self.asking)

    def flat(self, run: Flat) -> Flat:
        """The program as a function of its tensors, which writes to what it writes to.

        `run` runs its graph.
        """
        outputs = self.program.graph_signature.output_specs

        def program(*tensors: Any) -> list[Any]:
            stream = iter(tensors)
            arguments = [next(stream) if value is TENSOR else value for value in self.fixed]
            found = []
            for spec, value in zip(outputs, run(*arguments), strict=True):
                if spec.kind.name in _WRITTEN:
                    tensors[self.places[str(spec.target)]].copy_(value)
                elif spec.kind is OutputKind.USER_OUTPUT:
                    found.append(value)
                else:
                    raise Unsupported("package", f"an output is a {spec.kind.name.lower()}")
            return found

        return program


def _set_apart_0_and_1(value: torch.Tensor) -> None:
    """Let sizes that vary be 2 or more, as torch.export took them: a saved program forgets that."""
    for size in value.size():
        symbol = size_expression(size) if isinstance(size, torch.SymInt) else None
        if symbol is None or not symbol.is_Symbol or (size_hint(size) or 0) < 2:
            continue
        spans = size.node.shape_env.var_to_range
        if spans[symbol].lower < 2 <= spans[symbol].upper:
            spans[symbol] = type(spans[symbol])(2, spans[symbol].upper)


def _text(spec: Any, what: str) -> str:
    try:
        return str(pytree.treespec_dumps(spec))
    except (NotImplementedError, TypeError) as error:  # torch knows no text for a class
        raise Unsupported(
            "package",
            f"how its {what} are nested cannot be written down: {error}",
            hint="use tuples, lists and dicts, or register the class with a serialized_type_name",
        ) from error


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph whose outputs are the library's, and what outputs are no tensors."""

    module: fx.GraphModule
    inputs: tuple[str, ...]  # names of placeholders, one for each tensor
    outputs: tuple[Any, ...]  # a number: a tensor of the graph; ["constant", value]: another


def library_graph(exported: Exported, run: Flat, tools: Tools) -> Graph:
    """Trace and finish the program, whose graph `run` runs."""
    guards = condition_count(exported.mode)
    with torch.no_grad():
        function = exported.flat(run)
        given = (function, exported.fakes, exported.mode, tools)
        traced, halves = trace_and_cut(*given, may_run_again=True)
        program = facts_of(traced, halves).program
        _refuse_odd(program)
        refuse_conditions(exported.mode, guards)
        with exported.mode:
            return _Finish(halves.forward, program).graph()


def condition_count(mode: FakeTensorMode) -> int:
    """How many conditions on sizes were met; that a size of data has another name is none."""
    env = mode.shape_env
    return guard_count(mode) - (0 if env is None else len(env.unbacked_renamings))


def refuse_conditions(mode: FakeTensorMode, guards: int) -> None:
    """Refuse a trace that made conditions about sizes, beyond those that there were."""
    if condition_count(mode) != guards:
        raise Unsupported(
            "package",
            "its sizes were found to obey conditions that torch.export does not know of",
            hint="make the dimension static, or give its bounds in dynamic_shapes",
        )


def _refuse_odd(program: Program) -> None:
    for number, fact in enumerate(program.inputs):
        if fact.layout != PLAIN:
            raise Unsupported("package", f"input {number} is a tensor of a class of its own")
        if fact.mutation in (Mutation.METADATA, Mutation.COPY_AND_METADATA, Mutation.STORAGE):
            raise Unsupported("package", f"input {number} is given another size or storage")


@dataclass(slots=True)
class _Finish:
    """Puts what wrappers do behind a graph into the graph."""

    module: fx.GraphModule
    program: Program

    def graph(self) -> Graph:
        """The finished graph."""
        graph = self.module.graph
        output = graph.output_node()
        values = list(output.args[0])
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_before(output):
            for value, of in zip(values, self.program.values, strict=True):
                if of.of_input is not None:
                    _call(graph, aten.copy_.default, (inputs[of.of_input], value))
            found: list[Any] = []
            for fact in self.program.outputs:
                found.append(self._output(fact, found, values, inputs))
        tensors = [value for value in found if isinstance(value, fx.Node)]
        output.args = (tuple(tensors),)
        places = iter(range(len(tensors)))
        shown = tuple(
            next(places) if isinstance(value, fx.Node) else ["constant", value] for value in found
        )
        self.module.recompile()
        return Graph(self.module, tuple(node.name for node in inputs), shown)

    def _output(
        self, fact: OutputFact, earlier: list[Any], values: list[Any], inputs: Sequence[fx.Node]
    ) -> Any:
        match fact.source:
            case Source.CONSTANT:
                return fact.constant
            case Source.INPUT:
                return inputs[fact.index]
            case Source.OUTPUT:
                return earlier[fact.index]
            case Source.GRAPH:
                value = values[fact.index]
                if isinstance(value, fx.Node) and not isinstance(
                    value.meta.get("val"), torch.Tensor
                ):
                    raise Unsupported(
                        "package",
                        "an output is a number that varies",
                        hint="a library returns tensors; return it as a tensor",
                    )
                return value
            case Source.VIEW_OF_INPUT:
                return self._view(inputs[fact.index], fact.view)
            case Source.VIEW_OF_VALUE:
                return self._view(values[fact.index], fact.view)

    def _view(self, base: fx.Node, view: View | None) -> fx.Node:
        graph = self.module.graph
        assert view is not None, "aliasing outputs were given their views after the trace"
        if view.template is not None:
            raise Unsupported("package", "an output is a view of a size that varies")
        if view.geometry is not None:
            place = view.geometry
            offset = base.meta["val"].storage_offset() + place.offset
            given = (base, list(place.size), list(place.stride), offset)
            return _call(graph, aten.as_strided.default, given)
        node = base
        for step in view.steps:
            node = _call(graph, step.target, (node, *step.args), dict(step.kwargs))
        return node


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A node with its meta value."""
    node = graph.call_function(target, args, kwargs or {})
    given = fx.map_arg((args, kwargs or {}), lambda source: source.meta["val"])
    if target is aten.copy_.default:
        node.meta["val"] = given[0][0]
    else:
        node.meta["val"] = target(*given[0], **given[1])
    return node
