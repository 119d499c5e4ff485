"""Our cut in the place of PyTorch's: as `partition_fn` of its own tracer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module, make_boxed_func
from torch._functorch.partitioners import classify_nodes
from torch._functorch.partitioners import min_cut_rematerialization_partition as torchs
from torch.fx.experimental.proxy_tensor import make_fx

import stator
from stator.errors import OptionError

aten = torch.ops.aten

Program = Callable[..., Any]

BUDGETS = (0.0, 0.3, 1.0)


class Seen:
    """A partitioner that remembers what it was given, and returned."""

    def __init__(self, partition: Program = stator.min_cut_rematerialization_partition) -> None:
        self.partition = partition
        self.joint: fx.GraphModule
        self.outputs = 0
        self.halves: tuple[fx.GraphModule, ...] = ()

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        self.joint = joint
        self.outputs = kwargs["num_fwd_outputs"]
        self.halves = self.partition(joint, inputs, **kwargs)
        for half in self.halves:
            half.graph.lint()
        return self.halves

    @property
    def saved(self) -> list[fx.Node]:
        """What the forward returns beside its values."""
        return list(self.halves[0].graph.output_node().args[0])[self.outputs :]


def ours(budget: float = 1.0) -> Seen:
    return Seen(partial(stator.min_cut_rematerialization_partition, memory_budget=budget))


def nothing(module: fx.GraphModule, _: Any) -> Program:
    """A compiler that runs the graph as it is."""
    return make_boxed_func(module)  # type: ignore[no-any-return]  # untyped


def leaves(inputs: tuple[Any, ...]) -> list[Any]:
    return [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in inputs
    ]


def step(function: Program, inputs: tuple[Any, ...]) -> list[Tensor | None]:
    """Results and gradients."""
    given = leaves(inputs)
    results = function(*given)
    results = list(results) if isinstance(results, tuple | list) else [results]
    sum(part.cos().sum() for part in results if part.requires_grad).backward()
    grads = [value.grad for value in given if isinstance(value, Tensor)]
    return [*(part.detach() for part in results), *grads]


def check(function: Program, *inputs: Any, partition: Program, **kwargs: Any) -> None:
    """The step under `partition` is eager's."""
    compiled = aot_function(function, nothing, partition_fn=partition, **kwargs)
    torch.testing.assert_close(step(compiled, inputs), step(function, inputs))


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def mlp(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, v).relu().sigmoid() * 2, w).tanh().exp()


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias)) * 3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def with_input(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x, (x * y).sin(), y.exp(), x.t()


def with_constant(x: Tensor) -> Tensor:
    return (x * torch.tensor([1.0, 2.0, 3.0])).sin() * torch.arange(3)


def deep(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = F.gelu(F.layer_norm(x @ weight, (x.shape[-1],)))
    return x


PROGRAMS: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "mlp": (mlp, (rand(4, 8), rand(16, 8), rand(8, 16))),
    "layer norm and gelu": (normed, (rand(4, 8), rand(8), rand(8))),
    "attention": (attention, (rand(2, 3, 5, 8), rand(2, 3, 5, 8), rand(2, 3, 5, 8))),
    "an output that is an input": (with_input, (rand(4, 4), rand(4, 4))),
    "an input without gradient": (mlp, (torch.randn(4, 8), rand(16, 8), rand(8, 16))),
    "constants": (with_constant, (rand(3),)),
    "deep": (deep, (rand(64, 16), *(rand(16, 16) for _ in range(6)))),
}

each_program = pytest.mark.parametrize("name", PROGRAMS)


@each_program
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_is_that_of_eager(name: str, budget: float) -> None:
    function, inputs = PROGRAMS[name]
    check(function, *inputs, partition=ours(budget))


@each_program
def test_a_step_in_core_operators_is_that_of_eager(name: str) -> None:
    function, inputs = PROGRAMS[name]
    check(function, *inputs, partition=ours(), decompositions=core_aten_decompositions())


@each_program
def test_sizes_may_be_symbols(name: str) -> None:
    function, inputs = PROGRAMS[name]
    for budget in BUDGETS:
        check(function, *inputs, partition=ours(budget), dynamic=True)


def test_a_graph_with_symbols_runs_for_other_sizes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]).sin().view(-1).expand(x.shape[1], -1).exp() * x.shape[0]

    seen = ours()
    backend = aot_autograd(fw_compiler=nothing, partition_fn=seen)
    compiled = torch.compile(program, backend=backend, dynamic=True)
    inputs = rand(4, 6), rand(3, 6)
    torch.testing.assert_close(step(compiled, inputs), step(program, inputs))
    first = seen.halves
    inputs = rand(5, 7), rand(9, 7)
    torch.testing.assert_close(step(compiled, inputs), step(program, inputs))
    assert seen.halves is first


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_backward_gets_sizes_then_tensors_then_tangents(budget: float) -> None:
    """As PyTorch's own does: its wrapper counts on it."""
    for seen in (ours(budget), Seen(torchs)):
        torch.compiler.reset()
        backend = aot_autograd(fw_compiler=nothing, partition_fn=seen)
        step(torch.compile(normed, backend=backend, dynamic=True), (rand(4, 8), rand(8), rand(8)))
        forward, backward = seen.halves
        given = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        sizes = [node for node in seen.saved if isinstance(node.meta["val"], torch.SymInt)]
        tensors = [node for node in seen.saved if node not in sizes]
        assert sizes
        assert seen.saved == [*tensors, *sizes]
        assert given == [*(node.name for node in (*sizes, *tensors)), "tangents_1"]
        primals = forward.graph.find_nodes(op="placeholder")
        assert all("primals" in node.name for node in primals)


def test_a_module_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    seen = ours()
    compiled = aot_module(model, nothing, partition_fn=seen)
    x = torch.randn(3, 8)

    model(x).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled(x).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)
    assert None in seen.halves[1].graph.output_node().args[0]  # of x, which needs no gradient


@pytest.mark.parametrize("budget", BUDGETS)
def test_running_statistics_are_updated_once(budget: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    twin.load_state_dict(model.state_dict())
    backend = aot_autograd(fw_compiler=nothing, partition_fn=ours(budget))
    x = torch.randn(2, 3, 8, 8)

    torch.compile(model, backend=backend)(x).sum().backward()
    twin(x).sum().backward()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    grads = [[parameter.grad for parameter in one.parameters()] for one in (model, twin)]
    torch.testing.assert_close(*grads)


def test_an_input_that_the_forward_overwrites_keeps_its_old_value() -> None:
    def joint(primals_1: Tensor, primals_2: Tensor, tangents_1: Tensor) -> list[Tensor]:
        value = primals_1 * primals_2
        grad = tangents_1 * primals_1
        primals_1.copy_(primals_1 + 1)
        return [value, grad]

    x, y, tangent = (torch.randn(3) for _ in range(3))
    module = make_fx(joint, tracing_mode="fake")(x.clone(), y, tangent)
    forward, backward = stator.min_cut_rematerialization_partition(module, (), num_fwd_outputs=1)
    given = x.clone()
    value, *saved = forward(given, y)

    torch.testing.assert_close(given, x + 1)
    torch.testing.assert_close(value, x * y)
    torch.testing.assert_close(backward(*saved, tangent)[0], tangent * x)


def test_an_input_that_the_caller_overwrites_is_kept_as_a_copy() -> None:
    """Of x in half precision eager keeps sums in float32, and not x."""

    def wide(x: Tensor) -> Tensor:
        y = x.float()
        return ((y + 1).square() * (y + 2).square()).sum(1)

    x = torch.randn(64, 500).bfloat16().requires_grad_()
    (expected,) = torch.autograd.grad(wide(x).sum(), x)
    seen = ours()
    result = aot_function(wide, nothing, partition_fn=seen)(x)
    with torch.no_grad():
        x.zero_()
    result.sum().backward()

    assert [node.meta["val"].dtype for node in seen.saved] == [torch.bfloat16]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_mask_is_drawn_once(budget: float) -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).exp()

    x = rand(1000)
    result = aot_function(program, nothing, partition_fn=ours(budget))(x)
    result.backward(torch.ones_like(result))
    dropped = result == 1
    assert 300 < int(dropped.sum()) < 700
    assert bool((x.grad[dropped] == 0).all())
    assert bool((x.grad[~dropped] != 0).all())


@pytest.mark.parametrize("partition", [torchs, stator.min_cut_rematerialization_partition])
def test_without_gradients_the_backward_is_empty(partition: Program) -> None:
    module = make_fx(lambda primals_1: [primals_1.sin() * 2], tracing_mode="fake")(torch.randn(3))
    forward, backward = partition(module, (), num_fwd_outputs=1)
    x = torch.randn(3)
    (value,) = forward(x)
    torch.testing.assert_close(value, x.sin() * 2)
    assert [node.op for node in backward.graph.nodes] == ["output"]
    assert backward() == ()


def joint_of(function: Program, *inputs: Tensor) -> Seen:
    seen = ours()
    step(aot_function(function, nothing, partition_fn=seen), inputs)
    return seen


@pytest.mark.parametrize("name", ["mlp", "layer norm and gelu", "attention", "deep"])
def test_a_budget_of_nothing_saves_inputs_only(name: str) -> None:
    function, inputs = PROGRAMS[name]
    seen = joint_of(lambda *args: function(*args).sum(), *inputs)
    info = classify_nodes(seen.joint, [], seen.outputs)
    saved = stator.choose_saved_values_set(seen.joint.graph, info, 0)
    assert saved
    assert set(saved) <= set(info.inputs)


def test_the_set_is_what_the_partition_saves() -> None:
    function, inputs = PROGRAMS["deep"]
    seen = joint_of(function, *inputs)
    info = classify_nodes(seen.joint, [], seen.outputs)
    for budget in BUDGETS:
        saved = stator.choose_saved_values_set(seen.joint.graph, info, budget)
        again = ours(budget)
        again(seen.joint, (), num_fwd_outputs=seen.outputs)
        assert {node.name for node in again.saved} == {node.name for node in saved}


def test_less_budget_saves_fewer_bytes() -> None:
    function, inputs = PROGRAMS["deep"]
    seen = joint_of(function, *inputs)
    info = classify_nodes(seen.joint, [], seen.outputs)
    primals = set(info.inputs)
    sizes = []
    for budget in (0, 0.25, 0.5, 0.75, 1):
        saved = stator.choose_saved_values_set(seen.joint.graph, info, budget)
        sizes.append(sum(node.meta["val"].nbytes for node in saved if node not in primals))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_a_budget_out_of_range_is_refused(budget: float) -> None:
    function, inputs = PROGRAMS["mlp"]
    seen = joint_of(function, *inputs)
    info = classify_nodes(seen.joint, [], seen.outputs)
    with pytest.raises(OptionError, match=r"memory_budget .* \[0, 1\]"):
        stator.choose_saved_values_set(seen.joint.graph, info, budget)
    with pytest.raises(OptionError, match=r"memory_budget .* \[0, 1\]"):
        ours(budget)(seen.joint, (), num_fwd_outputs=1)


def test_without_node_info_it_is_said_what_is_missing() -> None:
    function, inputs = PROGRAMS["mlp"]
    seen = joint_of(function, *inputs)
    with pytest.raises(OptionError, match="required_fw_nodes"):
        stator.choose_saved_values_set(seen.joint.graph, None)


@pytest.mark.parametrize(("count", "said"), [(9, "has 4 outputs"), (2, "computed from tangents_1")])
def test_a_wrong_number_of_outputs_is_refused(count: int, said: str) -> None:
    function, inputs = PROGRAMS["mlp"]
    seen = joint_of(function, *inputs)
    with pytest.raises(OptionError, match=said):
        stator.min_cut_rematerialization_partition(seen.joint, (), num_fwd_outputs=count)


# Budgets that torch is told


def bytes_saved(program: Program, inputs: tuple[Tensor, ...]) -> int:
    seen = Seen()
    backend = aot_autograd(fw_compiler=nothing, partition_fn=seen)
    torch._dynamo.reset()
    torch.compile(program, backend=backend)(*leaves(inputs))
    return sum(node.meta["val"].nbytes for node in seen.saved)


def test_torchs_setting_is_the_budget_where_none_is_given() -> None:
    program, inputs = PROGRAMS["deep"]
    usual = bytes_saved(program, inputs)

    with torch._functorch.config.patch(activation_memory_budget=0.0):
        assert bytes_saved(program, inputs) < usual


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    reason="this torch has no annotation of budgets",
)
def test_torchs_annotation_is_the_budget_where_none_is_given() -> None:
    program, inputs = PROGRAMS["deep"]

    def annotated(*inputs: Tensor) -> Any:
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return program(*inputs)

    assert bytes_saved(annotated, inputs) < bytes_saved(program, inputs)
