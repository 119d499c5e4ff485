"""Work and memory cost what they do on the device of the values."""

from __future__ import annotations

import torch
from torch import fx

from stator.aot.partition.rates import CPU, CPU_PRICES, GPU, GPU_PRICES, prices_of, rates_of
from stator.aot.partition.weigh import work_of
from stator.torch_api import FakeTensorMode


def product_on(device: str) -> fx.Node:
    """A node that multiplies two matrices there."""
    with FakeTensorMode():
        x = torch.empty(64, 64, device=device)
    graph = fx.Graph()
    left, right = (graph.placeholder(name) for name in ("x", "y"))
    node = graph.call_function(torch.ops.aten.mm.default, (left, right))
    for one in (left, right, node):
        one.meta["val"] = x
    return node


def test_a_product_is_cheaper_on_a_gpu() -> None:
    here, there = product_on("cpu"), product_on("cuda")

    assert work_of(here) - work_of(there) == (CPU.multiplication - GPU.multiplication) * 64**3


def test_values_know_their_device() -> None:
    here, there = product_on("cpu").meta["val"], product_on("cuda").meta["val"]

    assert rates_of(here) is CPU
    assert rates_of((None, there)) is GPU
    assert rates_of(7) is CPU


def test_one_value_on_a_gpu_makes_memory_cost_what_it_does_there() -> None:
    here, there = product_on("cpu"), product_on("cuda")

    assert prices_of([here]) is CPU_PRICES
    assert prices_of([here, there]) is GPU_PRICES
