"""What is known of a graph before its calls are recorded, and why some are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx

from stator.graph.edit import DONATED, EXTRAS
from stator.ops import draws
from stator.runtime.cuda_graphs import Recordable
from stator.runtime.plan import Plan, Require, make_plan
from stator.runtime.recordable import recordable, why_not_recorded
from stator.torch_api import FakeTensorMode, ShapeEnv
from tests.passes.on_cuda import CUDA, fakes, graph_of

aten = torch.ops.aten
Function = Callable[..., Any]


def planned(function: Function, *inputs: Any) -> tuple[fx.GraphModule, Plan]:
    module = graph_of(function, *inputs)
    return module, replace(make_plan(module), device=CUDA)


def reason(function: Function, *inputs: Any) -> str | None:
    module, plan = planned(function, *inputs)
    return why_not_recorded(module.graph, plan)


def test_a_plain_graph_can_be_recorded() -> None:
    module, plan = planned(lambda x, y: (x @ y, x + 1), *fakes((3, 3), (3, 3)))

    assert recordable(module.graph, plan) == Recordable(CUDA)


def with_cpu_tensor(x: Tensor) -> Tensor:
    return x * torch.empty((), device="cpu")


REFUSED: Final[dict[str, tuple[Function, str]]] = {
    "numbers": (lambda x: x * x.sum().item(), "wait for values"),
    "sizes that values decide": (aten.nonzero.default, "wait for values"),
    "a copy to the CPU": (lambda x: x.cpu(), "lies on cpu"),
    "a tensor of the CPU": (with_cpu_tensor, "lies on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_not(name: str) -> None:
    function, expected = REFUSED[name]
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(3, device=CUDA)

    assert expected in str(reason(function, x))


def test_a_graph_of_the_cpu_is_not_recorded() -> None:
    module, plan = planned(lambda x: x + 1, *fakes((3,)))
    plan = replace(plan, device=torch.device("cpu"))

    assert why_not_recorded(module.graph, plan) == "it runs on the CPU"


def test_two_gpus_are_not_recorded() -> None:
    with FakeTensorMode():
        x, y = torch.empty(3, device=CUDA), torch.empty(3, device="cuda:1")

    assert "lies on cuda:1" in str(reason(lambda x, y: (x + 1, y + 1), x, y))


def test_an_argument_that_nobody_reads_may_lie_anywhere() -> None:
    with FakeTensorMode():
        x, y = torch.empty(3, device=CUDA), torch.empty(3)

    assert reason(lambda x, y: x + 1, x, y) is None


def test_checks_of_values_are_not_recorded() -> None:
    module, plan = planned(lambda x: x + 1, *fakes((3,)))
    checked = replace(plan, steps=(*plan.steps, Require("flag", RuntimeError, "no")))

    assert "checks values" in str(why_not_recorded(module.graph, checked))


def test_a_draw_is_recorded_and_other_effects_are_not() -> None:
    graph = fx.Graph()
    for target, name in ((draws.draw_seed, "seed"), (print, "said")):
        node = graph.call_function(target, (), name=name)
        node.meta = {"effect": True, "val": None}
    graph.output(())
    plan = replace(make_plan(fx.GraphModule({}, graph)), device=CUDA)

    assert why_not_recorded(graph, plan) == "said does something beside computing"


def test_generators_of_the_programs_own_are_not_recorded() -> None:
    module, plan = planned(torch.rand_like, *fakes((3,)))
    (node,) = (node for node in module.graph.nodes if node.op == "call_function")
    node.kwargs = {**node.kwargs, "generator": torch.Generator()}

    assert "a generator of the program's own" in str(why_not_recorded(module.graph, plan))


def test_arguments_whose_sizes_are_symbols() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = mode.from_tensor(torch.empty(3, 4), static_shapes=False)
    with mode:
        static = torch.empty(2, device=CUDA)
        x = torch.empty_strided(symbolic.size(), symbolic.stride(), device=CUDA)
    module, plan = planned(lambda x, y: (x + 1, y + 1), static, x)

    assert recordable(module.graph, plan).shaped == (1,)


def test_arguments_that_are_written_to_through_views_as_well() -> None:
    module, plan = planned(
        lambda x, y, z: (aten.copy_(x, y), z.t() + 1), *fakes((3, 3), (3, 3), (3, 3))
    )

    assert {0} <= {*recordable(module.graph, plan).written}
    assert 2 not in recordable(module.graph, plan).written


def test_what_goes_from_forward_to_backward() -> None:
    module, plan = planned(lambda x, y: (x + 1, x * 2, y * 3), *fakes((3,), (3,)))
    module.graph.output_node().meta[EXTRAS] = ("mul", "mul_1")
    first, second = module.graph.find_nodes(op="placeholder")
    first.meta[DONATED], second.meta[DONATED] = True, False
    plan = replace(plan, donated=frozenset({first.name}))
    found = recordable(module.graph, plan)

    assert (found.kept, found.saved, found.overwrites) == ((1, 2), (0,), (0,))
