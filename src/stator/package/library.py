"""From a planned graph to the machine code of a library, for several levels of processors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from stator.codegen.llvm.jit import compile_kernels, compile_text
from stator.errors import Unsupported
from stator.graph.recipe import Constants, Recipe
from stator.lower.sizes import Sizes
from stator.ops.packs import PACKING
from stator.package.blob import Blob
from stator.package.card import compile_launchers
from stator.package.conditions import Condition, conditions_of
from stator.package.host import Input, Signature, launcher_symbol, made_once, write_library_host
from stator.package.numbers import numbers_as_tensors
from stator.package.planned import Planned
from stator.package.program import Constant, Exported, Graph
from stator.package.tables import (
    FOLDED,
    LEVELS,
    REGISTERS,
    Names,
    card_text,
    kernel_symbol,
    runtime_text,
    tables_text,
)
from stator.runtime.plan import Call, Step
from stator.runtime.plan import Constant as ConstantStep
from stator.torch_api import OpOverload, size_bounds


@dataclass(frozen=True, slots=True)
class Code:
    """Object files of one graph, and the constants that they expect."""

    host: bytes
    kernels: dict[int, bytes]  # by level; for a GPU by its capability
    blob: Blob
    device: str = "cpu"  # the kind that it is for


@dataclass(frozen=True, slots=True)
class Library:
    """Machine code, and what to tell of it."""

    code: Code
    names: Names
    inputs: tuple[Input, ...]
    given: tuple[Any, ...]  # arguments of the program: TENSOR, or what it was built for
    outputs: tuple[Any, ...]  # of the program: places among the library's, or constants
    written: tuple[bool, ...]  # for each input
    calls: tuple[str, ...]  # operators that it calls through torch's dispatcher


@dataclass(frozen=True, slots=True)
class Targets:
    """What kernels are compiled for."""

    levels: Sequence[int]  # of x86-64
    capability: int | None = None  # of GPUs; None: the program is for the CPU

    @property
    def device(self) -> str:
        """The kind of device."""
        return "cpu" if self.capability is None else "cuda"


def write_library(
    exported: Exported, graph: Graph, planned: Planned, blob: Blob, targets: Targets
) -> Library:
    """Compile all that a library is linked of; its constants go to the blob."""
    numbers, packing = _numbered(exported, planned.constants, graph.module, blob)
    plan = replace(planned.plan, steps=(*packing, *planned.plan.steps))
    inputs = _inputs(exported, graph)
    names = _names(exported, inputs, graph)
    known = {placeholder: given.name for placeholder, given in inputs.items()}
    conditions = conditions_of(exported.conditions, sizes_of(graph.module), known)
    signature = (inputs, numbers, conditions)
    code = write_code(replace(planned, plan=plan), signature, blob, names, targets)
    changed = {name for step in plan.steps for name in step.writes}
    written = tuple(name in changed for name in inputs)
    given = tuple(inputs.values())
    calls = tuple(sorted(_dispatched(numbers_as_tensors(plan).steps)))
    return Library(code, names, given, exported.arguments, graph.outputs, written, calls)


def _dispatched(steps: Sequence[Step]) -> set[str]:
    calls = [step.target for step in steps if isinstance(step, Call) and step.symbol is None]
    return {target.name() for target in calls if isinstance(target, OpOverload)}


def write_code(
    planned: Planned,
    signature: tuple[dict[str, Input], dict[str, int], Sequence[Condition]],
    blob: Blob,
    names: Names,
    targets: Targets,
) -> Code:
    """Compile a plan, for all levels side by side.

    `signature`: what each placeholder is, an input of the caller's or a constant by its number;
    and what sizes must obey.
    """
    plan, (inputs, numbers, conditions) = numbers_as_tensors(planned.plan), signature
    held = [step.value for step in plan.steps if isinstance(step, ConstantStep)]
    added = [value for value in held if isinstance(value, torch.Tensor)]  # others are functions
    own = blob.add([_added(i, value) for i, value in enumerate(added)])
    places = {kernel: number for number, kernel in enumerate(plan.entries)}
    levels, capability, device = targets.levels, targets.capability, targets.device
    if plan.on_gpu and capability is None:
        raise Unsupported(
            "package",
            f"it makes tensors on {plan.device}, and neither takes nor holds one there",
            hint="move the model, or an input, to the GPU",
        )
    runtime = runtime_text(device) + ("" if capability is None else card_text(capability))
    places_of = dict(zip(map(id, added), own, strict=True))
    told = Signature(inputs, numbers, places_of, len(blob.held), conditions)
    packed = len(made_once(plan))
    near = places if capability is None else {}
    parts = (
        runtime,
        tables_text((blob.held, packed), blob.size, names, len(near), levels),
        write_library_host(plan, planned.memory, places, told, runtime),
    )

    def kernels_for(level: int) -> bytes:
        named = [replace(k, name=kernel_symbol(level, number)) for k, number in places.items()]
        return compile_kernels(named, LEVELS[level], REGISTERS[level])

    with ThreadPoolExecutor(len(levels) + 1) as pool:
        host = pool.submit(compile_text, "\n".join(parts), LEVELS[1])
        made = dict(zip(levels, pool.map(kernels_for, levels), strict=True)) if near else {}
        if capability is not None and places:
            launchers = {kernel: launcher_symbol(number) for kernel, number in places.items()}
            made = {capability: compile_launchers(plan, launchers, capability)}
    return Code(host.result(), made, blob, device)


def _added(number: int, value: torch.Tensor) -> Constant:
    return Constant(f"_tensor_{number}", value, 3, device=value.device.type)


def _numbered(
    exported: Exported, made: Constants, module: fx.GraphModule, blob: Blob
) -> tuple[dict[str, int], list[Call]]:
    """Placeholders that are constants, by number; and calls that make those that are packed."""
    nodes = module.graph.find_nodes(op="placeholder")
    kept = made.arguments
    found: dict[str, Constant] = {}
    packing: list[Call] = []
    spent = _folded(exported, made)
    for node, position in zip(nodes, kept, strict=False):
        if position in exported.constants:
            found[node.name] = exported.constants[position]
    for number, recipe in enumerate(made.recipes):
        node = nodes[len(kept) + number]
        sources = [exported.constants[index] for index in recipe.weights]
        if recipe.steps and recipe.steps[-1].target in PACKING:
            call, plain = _packing(node.name, recipe, [source.value for source in sources])
            packing.append(call)
            for place, value in plain.items():
                own = (one for one in sources if not made.frozen and _is_same(one.value, value))
                folded = Constant(f"_folded_{place}", value, FOLDED)
                found[place] = next(own, folded)
            continue
        device = node.meta["val"].device.type
        value = recipe.make([source.value for source in sources])
        if value.layout is not torch.strided:
            raise Unsupported("package", f"{node.name} is packed, and cannot lie in a file")
        if recipe.steps or _memory(sources[0]) in spent:
            found[node.name] = Constant(f"_folded_{number}", value, FOLDED, device=device)
        else:
            found[node.name] = Constant(sources[0].name, value, sources[0].kind, device=device)
    return dict(zip(found, blob.add(list(found.values())), strict=True)), packing


def _folded(exported: Exported, made: Constants) -> set[int]:
    """The memory of weights that others were made of: a new value would not reach those."""
    recipes = [recipe for recipe in made.recipes if recipe.steps and made.frozen]
    return {_memory(exported.constants[index]) for recipe in recipes for index in recipe.weights}


def _memory(constant: Constant) -> int:
    return int(constant.value.untyped_storage().data_ptr())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one: the weight itself is packed, and may be replaced."""
    return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def _packing(
    name: str, recipe: Recipe, weights: Sequence[torch.Tensor]
) -> tuple[Call, dict[str, torch.Tensor]]:
    """A call that packs where the library runs, and the tensors that it takes, by name."""
    *before, last = recipe.steps
    steps = (*before, replace(last, target=PACKING[last.target]))
    told: Any = replace(recipe, steps=steps).make(weights)
    pack, given = told
    plain = {f"{name}_{i}": value for i, value in enumerate(given) if torch.is_tensor(value)}
    nodes = {place: fx.Graph().placeholder(place) for place in plain}
    args = tuple(nodes.get(f"{name}_{i}", value) for i, value in enumerate(given))
    return Call(name, pack, args, {}), plain


def _inputs(exported: Exported, graph: Graph) -> dict[str, Input]:
    """What the caller gives: every tensor, whether the program reads it or not."""
    sizes = sizes_of(graph.module)
    return {
        graph.inputs[place]: input_of(name, exported.fakes[place], sizes)
        for place, name in exported.names.items()
    }


def sizes_of(module: fx.GraphModule) -> Sizes:
    """Sizes that vary, as the inputs of a graph show them."""
    sizes = Sizes()
    for node in module.graph.find_nodes(op="placeholder"):
        sizes.learn(node)
    return sizes


def input_of(name: str, value: torch.Tensor, sizes: Sizes) -> Input:
    """What a program is to be given: a tensor whose sizes may be symbols that are known."""
    indices = [sizes.index(size) for size in value.size()]
    known = tuple(index for index in indices if index is not None)
    if len(known) < len(indices):
        raise Unsupported("package", f"input {name} has a size that no rule describes")
    bounds = tuple(size_bounds(size) for size in value.size())
    return Input(name, value.dtype, known, bounds, value.device.type)


def _names(exported: Exported, inputs: dict[str, Input], graph: Graph) -> Names:
    count = sum(isinstance(place, int) for place in graph.outputs)
    return Names(
        [given.name for given in inputs.values()],
        [f"output_{number}" for number in range(count)],
        *exported.forms,
    )
