"""What cutting a joint graph takes, by depth: `python -m benchmarks.partition`, or `make bench`.

A training step of GPT-2 with 12 to 48 layers, at the default setting and at half of the memory.
Ours: the stage that cuts, of the largest graph.  PyTorch's: `min_cut_rematerialization_partition`
on the joint graph of its own tracer, after the passes that Inductor runs on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import fx

from benchmarks.depths import Clock, Contender, Depth, headings, measure, records_of
from benchmarks.machine import THREADS
from benchmarks.models.built import Built
from benchmarks.results import conditions, markdown_table, write_section

DEPTHS: Final = (12, 24, 48)
BUDGETS: Final = (1.0, 0.5)  # the former is what both do unasked
STAGE: Final = "partition"
PEER: Final = "PyTorch"


def forward(built: Built, program: Any) -> None:
    """What has a joint graph cut: the backward itself is not needed."""
    program(*built.inputs)


def of_stator(built: Built, budget: float) -> Clock:
    """Our cut, from the record of the largest graph."""
    options = {} if budget == 1 else {"memory_budget": budget}
    stages = [
        stage
        for record in records_of(built, forward, options)
        for stage in record.stages
        if stage.name == STAGE
    ]
    largest = max(stages, key=lambda stage: stage.nodes_before)
    return Clock(largest.seconds, largest.nodes_before)


def of_pytorch(built: Built, budget: float) -> Clock:
    """Its cut; what it is given is Inductor's, what becomes of the halves is not looked at."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    clock = Clock()
    cut = clock.timed(min_cut_rematerialization_partition)

    def partition(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        joint_graph_passes(module)
        return cut(module, inputs, **settings)

    def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler, partition_fn=partition, decompositions=select_decomp_table
    )
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        forward(built, torch.compile(built.module, backend=backend))
    return clock


def contenders(budget: float) -> dict[str, Contender]:
    """Both, at a budget."""
    return {
        "stator": partial(of_stator, budget=budget),
        PEER: partial(of_pytorch, budget=budget),
    }


def report(tables: Mapping[float, Sequence[Depth]]) -> str:
    """The section of RESULTS.md."""
    legend = (
        "The joint graph of a training step of GPT-2, cut into forward and backward: ours beside"
        " `min_cut_rematerialization_partition` on the joint graph of its own tracer. Median and"
        " quartiles of compilations in turn, after one that is not counted. *nodes* and *µs a"
        " node* are of our joint graph. The aim: a quarter at most, better a tenth, and the same"
        f" time a node at each depth. {conditions()}."
    )
    parts = [legend]
    for budget, depths in tables.items():
        parts.append(f"At budget {budget:g}:")
        parts.append(markdown_table(headings(PEER), [depth.line(PEER) for depth in depths]))
    return "\n\n".join(parts) + "\n"


def main(
    rounds: Annotated[int, typer.Option(help="Compilations of each.")] = 3,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print the tables and write them down."""
    torch.set_num_threads(THREADS)
    tables: dict[float, list[Depth]] = {}
    for budget in BUDGETS:
        both = contenders(budget)
        measure(1, 1, both)  # imports, and Inductor's tracing of its patterns
        tables[budget] = [
            measure(layers, rounds, both) for layers in track(DEPTHS, f"budget {budget:g}")
        ]
    text = report(tables)
    print(text)
    if write:
        write_section("partition", text)


if __name__ == "__main__":
    typer.run(main)
