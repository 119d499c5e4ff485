"""Random graphs through all passes: what they compute stays what it was.

`python -m tests.fuzz.test_passes 10000` runs more of them.
"""

from __future__ import annotations

import sys
from typing import Final

import pytest
import torch
from rich.progress import track

from stator.core.events import Compilation
from stator.core.fuel import Fuel
from stator.graph.run import Ctx, run_passes
from stator.options import Options
from stator.patterns import fwd_only, joint_fwd_bwd
from stator.pipeline import JOINT, POST_GRAD
from tests.fuzz.programs import inputs_of, program

GRAPHS: Final = 320
SHARDS: Final = 8  # so that several workers share them
ONCE_WRONG: Final = (3462,)  # a view of what a cat was put together from, in other strides


def through_all_passes(seed: int) -> list[str]:
    """Trace a program, run all passes with their values compared; the rewrites that happened."""
    inputs = inputs_of(seed)
    with_backward = seed % 2 == 1
    leaves = [x.detach().requires_grad_(with_backward) for x in inputs]
    module = (joint_fwd_bwd if with_backward else fwd_only)(program(seed), leaves)
    fuel = Fuel()
    ctx = Ctx(Options(verify_passes="values"), fuel, Compilation(), tuple(inputs))
    run_passes(JOINT, module.graph, ctx, "joint")
    run_passes(POST_GRAD, module.graph, ctx, "forward")
    return fuel.spent


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.filterwarnings("ignore")
def test_all_passes_leave_what_a_graph_computes(shard: int) -> None:
    fired = 0
    for seed in range(shard, GRAPHS, SHARDS):
        try:
            fired += len(through_all_passes(seed))
        except Exception as error:
            if torch.__version__ < (2, 13) and "list assignment index" in str(error):
                continue  # torch 2.11 has a wrong rule for splits of what is empty
            raise AssertionError(f"seed {seed}: {error}") from error
    assert fired, "no pass did anything: the graphs are not made for them"


@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_what_was_wrong_once_stays_right(seed: int) -> None:
    through_all_passes(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1])
    failed = []
    for seed in track(range(count)):
        try:
            through_all_passes(seed)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"{count} graphs, {len(failed)} failed: {failed}")
