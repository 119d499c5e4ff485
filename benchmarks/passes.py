"""What graph passes take, by depth: `python -m benchmarks.passes`, or `make bench`.

A training step of GPT-2 with 6 to 48 layers.  Ours: every pass of the compiler, before and after
differentiation and after the cut.  Inductor's: its joint and its post-grad passes, on the joint
graph that its own tracer makes, and on the halves that its partitioner cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import fx

from benchmarks.depths import Clock, Contender, Depth, headings, measure, records_of, step
from benchmarks.machine import THREADS
from benchmarks.models.built import Built
from benchmarks.results import conditions, markdown_table, write_section

DEPTHS: Final = (6, 12, 24, 48)
NOT_PASSES: Final = ("plan", "executor")
PEER: Final = "Inductor"


def of_stator(built: Built) -> Clock:
    """Our passes, from the records of the compilations."""
    passes = [
        stage
        for record in records_of(built, step, {})
        for stage in record.stages
        if "/" in stage.name and stage.name.rpartition("/")[2] not in NOT_PASSES
    ]
    joint = [stage.nodes_before for stage in passes if stage.name.startswith("joint/")]
    return Clock(sum(stage.seconds for stage in passes), max(joint))


def of_inductor(built: Built) -> Clock:
    """Its passes, called as it calls them; nothing is generated."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    clock = Clock()
    joint, post = clock.timed(joint_graph_passes), clock.timed(post_grad_passes)

    def partition(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        joint(module)
        return min_cut_rematerialization_partition(module, inputs, **settings)

    def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mode = next((x.fake_mode for x in inputs if hasattr(x, "fake_mode")), FakeTensorMode())
        with V.set_fake_mode(mode):
            post(module, False)
        module.recompile()
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler, partition_fn=partition, decompositions=select_decomp_table
    )
    torch._dynamo.reset()
    step(built, torch.compile(built.module, backend=backend))
    return clock


CONTENDERS: Final[dict[str, Contender]] = {"stator": of_stator, PEER: of_inductor}


def report(depths: Sequence[Depth]) -> str:
    """The section of RESULTS.md."""
    return (
        "All passes over a training step of GPT-2: ours on the captured graph, the joint graph and"
        " both halves; Inductor's joint and post-grad passes on its own joint graph and halves."
        " Median and quartiles of compilations in turn, after one that is not counted. *nodes* and"
        " *µs a node* are of our joint graph. The aim: a fifth, and the same time a node at each"
        f" depth. {conditions()}.\n\n"
        f"{markdown_table(headings(PEER), [depth.line(PEER) for depth in depths])}\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Compilations of each.")] = 2,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    torch.set_num_threads(THREADS)
    measure(1, 1, CONTENDERS)  # imports, and Inductor's tracing of its patterns
    text = report([measure(layers, rounds, CONTENDERS) for layers in track(DEPTHS)])
    print(text)
    if write:
        write_section("passes", text)


if __name__ == "__main__":
    typer.run(main)
