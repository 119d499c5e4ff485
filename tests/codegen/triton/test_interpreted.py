"""Random kernels: what Triton makes of them, by its interpreter, against ours."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from stator.loops.ir import Accumulate, Kernel, Store
from stator.loops.text import to_text
from tests import parity
from tests.fuzz.cases import case_of, decisions_of

pytest.importorskip("triton")

NUMBERS: Final = 400  # of which about half are kernels as they are built for a GPU
SHARDS: Final = 4  # so that several workers share them


def is_for_a_gpu(kernel: Kernel) -> bool:
    """Whether the scheduler would build it: in registers, scans by themselves, one at a time."""
    if kernel.is_list or kernel.scratch:
        return False
    stores = [s for s in kernel.statements if isinstance(s, Store)]
    if any(store.combine is not None for store in stores):
        return False
    scans = [[type(s) for s in stage.body] for stage in kernel.stages if stage.in_order]
    return all(kinds == [Accumulate, Store] for kinds in scans)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_triton_agrees_with_the_interpreter(shard: int) -> None:
    from stator.codegen.triton.interpreted import interpreted
    from tests.fuzz.cases import Run

    tried = 0
    for number in range(shard, NUMBERS, SHARDS):
        case = case_of(decisions_of(number))
        if not is_for_a_gpu(case.kernel):
            continue
        run = Run.of(case.kernel, case.seeds[0])
        interpreted(case.kernel)(*run.line(case.kernel), 1)
        tried += 1

        assert run.failure(case.kernel) is None, f"case {number}\n{to_text(case.kernel)}"
    assert tried > NUMBERS // SHARDS // 4


def test_every_number_of_bf16_is_read_as_it_is() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)

    parity.check(lambda x: [x.float(), x.signbit(), x != 0], every, options={"codegen": "triton"})
