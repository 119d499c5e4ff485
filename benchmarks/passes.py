"""What graph passes take, by depth: `python -m benchmarks.passes`, or `make bench`.

A training step of GPT-2 with 6 to 48 layers.  Ours: every pass of the compiler, before and after
differentiation and after the cut.  Inductor's: its joint and its post-grad passes, on the joint
graph that its own tracer makes, and on the halves that its partitioner cuts.  Widths are small:
passes do not see them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import fx

import stator
from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import THREADS
from benchmarks.models import text
from benchmarks.models.built import Built
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED
from benchmarks.spread import Spread

DEPTHS: Final = (6, 12, 24, 48)
SMALL: Final = replace(text.TINY, width=64, inner=128, length=32)
NOT_PASSES: Final = ("plan", "executor")


@dataclass(slots=True)
class Clock:
    """Seconds in passes, and how many nodes they were given."""

    seconds: float = 0.0
    nodes: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts."""

        def call(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.nodes += len(module.graph.nodes)
            begin = time.perf_counter()
            try:
                return function(module, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def step(built: Built, program: Any) -> None:
    """One training step."""
    program(*built.inputs).backward()
    for parameter in built.module.parameters():
        parameter.grad = None


def of_stator(built: Built) -> Clock:
    """Our passes, from the records of the compilations."""
    records = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        call = stator.compile_fx(module, inputs, options=STATOR_OPTIONS)
        record = stator.last_compilation()
        assert record is not None, "nothing was compiled"
        records.append(record)
        return call

    torch._dynamo.reset()
    step(built, torch.compile(built.module, backend=backend))
    passes = [
        stage
        for record in records
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


CONTENDERS: Final[dict[str, Callable[[Built], Clock]]] = {
    "stator": of_stator,
    "Inductor": of_inductor,
}


@dataclass(slots=True)
class Depth:
    """All measurements of one depth."""

    layers: int
    clocks: dict[str, list[Clock]] = field(default_factory=dict)

    def line(self) -> list[str]:
        """A row of the table."""
        ours, theirs = (
            [clock.seconds for clock in self.clocks[name]] for name in ("stator", "Inductor")
        )
        nodes = self.clocks["stator"][0].nodes
        return [
            str(self.layers),
            str(nodes),
            f"{Spread.of([1e3 * seconds for seconds in ours]):.0f}",
            f"{Spread.of([1e3 * seconds for seconds in theirs]):.0f}",
            f"{Spread.of_ratios(ours, theirs):.2f}",
            f"{1e6 * Spread.of(ours).median / nodes:.0f}",
        ]


def measure(layers: int, rounds: int) -> Depth:
    """Both contenders in turn."""
    torch.manual_seed(SEED)
    built = text.gpt2(replace(SMALL, layers=layers), train=True)
    depth = Depth(layers, {name: [] for name in CONTENDERS})
    for _ in range(rounds):
        for name, contender in CONTENDERS.items():
            depth.clocks[name].append(contender(built))
    return depth


def report(depths: Sequence[Depth]) -> str:
    """The section of RESULTS.md."""
    headings = ["layers", "nodes", "stator, ms", "Inductor, ms", "of Inductor's", "µs a node"]
    return (
        "All passes over a training step of GPT-2: ours on the captured graph, the joint graph and"
        " both halves; Inductor's joint and post-grad passes on its own joint graph and halves."
        " Median and quartiles of compilations in turn, after one that is not counted. *nodes* and"
        " *µs a node* are of our joint graph. The aim: a fifth, and the same time a node at each"
        f" depth. {conditions()}.\n\n"
        f"{markdown_table(headings, [depth.line() for depth in depths])}\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Compilations of each.")] = 2,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    torch.set_num_threads(THREADS)
    measure(1, 1)  # imports, and Inductor's tracing of its patterns
    text_ = report([measure(layers, rounds) for layers in track(DEPTHS)])
    print(text_)
    if write:
        write_section("passes", text_)


if __name__ == "__main__":
    typer.run(main)
