"""Programs as kernels that the interpreter runs: the schedule's meaning, without machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from stator.core.dtypes import from_torch
from stator.loops import interp
from stator.loops.index import Index
from stator.loops.interp import NUMPY
from stator.loops.ir import Kernel
from stator.loops.verify import verify
from stator.lower.items import Check, Compute, Extern, Scatter
from stator.lower.lower import Lowering
from stator.lower.sizes import Sizes
from stator.lower.target import CPU, Target
from stator.schedule.build import build_kernel
from stator.schedule.fuse import FEW_ROWS, Group, fuse
from stator.schedule.registers import build_gpu_kernel
from tests.copies import widened
from tests.fuzz.arguments import Array, evaluate
from tests.lower.graphs import traced
from tests.parity import assert_close_to_reference

GPU: Final = Target(CPU, uses_triton=True)


@dataclass(frozen=True)
class Program:
    """A function as groups of loops, each with its kernel."""

    module: fx.GraphModule
    groups: list[Group]
    refusals: list[str]
    sizes: Sizes
    kernels: Mapping[Group, Kernel]

    @property
    def only(self) -> Kernel:
        """Its only kernel."""
        (kernel,) = self.kernels.values()
        return kernel


def scheduled(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> Program:
    """`fn` lowered, fused and built; every kernel verified."""
    module = traced(fn, *inputs, symbolic=symbolic)
    lowering = Lowering(module)
    fused = fuse(lowering.run(), lowering.sizes)
    (output,) = module.graph.find_nodes(op="output")
    kernels = {}
    for number, group in enumerate(fused.groups):
        if group.alone is None or isinstance(group.alone, Scatter):
            wanted = _wanted(group, fused.groups, output)
            kernels[group] = build_kernel(f"kernel_{number}", group, wanted, lowering.sizes)
            verify(kernels[group])
    return Program(module, fused.groups, fused.refusals, lowering.sizes, kernels)


def gpu_kernels(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> list[Kernel]:
    """What a GPU would run, kernels verified."""
    module = traced(fn, *inputs, symbolic=symbolic)
    lowering = Lowering(module, target=GPU)
    fused = fuse(lowering.run(), lowering.sizes, few_rows=FEW_ROWS, in_registers=True)
    read = {node.name for node in module.graph.output_node().all_input_nodes}
    for group in fused.groups:
        read |= {name for name in group.reads if name not in {m.name for m in group.members}}
    found = []
    for group in fused.groups:
        if group.alone is None or isinstance(group.alone, Scatter):
            wanted = {member.name for member in group.members} & read
            found.append(build_gpu_kernel("kernel", group, wanted, lowering.sizes))
            if group.alone is None:  # of scatters the hardware combines what meets
                verify(found[-1])
    return found


def _wanted(group: Group, groups: list[Group], output: fx.Node) -> set[str]:
    """What somebody else reads of a group."""
    read = {node.name for node in output.all_input_nodes}
    read |= {name for other in groups if other is not group for name in other.reads}
    return {member.name for member in group.members} & read


def interpreted(program: Program, *inputs: Tensor) -> list[Tensor]:
    """What the program's kernels compute."""
    nodes = program.module.graph.find_nodes(op="placeholder")
    tensors = {node.name: value for node, value in zip(nodes, inputs, strict=True)}
    sizes = {
        s.name: eval(str(source), dict(tensors)) for s, source in program.sizes.sources.items()
    }
    memory = _Memory(program, sizes)
    for name, tensor in tensors.items():
        memory.put(name, tensor)
    for group in program.groups:
        memory.run(group)
    (output,) = program.module.graph.find_nodes(op="output")
    return [memory.get(node) for node in tree_flatten(output.args[0])[0]]


@dataclass
class _Memory:
    """Arrays by name, as the interpreter takes them."""

    program: Program
    sizes: Mapping[str, int]
    arrays: dict[str, Array] = field(default_factory=dict)

    def put(self, name: str, tensor: Tensor) -> None:
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        length = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        self.arrays[name] = _bits(tensor.detach().as_strided((length,), (1,))).copy()

    def get(self, node: fx.Node) -> Tensor:
        value = node.meta["val"]
        sizes = self.program.sizes
        size = [self.number(sizes.index(n)) for n in value.size()]
        stride = [self.number(sizes.stride(n)) for n in value.stride()]
        flat = torch.from_numpy(self.arrays[node.name].copy())
        flat = flat.view(torch.bfloat16) if value.dtype is torch.bfloat16 else flat
        return flat.as_strided(size, stride)

    def number(self, index: Index | None) -> int:
        assert index is not None, "no size of the inputs"
        return evaluate(index, self.sizes)

    def run(self, group: Group) -> None:
        if isinstance(group.alone, Extern):
            self.call(group.alone.node)
        elif isinstance(group.alone, Check):
            if self.arrays[group.alone.flag][0]:
                raise group.alone.error(group.alone.message)
        elif group in self.program.kernels:
            for member in group.members:
                self.arrays[member.name] = self.fresh(member)
            interp.run(self.program.kernels[group], self.arrays, self.sizes)

    def fresh(self, member: Compute) -> Array:
        """Memory that holds no result yet."""
        kind = NUMPY[member.buffer.dtype]
        length = evaluate(member.buffer.size, self.sizes)
        return np.full(length, 77, np.uint8).astype(kind)

    def call(self, node: fx.Node) -> None:
        args = fx.map_arg(node.args, self.get)
        self.put(node.name, node.target(*args, **node.kwargs))


def _bits(tensor: Tensor) -> Array:
    dtype = from_torch(tensor.dtype)
    assert dtype is not None, "loops know its type"
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def require_same(
    fn: Callable[..., Any],
    *inputs: Any,
    symbolic: bool = False,
    others: tuple[tuple[Any, ...], ...] = (),
) -> Program:
    """The kernels of `fn`, once they computed what `fn` does: on `inputs` and on `others`."""
    program = scheduled(fn, *inputs, symbolic=symbolic)
    for given in (inputs, *others):
        expected = tree_flatten(fn(*given))[0]
        truths = tree_flatten(fn(*(widened(value) for value in given)))[0]
        results = interpreted(program, *given)
        for own, theirs, truth in zip(results, expected, truths, strict=True):
            assert own.stride() == theirs.stride() or not own.numel()
            assert_close_to_reference(own, theirs, truth, "result")
    return program
