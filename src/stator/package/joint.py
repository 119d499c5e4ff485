"""A training program as two libraries: its forward and its backward, from one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stator.aot.compile import Tools, trace_and_cut
from stator.aot.function import StoredBackward
from stator.aot.graphs import CompiledGraph, FreshBackward, facts_of
from stator.aot.metadata import Facts, Mutation
from stator.cache.codec import to_bytes
from stator.core.torch_types import Flat
from stator.errors import Unsupported
from stator.graph.edit import EXTRAS
from stator.lower.sizes import Sizes
from stator.package.archive import FACTS, PAGE, STEMS, PackageWriter
from stator.package.blob import Blob
from stator.package.build import (
    arguments_told,
    constants_told,
    input_told,
    library_files,
    manifest_of,
)
from stator.package.conditions import conditions_of
from stator.package.library import Code, Targets, input_of, sizes_of, write_code
from stator.package.planned import Planned
from stator.package.program import PARAMETER, Exported, condition_count, refuse_conditions
from stator.package.tables import Names
from stator.torch_api import size_expression

PlanGraph = Callable[[fx.GraphModule, str], Planned]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the two libraries."""

    code: Code
    outputs: tuple[Any, ...]  # of the graph: places among the library's, constants, or sizes


@dataclass(slots=True)
class JointProgram:
    """A training program, traced and compiled."""

    exported: Exported
    facts: Facts
    backward: StoredBackward  # without code: which tangents it takes
    state: Blob
    sizes: Sizes  # that vary
    training: bool = True  # the mode that the model was in
    parts: dict[str, Part] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of all blobs, one behind the other


def compile_joint(
    exported: Exported,
    run: Flat,
    tools: Tools,
    plan: PlanGraph,
    put: Callable[[Any], object],
    targets: Targets,
) -> JointProgram:
    """Both libraries; `run` runs the exported graph, `plan` plans a half, `put` takes weights."""
    state = Blob(put)
    state.add(list(exported.constants.values()))
    guards = condition_count(exported.mode)
    with torch.enable_grad():
        fakes = exported.leaves()
        traced, halves = trace_and_cut(exported.flat(run), fakes, exported.mode, tools)
    if halves.backward is None:
        raise Unsupported(
            "package",
            "nothing that the program computes needs a gradient",
            hint="stator.aot_compile packages it for inference",
        )
    if traced.program.written_late:
        raise Unsupported("package", "a backward of the program writes to one of its inputs")
    caught = _Caught()
    missing = (False,) * len(traced.program.tangents)
    found = FreshBackward(traced, halves, caught).backward(missing)
    refuse_conditions(exported.mode, guards)
    stored = StoredBackward(None, found.tangents, found.like)
    sizes = sizes_of(halves.forward)
    joint = JointProgram(exported, facts_of(traced, halves), stored, state, sizes)
    joint.starts["state"], end = 0, state.pad(PAGE)
    for name, module in (("forward", halves.forward), ("backward", caught.modules[0])):
        blob = Blob(put)
        is_first = name == "forward"
        told = _told(exported, module) if is_first else {}
        names = (name, told, exported.conditions if is_first else ())
        joint.parts[name] = _part(module, names, plan, blob, targets)
        joint.starts[name], end = end, end + blob.pad(PAGE)
    return joint


class _Caught:
    """Keeps the graphs that it is given to compile."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []

    def compile_graph(self, module: fx.GraphModule, name: str) -> CompiledGraph:
        """Nothing yet."""
        self.modules.append(module)
        return CompiledGraph(lambda arguments: arguments)

    def on_failure(self, error: Exception) -> None:
        """There is no other way to run a package."""
        raise error


def _told(exported: Exported, module: fx.GraphModule) -> dict[str, str]:
    """What the caller knows the inputs of the forward as, by placeholder."""
    nodes = module.graph.find_nodes(op="placeholder")
    if len(nodes) != len(exported.fakes):
        return {}
    known = exported.names | {place: one.name for place, one in exported.constants.items()}
    return {node.name: known[place] for place, node in enumerate(nodes) if place in known}


def _part(
    module: fx.GraphModule,
    names: tuple[str, Mapping[str, str], Sequence[Any]],
    plan: PlanGraph,
    blob: Blob,
    targets: Targets,
) -> Part:
    """One library; `names`: its own, what its inputs are called, and what their sizes obey."""
    name, told, relations = names
    outputs = _only_tensors(module)
    _read_numbers(module)
    nodes = module.graph.find_nodes(op="placeholder")
    sizes = sizes_of(module)
    inputs = {
        node.name: input_of(told.get(node.name, node.name), node.meta["val"], sizes)
        for node in nodes
    }
    planned = plan(module, name)
    count = sum(isinstance(place, int) for place in outputs)
    own = Names([*inputs], [f"output_{number}" for number in range(count)], "", "")
    conditions = conditions_of(relations, sizes, told)
    return Part(write_code(planned, (inputs, {}, conditions), blob, own, targets), outputs)


def _only_tensors(module: fx.GraphModule) -> tuple[Any, ...]:
    """Let a graph return its tensors alone; where each stands, and what else there was.

    A number that varies is kept for the backward: it is the size of some input.
    """
    output = module.graph.output_node()
    given = {node: number for number, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    tensors: list[fx.Node] = []
    numbers: list[fx.Node] = []
    places: list[Any] = []
    for value in output.args[0]:
        if not isinstance(value, fx.Node):
            places.append(["constant", value])
        elif isinstance(value.meta.get("val"), torch.Tensor):
            places.append(len(tensors))
            tensors.append(value)
        else:
            source, dim = _showing(value, given)
            places.append(["size", given[source], dim])
            numbers.append(value)
    names = output.meta.get(EXTRAS, ())
    last = zip(names, places[len(places) - len(names) :], strict=True)
    output.meta[EXTRAS] = tuple(name for name, place in last if isinstance(place, int))
    output.args = (tuple(tensors),)
    for number in numbers:
        if not number.users and number not in given:
            module.graph.erase_node(number)
    return tuple(places)


def _read_numbers(module: fx.GraphModule) -> None:
    """Let a graph read the numbers that it is given from the sizes of its tensors."""
    graph = module.graph
    nodes = graph.find_nodes(op="placeholder")
    for node in nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            continue
        source, dim = _showing(node, nodes)
        with graph.inserting_after(nodes[-1]):
            size = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
        size.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(size)
        graph.erase_node(node)


def _showing(number: fx.Node, inputs: Iterable[fx.Node]) -> tuple[fx.Node, int]:
    """An input, and which of its sizes a number is."""
    value = number.meta.get("val")
    wanted = size_expression(value) if isinstance(value, torch.SymInt) else None
    for node in inputs:
        tensor = node.meta.get("val")
        for dim, size in enumerate(tensor.size() if isinstance(tensor, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and wanted == size_expression(size):
                return node, dim
    raise Unsupported(
        "package",
        f"{number.name}, which the backward takes, is a number and no size of a tensor",
        hint="make the dimensions that it is computed of static",
    )


def finish_joint(
    package: PackageWriter, joint: JointProgram, linker: str | None, targets: Targets
) -> None:
    """All but the weights of a package for training."""
    exported = joint.exported
    files = {FACTS: to_bytes((joint.facts, joint.backward), ())}
    for name, part in joint.parts.items():
        files |= library_files(STEMS[name], part.code, linker)
    manifest = {
        **manifest_of(targets),
        "kind": "joint",
        "in_spec": exported.forms[0],
        "out_spec": exported.forms[1],
        "inputs": [
            input_told(input_of(name, exported.fakes[place], joint.sizes))
            for place, name in exported.names.items()
        ],
        "arguments": arguments_told(exported.arguments),
        "outputs": list(range(len(joint.facts.program.outputs))),  # the facts know of constants
        "written": [
            number
            for number, place in enumerate(exported.names)
            if joint.facts.program.inputs[place].mutation is not Mutation.NONE
        ],
        "tensors": _tensors(exported),
        "training": joint.training,
        "constants": constants_told(joint.state.held),
        "starts": joint.starts,
        "parts": {name: list(part.outputs) for name, part in joint.parts.items()},
    }
    package.finish(manifest, files)


def _tensors(exported: Exported) -> list[list[Any]]:
    """For each tensor that the program takes: an input, or a constant and whether it trains.

    A constant is a "parameter", other "state", or "hidden": no part of the model's state.
    """
    told: list[list[Any]] = []
    for place in range(len(exported.fakes)):
        held = exported.constants.get(place)
        if held is None:
            told.append(["input", exported.names[place], False])
        else:
            other = "state" if held.is_state else "hidden"
            kind = "parameter" if held.kind == PARAMETER else other
            told.append([kind, held.name, held.trains])
    return told
