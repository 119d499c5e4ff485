"""The logarithm of softmax in steps: the same values, and little of it is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stator.graph.run import Ctx
from stator.options import Options
from stator.passes.joint.spell_softmax import spell_softmax
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of
from tests.passes.on_cuda import fakes
from tests.passes.on_cuda import graph_of as graph_on_cuda

FOR_A_GPU = Options(codegen="triton")


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, 1)


def test_it_is_for_gpus() -> None:
    here = graph_of(log_softmax, torch.randn(3, 5))
    there = graph_on_cuda(log_softmax, *fakes((3, 5)))

    assert spell_softmax(here.graph, Ctx()) == 0
    assert spell_softmax(there.graph, Ctx()) == 1


def test_a_result_of_another_type_stays() -> None:
    (x,) = fakes((3, 5), dtype=torch.float16)
    module = graph_on_cuda(lambda x: torch.ops.aten._log_softmax.default(x, 1, True), x)

    assert spell_softmax(module.graph, Ctx()) == 0


@pytest.mark.parametrize("size", [(3, 5), (2, 3, 4), (4, 1)])
def test_values_and_gradients(size: tuple[int, ...]) -> None:
    pytest.importorskip("triton")

    check(log_softmax, torch.randn(size, requires_grad=True), options={"codegen": "triton"})


def test_infinities_and_nan() -> None:
    x = torch.randn(4, 6)
    x[0], x[1, 2], x[2, 3] = float("-inf"), float("inf"), float("nan")
    module = graph_of(log_softmax, x)
    assert spell_softmax(module.graph, Ctx(FOR_A_GPU)) == 1
    module.recompile()

    torch.testing.assert_close(module(x), log_softmax(x), equal_nan=True)
