"""What the compiler makes of a program's kernels for a GPU: their machine code, counted.

    python -m benchmarks.gpu_code bias_gelu softmax

No card is needed: tensors are fake.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from benchmarks.gpu_cases import KERNELS, Kernel
from benchmarks.machine_code import operations
from stator.aot.compile import trace_and_cut
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import shape_of
from stator.core.events import start_compilation
from stator.graph.capture import attribute_tensors
from stator.graph.registry import with_registered
from stator.graph.run import run_passes
from stator.lower.lower import Lowering
from stator.lower.target import target_of
from stator.options import Options
from stator.pipeline import POST_GRAD, make_tools, prepare
from stator.runtime.fused import plan_kernels
from stator.runtime.loading import Loading
from stator.runtime.plan import Launch
from stator.torch_api import FakeTensorMode

CARD: Final = torch.device("cuda", 0)
HOPPER: Final = 90
COLUMNS: Final = (
    *("kernel", "times", "shape", "instructions", "registers", "spilled", "shared bytes"),
    *("reads", "writes", "through shared", "float64", "calls"),
)
SHARED: Final = ("LDS", "STS")
FLOAT64: Final = ("DADD", "DMUL", "DFMA", "DSETP")
_WIDTH: Final = re.compile(r"\.(?:U|S)?(8|16|64|128)\b")
ROWS: Final = {case.name: case for case in KERNELS}


def captured(case: Kernel) -> tuple[fx.GraphModule, list[Any]]:
    """A row's program as Dynamo sees it, and what it is called with, on a card that need not be."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((module, inputs))
        return module.forward

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        program = torch.compile(case.program, backend=backend, fullgraph=True)
        program(*map(_moved, case.draw(case.full)))
    return found[0]


def _moved(value: Tensor) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CARD)


def launches_of(module: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[Launch, bool]]:
    """The kernels of a captured graph in order, and whether their tensors begin at 16 bytes."""
    mode = FakeTensorMode()
    lifted = attribute_tensors(module)
    with mode:
        fakes = [_moved(value) for value in (*inputs, *lifted.values())]
    tools = make_tools(Options(strict=True, cache=False), start_compilation())
    program = prepare(module, list(lifted), tools)
    with torch.no_grad():
        _, halves = trace_and_cut(program, fakes, mode, tools)
    half, ctx = halves.forward, tools.ctx
    run_passes(with_registered("post_grad", POST_GRAD), half.graph, ctx, "forward")
    lowering = Lowering(half, fuel=ctx.kernel_fuel, target=target_of(half.graph))
    loading = Loading(now=False)
    plan = plan_kernels(half, ctx.record, "code", ctx.dump, loading=loading, lowering=lowering)
    launches = (step for step in plan.steps if isinstance(step, Launch))
    return [(launch, plan.loose.isdisjoint(launch.takes)) for launch in launches]


def lines_of(case: Kernel) -> Iterator[tuple[str, ...]]:
    """A line of the table for each kernel."""
    from stator.codegen.triton.compile import compile_all

    counted = Counter((one.nameless, aligned) for one, aligned in launches_of(*captured(case)))
    for (kernel, aligned), times in counted.items():
        shape = shape_of(kernel)
        (cubin,) = compile_all([write_kernel(kernel, shape)], HOPPER, aligned=aligned)
        found, registers = operations(cubin.code)
        size = f"{shape.outer}x{shape.inner} by {shape.warps}"
        counts = (len(found), registers, _count(found, "LDL", "STL"), cubin.shared)
        moves = (_widths(found, "LDG"), _widths(found, "STG"))
        others = [_count(found, *names) for names in (SHARED, FLOAT64, ("CALL",))]
        yield (shape.kind, str(times), size, *map(str, (*counts, *moves, *others)))


def _count(found: Sequence[str], *names: str) -> int:
    return sum(name.startswith(names) for name in found)


def _widths(found: Sequence[str], name: str) -> str:
    """How many accesses of how many bits."""
    widths = Counter(
        int(width[1]) if (width := _WIDTH.search(one)) else 32
        for one in found
        if one.startswith(name)
    )
    return ", ".join(f"{count} of {width}" for width, count in sorted(widths.items()))


def main(rows: Annotated[list[str] | None, typer.Argument(help="all, if none")] = None) -> None:
    """Print a table for each row."""
    for name in rows or ROWS:
        if name not in ROWS:
            raise typer.BadParameter(f"no row {name!r}; there are {', '.join(ROWS)}")
        table = Table(*COLUMNS, title=name)
        for line in lines_of(ROWS[name]):
            table.add_row(*line)
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
