"""`verify_passes="values"`: a pass that changes what is computed is named, with the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stator
from stator.core.events import last_compilation
from stator.errors import VerifyError
from stator.graph.compare import Before, example_inputs
from tests.parity import check
from tests.rules.tracing import traced

aten = torch.ops.aten


def wrong_sign(graph: fx.Graph, ctx: Any) -> int:
    """A wrong pass: sin becomes cos."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = aten.cos.default
        changed += 1
    return changed


@pytest.fixture
def wrong_pass() -> Iterator[None]:
    handle = stator.passes.register("joint", wrong_sign)
    yield
    handle.remove()


def program(x: Tensor) -> Tensor:
    return (x.exp().sin() * 2).sum()


@pytest.mark.usefixtures("wrong_pass")
def test_a_wrong_pass_is_named_with_its_node_and_line() -> None:
    compiled = stator.compile(program, strict=True, verify_passes="values")
    with pytest.raises(Exception, match="wrong_sign: sin has another value") as caught:
        compiled(torch.randn(5))
    assert "test_compare.py" in str(caught.value)


@pytest.mark.usefixtures("wrong_pass")
def test_without_strict_the_program_runs_in_eager_mode_and_says_why() -> None:
    x = torch.randn(5)
    compiled = stator.compile(program, verify_passes="values")
    with pytest.warns(stator.errors.StatorWarning, match="wrong_sign"):
        torch.testing.assert_close(compiled(x), program(x))


def test_our_own_passes_leave_what_models_compute() -> None:
    torch.manual_seed(0)
    model, inputs = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), torch.randn(4, 2, 16)
    check(model, inputs, options={"verify_passes": "values"})
    record = last_compilation()
    assert record is not None
    assert record.fallback is None


def test_random_graphs_are_not_compared() -> None:
    graph = traced(lambda x: torch.rand_like(x) + x, torch.randn(3)).graph
    state = torch.get_rng_state()
    assert Before.of(graph, ()) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_made_up_lies_as_the_input_does() -> None:
    inputs = [torch.randn(3, 4).t(), torch.ones(2, dtype=torch.bool), torch.arange(3)]
    graph = traced(lambda *given: sum(x.sum() for x in given), *inputs).graph
    for made, given in zip(example_inputs(graph, ()), inputs, strict=True):
        assert made.dtype == given.dtype
        assert (made.size(), made.stride()) == (given.size(), given.stride())
    assert example_inputs(graph, inputs)[0] is not inputs[0]
    assert torch.equal(example_inputs(graph, inputs)[0], inputs[0])


def test_a_value_that_nobody_returns_may_change() -> None:
    module = traced(lambda x: x.sin() + 1, torch.randn(3))
    before = Before.of(module.graph, ())
    assert before is not None
    (add,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.args = (add.args[0], 2)
    with pytest.raises(VerifyError, match="add has another value"):
        before.compare(module.graph, "a test")
