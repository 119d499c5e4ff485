"""Weights on a GPU: folded and joined there, packed by no library of the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.graph.edit import WEIGHT
from stator.graph.run import Ctx, run_passes
from stator.options import Options
from stator.passes.post_grad.fuse_conv_activation import fuse_conv_activation
from stator.passes.post_grad.linear_to_onednn import linear_to_onednn
from stator.pipeline import FREEZING, POST_GRAD
from stator.runtime.constants import State
from tests.passes.on_cuda import CUDA, fakes, graph_of

aten = torch.ops.aten


def frozen(fn: Callable[..., Any], x: Tensor, *weights: Tensor) -> list[str]:
    """What is called when all but the first input are weights, and passes are through."""
    module = graph_of(fn, x, *weights)
    for node in module.graph.find_nodes(op="placeholder")[1:]:
        node.meta[WEIGHT] = True
    run_passes((*FREEZING, *POST_GRAD), module.graph, Ctx(Options(freezing=True)), "forward")
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            assert node.meta["val"].device == CUDA, node
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_a_batch_norm_is_folded_into_the_weight_on_its_own_device() -> None:
    def program(x: Tensor, w: Tensor, *norm: Tensor) -> Tensor:
        y = aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return aten._native_batch_norm_legit_no_training(y, *norm, 0.1, 1e-5)[0].relu()

    called = frozen(program, *fakes((2, 3, 8, 8), (4, 3, 3, 3), (4,), (4,), (4,), (4,)))

    assert not any("batch_norm" in name for name in called)
    assert "aten.convolution.default" in called


def test_products_of_one_input_are_joined() -> None:
    def program(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return torch.mm(x, u).sin() + torch.mm(x, v)

    assert frozen(program, *fakes((16, 64), (64, 512), (64, 512))).count("aten.mm.default") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_libraries_of_the_cpu_are_left_out(dtype: torch.dtype) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w.t()).tanh()

    called = frozen(program, *fakes((128, 1024), (1024, 1024), (1024,), dtype=dtype))

    assert called == ["aten.t.default", "aten.addmm.default", "aten.tanh.default"]


def test_activations_are_not_put_into_convolutions() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).sigmoid()

    module = graph_of(program, *fakes((16, 3, 128, 128), (64, 3, 3, 3)))

    assert fuse_conv_activation(module.graph, Ctx()) == 0
    assert linear_to_onednn(module.graph, Ctx()) == 0


class FarWeight:
    """As much of a tensor on a GPU as is looked at; whoever reads its memory crashes."""

    device = CUDA
    _version = 3

    def data_ptr(self) -> int:
        """An address that the CPU has nothing at."""
        return 8


def test_memory_of_a_gpu_is_not_read() -> None:
    weight: Any = FarWeight()
    state = State.of([weight])

    assert state.is_now([weight])
    weight._version = 4
    assert not state.is_now([weight])
