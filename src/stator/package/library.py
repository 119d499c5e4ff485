"""From a planned graph to the machine code of a library, for several levels of processors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from stator.codegen.llvm.jit import compile_kernels, compile_text
from stator.errors import Unsupported
from stator.graph.recipe import Constants
from stator.lower.sizes import Sizes
from stator.package.host import Input, Signature, write_library_host
from stator.package.planned import Planned
from stator.package.program import Constant, Exported, Graph
from stator.package.tables import (
    FOLDED,
    LEVELS,
    Held,
    Names,
    kernel_symbol,
    runtime_text,
    tables_text,
)
from stator.runtime.plan import Constant as ConstantStep
from stator.torch_api import pytree, size_bounds

ALIGNMENT: Final = 64  # of constants in the blob


@dataclass(frozen=True, slots=True)
class Blob:
    """Pieces of memory that constants lie in, each at a multiple of the alignment."""

    pieces: tuple[tuple[int, torch.Tensor], ...]  # where, and bytes
    size: int

    def chunks(self) -> Iterator[bytes | memoryview]:
        """All of it, in order."""
        at = 0
        for start, piece in self.pieces:
            yield bytes(start - at)
            yield memoryview((ctypes.c_char * piece.numel()).from_address(piece.data_ptr()))
            at = start + piece.numel()
        yield bytes(self.size - at)


@dataclass(frozen=True, slots=True)
class Code:
    """Object files of one graph, and the constants that they expect."""

    host: bytes
    kernels: dict[int, bytes]  # by level
    held: tuple[Held, ...]
    blob: Blob


@dataclass(frozen=True, slots=True)
class Library:
    """Machine code, and what to tell of it."""

    code: Code
    names: Names
    inputs: tuple[Input, ...]
    given: tuple[Any, ...]  # arguments of the program: TENSOR, or what it was built for
    outputs: tuple[Any, ...]  # of the program: places among the library's, or constants


def write_library(
    exported: Exported, graph: Graph, planned: Planned, levels: Sequence[int]
) -> Library:
    """Compile all that a library is linked of."""
    numbers, constants = _sorted(exported, planned.constants, graph.module)
    inputs = _inputs(exported, graph)
    names = _names(exported, inputs, graph)
    code = write_code(planned, (inputs, numbers), constants, names, levels)
    return Library(code, names, tuple(inputs.values()), exported.arguments, graph.outputs)


def write_code(
    planned: Planned,
    signature: tuple[dict[str, Input], dict[str, int]],
    constants: Sequence[Constant],
    names: Names,
    levels: Sequence[int],
) -> Code:
    """Compile a plan, for all levels side by side.

    `signature`: what each placeholder is, an input of the caller's or a constant by its number.
    """
    plan, (inputs, numbers) = planned.plan, signature
    added = [step.value for step in plan.steps if isinstance(step, ConstantStep)]
    own = [Constant(f"_tensor_{i}", value, 3) for i, value in enumerate(added)]
    held, blob = lay_out([*constants, *own])
    places = {kernel: number for number, kernel in enumerate(plan.entries)}
    runtime = runtime_text()
    told = Signature(inputs, numbers, added)
    parts = (
        runtime,
        tables_text(held, blob.size, names, len(places), levels),
        write_library_host(plan, planned.memory, places, told, runtime),
    )

    def kernels_for(level: int) -> bytes:
        named = [replace(k, name=kernel_symbol(level, number)) for k, number in places.items()]
        return compile_kernels(named, LEVELS[level])

    with ThreadPoolExecutor(len(levels) + 1) as pool:
        host = pool.submit(compile_text, "\n".join(parts), LEVELS[1])
        made = dict(zip(levels, pool.map(kernels_for, levels), strict=True)) if places else {}
    return Code(host.result(), made, tuple(held), blob)


def _sorted(
    exported: Exported, made: Constants, module: fx.GraphModule
) -> tuple[dict[str, int], list[Constant]]:
    """Placeholders that are constants, by number; and the constants."""
    nodes = module.graph.find_nodes(op="placeholder")
    kept = made.arguments
    constants: list[Constant] = []
    numbers: dict[str, int] = {}
    for node, position in zip(nodes, kept, strict=False):
        if position in exported.constants:
            numbers[node.name] = len(constants)
            constants.append(exported.constants[position])
    for number, recipe in enumerate(made.recipes):
        node = nodes[len(kept) + number]
        sources = [exported.constants[index] for index in recipe.weights]
        value = recipe.make([source.value for source in sources])
        if value.layout is not torch.strided:
            raise Unsupported("package", f"{node.name} is packed, and cannot lie in a file")
        name = sources[0].name if not recipe.steps else f"_folded_{number}"
        kind = FOLDED if recipe.steps else sources[0].kind
        numbers[node.name] = len(constants)
        constants.append(Constant(name, value, kind))
    return numbers, constants


def lay_out(constants: Sequence[Constant]) -> tuple[list[Held], Blob]:
    """Places in a blob: what shares memory shares it there."""
    spans: dict[int, tuple[int, int]] = {}  # of storages: first and last byte that is needed
    for constant in constants:
        start, end = _span(constant.value)
        key = constant.value.untyped_storage().data_ptr()
        low, high = spans.get(key, (start, end))
        spans[key] = (min(low, start), max(high, end))
    places: dict[int, int] = {}
    pieces: list[tuple[int, torch.Tensor]] = []
    size = 0
    held = []
    for constant in constants:
        value = constant.value
        storage = value.untyped_storage()
        key = storage.data_ptr()
        low, high = spans[key]
        if key not in places:
            places[key] = size
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            if high > low:
                pieces.append((size, whole[low:high]))
            size += -(-(high - low) // ALIGNMENT) * ALIGNMENT
        start, end = _span(value)
        numbers = (tuple(value.size()), tuple(value.stride()), places[key] + start - low)
        held.append(Held(constant.name, value.dtype, constant.kind, *numbers, end - start))
    return held, Blob(tuple(pieces), size)


def _span(value: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    start = value.storage_offset() * value.itemsize
    if not value.numel():
        return start, start
    pairs = zip(value.size(), value.stride(), strict=True)
    return start, start + (1 + sum((n - 1) * step for n, step in pairs)) * value.itemsize


def _inputs(exported: Exported, graph: Graph) -> dict[str, Input]:
    """What the caller gives: every tensor, whether the program reads it or not."""
    sizes = Sizes()
    for node in graph.module.graph.find_nodes(op="placeholder"):
        sizes.learn(node)
    found: dict[str, Input] = {}
    for place, name in exported.names.items():
        value = exported.fakes[place]
        indices = [sizes.index(size) for size in value.size()]
        known = tuple(index for index in indices if index is not None)
        if len(known) < len(indices):
            raise Unsupported("package", f"input {name} has a size that no rule describes")
        bounds = tuple(size_bounds(size) for size in value.size())
        found[graph.inputs[place]] = Input(name, value.dtype, known, bounds)
    return found


def _names(exported: Exported, inputs: dict[str, Input], graph: Graph) -> Names:
    spec = exported.program.call_spec
    count = sum(isinstance(place, int) for place in graph.outputs)
    return Names(
        [given.name for given in inputs.values()],
        [f"output_{number}" for number in range(count)],
        pytree.treespec_dumps(spec.in_spec),
        pytree.treespec_dumps(spec.out_spec),
    )
