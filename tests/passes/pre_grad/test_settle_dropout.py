"""Dropout that draws nothing is settled before the trace; all other dropout stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.pre_grad.settle_dropout import settle_dropout

Program = Callable[..., Any]


def settled(module: fx.GraphModule, fuel: int | None = None) -> int:
    """Run the pass; how many it says it settled."""
    count = settle_dropout(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="settle_dropout")
    module.recompile()
    return count


def dropouts_in(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=F.dropout))


def graph_calling(*args: Any, **kwargs: Any) -> fx.GraphModule:
    """`dropout(x, …) * 2` with the arguments spelled as given."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = {"input": x} if "input" in kwargs else {}
    positional = () if given else (x,)
    dropout = graph.call_function(F.dropout, (*positional, *args), {**kwargs, **given})
    dropout.meta["stack_trace"] = 'File "net.py", line 3, in forward'
    graph.output(graph.call_function(torch.mul, (dropout, 2)))
    return fx.GraphModule(nn.Module(), graph)


# How the arguments are spelled, and what eager makes of them.
FIRES: dict[str, fx.GraphModule] = {
    "not training": graph_calling(0.5, False),
    "not training, by name": graph_calling(training=False),
    "nothing by position": graph_calling(input=None, p=0.3, training=False),
    "keeps everything": graph_calling(0.0),
    "keeps everything, as an integer": graph_calling(p=0, training=True),
    "keeps nothing": graph_calling(1.0),
    "keeps nothing, as an integer": graph_calling(p=1, training=True),
    "keeps nothing, not training": graph_calling(1.0, False),
}

SILENT: dict[str, fx.GraphModule] = {
    "draws": graph_calling(0.5),
    "draws by default": graph_calling(),
    "draws rarely": graph_calling(1e-9, True),
    "in place": graph_calling(0.5, False, True),
    "in place, by name": graph_calling(0.0, inplace=True),
    "keeps nothing, in place": graph_calling(1.0, True, True),
}


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The pass edits what it gets, and the table serves several tests."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


fires = pytest.mark.parametrize("module", FIRES.values(), ids=FIRES.keys())


@fires
def test_dropout_that_draws_nothing_is_settled_as_eager_does(module: fx.GraphModule) -> None:
    ours = copy_of(module)
    x = torch.tensor([1.0, -1.0, 0.0, torch.inf, -torch.inf, torch.nan])

    assert settled(ours) == 1
    assert dropouts_in(ours) == 0
    torch.testing.assert_close(ours(x), module(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours(x).signbit(), module(x).signbit())


@fires
def test_settled_dropout_has_eager_s_gradient(module: fx.GraphModule) -> None:
    ours = copy_of(module)
    settled(ours)
    x = torch.randn(4, requires_grad=True)

    (grad,) = torch.autograd.grad(ours(x).sum(), x)

    assert torch.equal(grad, torch.autograd.grad(module(x).sum(), x)[0])


@pytest.mark.parametrize("module", SILENT.values(), ids=SILENT.keys())
def test_any_other_dropout_stays(module: fx.GraphModule) -> None:
    ours = copy_of(module)
    before = str(ours.graph)

    assert settled(ours) == 0
    assert str(ours.graph) == before


@fires
def test_without_fuel_nothing_changes(module: fx.GraphModule) -> None:
    ours = copy_of(module)
    before = str(ours.graph)

    assert settled(ours, fuel=0) == 0
    assert str(ours.graph) == before


def test_fuel_is_spent_call_by_call() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, training=False).sin(), training=False)

    module = fx.symbolic_trace(fn)

    assert settled(module, fuel=1) == 1
    assert dropouts_in(module) == 1


def test_dropout_that_draws_costs_no_fuel() -> None:
    fuel = Fuel(1)
    module = fx.symbolic_trace(lambda x: F.dropout(F.dropout(x, 0.5), 0.0))

    settle_dropout(module.graph, Ctx(fuel=fuel))

    assert fuel.left == 0
    assert dropouts_in(module) == 1


def test_a_probability_known_at_run_time_only_is_left_alone() -> None:
    graph = fx.Graph()
    x, p = graph.placeholder("x"), graph.placeholder("p")
    graph.output(graph.call_function(F.dropout, (x, p, False)))

    assert settled(fx.GraphModule(nn.Module(), graph)) == 0


def test_what_replaces_dropout_keeps_the_user_s_line() -> None:
    module = copy_of(graph_calling(1.0))
    settled(module)

    zeroed = module.graph.find_nodes(op="call_function", target=torch.mul)[0]

    assert zeroed.args[1] == 0
    assert "net.py" in zeroed.meta["stack_trace"]


# In a compilation


def compiled(fn: Program, **options: Any) -> Any:
    return stator.compile(fn, strict=True, **options)


def test_a_compiled_model_in_evaluation_draws_nothing_and_returns_its_input() -> None:
    model = nn.Dropout(0.5).eval()
    x, state = torch.randn(3), torch.get_rng_state()

    out = compiled(model)(x)

    assert out is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_compiled_model_in_training_draws_nothing_where_eager_does_not(p: float) -> None:
    model, x = nn.Dropout(p).train(), torch.randn(3)
    state = torch.get_rng_state()

    out = compiled(model)(x)

    assert torch.equal(out, model(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_compiled_model_in_training_draws_eager_s_numbers() -> None:
    model, x = nn.Dropout(0.5).train(), torch.randn(1000)
    state = torch.get_rng_state()
    eager = model(x)
    moved = torch.get_rng_state()
    torch.set_rng_state(state)

    ours = compiled(model, fallback_random=True)(x)

    assert torch.equal(ours, eager)
    assert torch.equal(torch.get_rng_state(), moved)
