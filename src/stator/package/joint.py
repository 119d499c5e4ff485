"""A training program as two libraries: its forward and its backward, from one trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.aot.compile import Tools, trace_and_cut
from stator.aot.function import StoredBackward
from stator.aot.graphs import CompiledGraph, FreshBackward, facts_of
from stator.aot.metadata import Facts
from stator.cache.codec import to_bytes
from stator.core.torch_types import Flat
from stator.errors import Unsupported
from stator.loops.index import Index
from stator.package.archive import PAGE, PackageWriter
from stator.package.blob import Blob
from stator.package.build import (
    arguments_told,
    constants_told,
    input_told,
    library_files,
    manifest_of,
)
from stator.package.host import Input
from stator.package.library import Code, Targets, write_code
from stator.package.planned import Planned
from stator.package.program import Exported
from stator.package.tables import Names
from stator.torch_api import pytree

FACTS: Final = "extra/facts"
STEMS: Final = {"forward": "data/stator/forward", "backward": "data/stator/backward"}
PlanGraph = Callable[[fx.GraphModule, str], Planned]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the two libraries."""

    code: Code
    outputs: tuple[Any, ...]  # of the graph: places among the library's, or constants


@dataclass(slots=True)
class JointProgram:
    """A training program, traced and compiled."""

    exported: Exported
    facts: Facts
    backward: StoredBackward  # without code: which tangents it takes
    state: Blob
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
    with torch.enable_grad():
        fakes = exported.leaves()
        traced, halves = trace_and_cut(exported.flat(run), fakes, exported.mode, tools)
    if halves.backward is None:
        raise Unsupported(
            "package",
            "nothing that the program computes needs a gradient",
            hint="stator.aot_compile packages it for inference",
        )
    caught = _Caught()
    missing = (False,) * len(traced.program.tangents)
    found = FreshBackward(traced, halves, caught).backward(missing)
    stored = StoredBackward(None, found.tangents, found.like)
    joint = JointProgram(exported, facts_of(traced, halves), stored, state)
    joint.starts["state"], end = 0, state.pad(PAGE)
    for name, module in (("forward", halves.forward), ("backward", caught.modules[0])):
        blob = Blob(put)
        joint.parts[name] = _part(module, name, plan, blob, targets)
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


def _part(module: fx.GraphModule, name: str, plan: PlanGraph, blob: Blob, targets: Targets) -> Part:
    outputs = _only_tensors(module)
    nodes = module.graph.find_nodes(op="placeholder")
    inputs = {node.name: _input(node.name, node.meta.get("val")) for node in nodes}
    planned = plan(module, name)
    count = sum(isinstance(place, int) for place in outputs)
    names = Names([*inputs], [f"output_{number}" for number in range(count)], "", "")
    return Part(write_code(planned, (inputs, {}), blob, names, targets), outputs)


def _only_tensors(module: fx.GraphModule) -> tuple[Any, ...]:
    """Let a graph return its tensors alone; where each stands, and what else there was."""
    output = module.graph.output_node()
    values = list(output.args[0])
    tensors = [value for value in values if isinstance(value, fx.Node)]
    for node in tensors:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Unsupported("package", f"{node.name}, which is kept or returned, is no tensor")
    output.args = (tuple(tensors),)
    places = iter(range(len(tensors)))
    return tuple(next(places) if isinstance(v, fx.Node) else ["constant", v] for v in values)


def _input(name: str, value: Any) -> Input:
    if not isinstance(value, torch.Tensor) or any(not isinstance(n, int) for n in value.size()):
        raise Unsupported(
            "package",
            f"{name} is a number, or of a size that varies",
            hint="packages for training have fixed sizes",
        )
    sizes = tuple(Index.of(int(size)) for size in value.size())
    return Input(name, value.dtype, sizes, tuple((int(n), int(n)) for n in value.size()))


def finish_joint(
    package: PackageWriter, joint: JointProgram, linker: str | None, targets: Targets
) -> None:
    """All but the weights of a package for training."""
    exported = joint.exported
    files = {FACTS: to_bytes((joint.facts, joint.backward), ())}
    for name, part in joint.parts.items():
        files |= library_files(STEMS[name], part.code, linker)
    spec = exported.program.call_spec
    manifest = {
        **manifest_of(targets),
        "kind": "joint",
        "in_spec": pytree.treespec_dumps(spec.in_spec),
        "out_spec": pytree.treespec_dumps(spec.out_spec),
        "inputs": [
            input_told(_input(name, exported.fakes[place]))
            for place, name in exported.names.items()
        ],
        "arguments": arguments_told(exported.arguments),
        "outputs": list(range(len(joint.facts.program.outputs))),  # the facts know of constants
        "tensors": _tensors(exported),
        "constants": constants_told(joint.state.held),
        "starts": joint.starts,
        "parts": {name: list(part.outputs) for name, part in joint.parts.items()},
    }
    package.finish(manifest, files)


def _tensors(exported: Exported) -> list[list[Any]]:
    """For each tensor that the program takes: an input, or a constant and whether it trains."""
    return [
        ["state", exported.constants[place].name, exported.constants[place].trains]
        if place in exported.constants
        else ["input", exported.names[place], False]
        for place in range(len(exported.fakes))
    ]
