"""Freezing a graph by hand: `stator.freeze` and `stator.fw_compiler_freezing`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.patterns import fwd_only
from tests.passes.freezing.ways import expected_ways

X, W, B = torch.randn(7, 256), nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256))


@pytest.fixture(autouse=True)
def the_expected_way() -> Iterator[None]:
    with expected_ways():
        yield


def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b.exp(), x, (w * 2).t()).relu()


def traced() -> torch.fx.GraphModule:
    with torch.no_grad():
        return fwd_only(program, (X, W.detach(), B.detach()))


def test_weights_become_attributes_and_the_rest_is_taken() -> None:
    graph = traced()
    before = str(graph.graph)
    frozen, kept = stator.freeze(graph, graph, [X, W, B])

    assert kept == [0]
    assert len(frozen.graph.find_nodes(op="placeholder")) == 1
    assert str(graph.graph) == before, "what was given is left as it is"
    with torch.no_grad():
        torch.testing.assert_close(frozen(X)[0], program(X, W, B), rtol=1e-4, atol=1e-4)


def test_without_weights_nothing_is_frozen() -> None:
    graph = traced()
    frozen, kept = stator.freeze(graph, graph, [X, W.detach(), B.detach()])

    assert kept == [0, 1, 2]
    torch.testing.assert_close(frozen(X, W.detach(), B.detach())[0], program(X, W, B).detach())


def test_a_frozen_graph_compiles_and_takes_all_inputs() -> None:
    graph = traced()
    run = stator.fw_compiler_freezing(graph, [X, W, B], graph)
    expected = program(X, W, B).detach()
    with torch.no_grad():
        torch.testing.assert_close(run([X, W, B])[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            run([2 * X, W, B])[0], program(2 * X, W, B), rtol=1e-4, atol=1e-4
        )
