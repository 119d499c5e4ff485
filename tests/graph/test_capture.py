"""Captured graphs as flat programs: lifted attributes, the user's lines and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from stator.errors import OptionError
from stator.graph.capture import GraphRunner, annotated_budget, attribute_tensors
from stator.torch_api import autograd_function_apply


def captured(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> fx.GraphModule:
    """The one graph that Dynamo finds in `fn`."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(module)
        forward: Callable[..., Any] = module.forward
        return forward

    torch.compile(fn, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    (module,) = found
    return module


# Attributes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift * self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()
        self.scale = nn.Parameter(torch.randn(3))
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner.forward(x) * self.scale
        return y


def test_every_tensor_that_the_graph_reads_is_found_by_name() -> None:
    net = Net()
    module = fx.symbolic_trace(net)

    found = attribute_tensors(module)

    assert {name: id(tensor) for name, tensor in found.items()} == {
        "inner.weight": id(net.inner.weight),
        "inner.shift": id(net.inner.shift),
        "scale": id(net.scale),
    }


def test_an_attribute_that_is_no_tensor_is_left_where_it_is() -> None:
    def either(x: Tensor) -> Tensor:
        branch: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return branch

    module = captured(either, torch.randn(3))

    assert module.graph.find_nodes(op="get_attr")  # the branches
    assert attribute_tensors(module) == {}


def test_lifted_attributes_are_taken_from_the_arguments() -> None:
    net, x = Net(), torch.randn(3)
    module = fx.symbolic_trace(net)
    names = list(attribute_tensors(module))
    others = {name: torch.randn(3) for name in names}
    twin = Net()
    twin.load_state_dict({**others, "unread": net.unread})

    (ours,) = GraphRunner(module, names)(x, *others.values())

    torch.testing.assert_close(ours, twin(x))
    assert not torch.allclose(ours, net(x))


def test_attributes_that_are_not_lifted_are_read_from_the_module() -> None:
    net, x = Net(), torch.randn(3)
    module = fx.symbolic_trace(net)

    (ours,) = GraphRunner(module, ["scale"])(x, torch.ones(3))

    torch.testing.assert_close(ours, net.inner(x))


# Running


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: x.sin(), 1),
        (lambda x: (x.sin(),), 1),
        (lambda x: (x.sin(), x.cos()), 2),
        (lambda x: [x.sin(), x.cos(), x], 3),
    ],
    ids=["tensor", "one", "tuple", "list"],
)
def test_results_come_as_a_flat_list(fn: Callable[..., Any], count: int) -> None:
    x = torch.randn(3)

    found = GraphRunner(fx.symbolic_trace(fn), [])(x)

    assert isinstance(found, list)
    assert len(found) == count
    assert torch.equal(found[0], x.sin())


def mismatched(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin()
    return z @ y  # the line that fails


def test_an_error_carries_the_user_s_line() -> None:
    module = captured(mismatched, torch.randn(2, 3), torch.randn(3, 2))

    with pytest.raises(RuntimeError) as caught:
        GraphRunner(module, [])(torch.randn(2, 3), torch.randn(2, 3))

    line = mismatched.__code__.co_firstlineno + 2
    assert caught.value.user_line == f"{__file__}:{line}"  # type: ignore[attr-defined]


# The user's own differentiation


class Square(torch.autograd.Function):
    """x**2, whose gradient is thrice too large, so that it is told from the formula's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = grad * x * 6
        return found


class WithLargest(torch.autograd.Function):
    """The largest element beside a result; the size is saved as a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.max()
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(largest)
        ctx.size = x.shape[0]
        return x.sin(), largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (largest,) = ctx.saved_tensors
        found: Tensor = grad * ctx.size + largest
        return found


class DoubleInPlace(torch.autograd.Function):
    """x *= 2, with a gradient of 5."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_a_user_function_keeps_its_own_backward() -> None:
    x = leaf(1, 2, 3)
    program = GraphRunner(captured(Square.apply, x), [])

    (out,) = program(x)
    (grad,) = torch.autograd.grad(out.sum(), x)

    assert out.tolist() == [1, 4, 9]
    assert grad.tolist() == [6, 12, 18]


def test_a_user_function_can_be_differentiated_again() -> None:
    x = leaf(1, 2, 3)
    program = GraphRunner(captured(Square.apply, x), [])

    (grad,) = torch.autograd.grad(program(x)[0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)

    assert second.tolist() == [6, 6, 6]


def test_an_output_marked_so_has_no_gradient() -> None:
    x = leaf(1, 3, 2)
    program = GraphRunner(captured(WithLargest.apply, x, dynamic=False), [])

    out, largest = program(x)

    assert out.requires_grad
    assert largest.item() == 3
    assert not largest.requires_grad


def test_numbers_are_saved_beside_tensors() -> None:
    x = leaf(1, 3, 2)
    module = captured(WithLargest.apply, x, dynamic=True)
    # the size is an argument of its own
    assert len(module.graph.find_nodes(op="placeholder")) == 2

    out, _ = GraphRunner(module, [])(3, x)
    (grad,) = torch.autograd.grad(out.sum(), x)

    assert grad.tolist() == [6, 6, 6]


def test_views_of_what_a_function_wrote_in_place_have_its_gradient() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 1
        view = y[1:]
        DoubleInPlace.apply(y)
        return view * 3

    x = leaf(1, 2)
    module = captured(fn, x)
    (call,) = (node for node in module.graph.nodes if node.target is autograd_function_apply)
    if "dirty_idx" not in call.kwargs:
        pytest.skip("before torch 2.13, Dynamo does not say what a function wrote in place")
    (out,) = GraphRunner(module, [])(x)
    (grad,) = torch.autograd.grad(out.sum(), x)

    assert out.tolist() == [12]
    assert grad.tolist() == [0, 15]


def test_a_program_may_run_again_if_nothing_looks_at_its_trace() -> None:
    x = torch.randn(3)
    plain = GraphRunner(captured(lambda x: x.sin() * 2, x), [])
    function = GraphRunner(captured(Square.apply, x.requires_grad_()), [])
    mapped = GraphRunner(captured(lambda x: torch.vmap(torch.sin)(x), x), [])
    again = [program.may_run_again() for program in (plain, function, mapped)]
    assert again == [True, False, False]


def noted(*budgets: float | None) -> list[fx.Node]:
    """Calls, each with what torch notes of its region's budget."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for budget in budgets:
        node = graph.call_function(torch.sin, (nodes[-1],))
        if budget is not None:
            node.meta["custom"] = {"_region_activation_memory_budget": budget}
        nodes.append(node)
    return nodes


def test_a_budget_that_all_of_a_graph_is_annotated_with_is_the_graphs() -> None:
    assert annotated_budget(noted(0.25, 0.25)) == 0.25
    assert annotated_budget(noted(None, None)) is None
    assert annotated_budget(noted()) is None


@pytest.mark.parametrize("budgets", [(0.25, None), (0.25, 0.5)])
def test_a_budget_for_a_part_of_a_graph_is_refused(budgets: tuple[float | None, ...]) -> None:
    with pytest.raises(OptionError, match="region_activation_memory_budget"):
        annotated_budget(noted(*budgets))
