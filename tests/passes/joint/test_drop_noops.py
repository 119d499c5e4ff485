"""What changes nothing is dropped; all else, and what the caller gets, stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint.drop_noops import COPIES, VIEWS, drop_noops
from tests.parity import check

aten = torch.ops.aten

Program = Callable[..., Any]


def graph_of(fn: Program, *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    """`fn` recorded operator by operator, with fake values."""
    module: fx.GraphModule = make_fx(fn, tracing_mode=mode)(*inputs)
    return module


def dropped(module: fx.GraphModule, fuel: int | None = None) -> int:
    """Run the pass; how many nodes it says it dropped."""
    count = drop_noops(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="drop_noops")
    module.recompile()
    return count


def noops_in(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.target in (*VIEWS, *COPIES)]


def strided(*shape: int, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride).normal_()


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


# Each reads something that changes nothing.
FIRES: dict[str, tuple[Program, Tensor]] = {
    "alias": (lambda x: aten.alias(x) + 1, torch.randn(2, 3)),
    "detach": (lambda x: aten.detach(x) + 1, torch.randn(2, 3)),
    "view": (lambda x: aten.view(x, [2, 3]) + 1, torch.randn(2, 3)),
    "view in the same type": (lambda x: aten.view.dtype(x, x.dtype) + 1, torch.randn(2, 3)),
    "inferred size": (lambda x: aten.view(x, [-1, 3]) + 1, torch.randn(2, 3)),
    "expand": (lambda x: aten.expand(x, [2, 3]) + 1, torch.randn(2, 3)),
    "expand keeps -1": (lambda x: aten.expand(x, [-1, 3]) + 1, torch.randn(2, 3)),
    "unsafe view": (lambda x: aten._unsafe_view(x, [2, 3]) + 1, torch.randn(2, 3)),
    "read twice": (lambda x: aten.alias(x) * aten.sin(aten.alias(x)), torch.randn(2, 3)),
    "slice": (lambda x: aten.slice(x, 1, 0, 9) + 1, torch.randn(2, 3)),
    "negative begin": (lambda x: aten.slice(x, 1, -3) + 1, torch.randn(2, 3)),
    "swap of ones": (lambda x: aten.transpose(x, 0, 1) + 1, strided(1, 1, 3, stride=(3, 3, 1))),
    "permute to itself": (lambda x: aten.permute(x, [0, 1]) + 1, torch.randn(2, 3)),
    "squeeze of none": (lambda x: aten.squeeze(x, 1) + 1, torch.randn(2, 3)),
    "clone": (lambda x: aten.clone(x) + 1, torch.randn(2, 3)),
    "clone in a format": (
        lambda x: aten.clone(x, memory_format=torch.contiguous_format) + 1,
        torch.randn(2, 3),
    ),
    "cast": (lambda x: aten._to_copy(x, dtype=torch.float32) + 1, torch.randn(2, 3)),
    "copy": (lambda x: aten.copy(aten.sin(x), x) + 1, torch.randn(2, 3)),
    "slice_scatter": (
        lambda x: aten.slice_scatter(aten.sin(x), x, 1, 0, 3) + 1,
        torch.randn(2, 3),
    ),
    "repeat": (lambda x: aten.repeat(x, [1, 1]) + 1, torch.randn(2, 3)),
    "pad": (lambda x: aten.constant_pad_nd(x, [0, 0, 0, 0], 3.0) + 1, torch.randn(2, 3)),
    "power": (lambda x: aten.pow(x, 1) + 1, torch.tensor([float("nan"), -0.0, torch.inf])),
    "power as float": (lambda x: aten.pow(x, 1.0) + 1, torch.randn(3)),
    "round": (lambda x: aten.round(x) + 1, numbers(2, 3)),
    "floor": (lambda x: aten.floor(x) + 1, numbers(2, 3)),
    "ceil": (lambda x: aten.ceil(x) + 1, numbers(2, 3)),
    "trunc": (lambda x: aten.trunc(x) + 1, numbers(2, 3)),
    "cat": (lambda x: aten.cat([x], 1) + 1, torch.randn(2, 3)),
}

# Each of these changes something, or is returned.
SILENT: dict[str, tuple[Program, Tensor]] = {
    "other shape": (lambda x: aten.view(x, [3, 2]) + 1, torch.randn(2, 3)),
    "one dimension more": (lambda x: aten.view(x, [1, 2, 3]) + 1, torch.randn(2, 3)),
    "larger": (lambda x: aten.expand(x, [2, 3]) + 1, torch.randn(1, 3)),
    "returned": (lambda x: aten.view(aten.sin(x), [2, 3]), torch.randn(2, 3)),
    "returned among others": (lambda x: [aten.sin(x), aten.alias(x)], torch.randn(2, 3)),
    "returned deep inside": (lambda x: ([x], [[aten.clone(x)]]), torch.randn(2, 3)),
    "sparse": (lambda x: aten.detach(x).to_dense() + 1, torch.eye(3).to_sparse()),
    "swap": (lambda x: aten.t(x) + 1, torch.randn(2, 2)),
    "part": (lambda x: aten.slice(x, 1, 0, 2) + 1, torch.randn(2, 3)),
    "every second": (lambda x: aten.slice(x, 1, 0, 3, 2) + 1, torch.randn(2, 3)),
    "clone returned": (lambda x: aten.clone(x), torch.randn(2, 3)),
    "view of a clone returned": (lambda x: aten.view(aten.clone(x), [6]), torch.randn(2, 3)),
    "part of a clone returned": (
        lambda x: aten.split(aten.clone(x), [1, 2], 1)[1],
        torch.randn(2, 3),
    ),
    "clone by addresses": (
        lambda x: aten.as_strided(aten.clone(x), [2], [1], 1) + 1,
        torch.randn(2, 3),
    ),
    "clone by rows": (
        lambda x: aten.clone(x, memory_format=torch.contiguous_format) + 1,
        strided(2, 3, stride=(1, 2)),
    ),
    "clone of an expanded one": (lambda x: aten.clone(aten.expand(x, [2, 3])) + 1, torch.randn(3)),
    "conjugation settled": (
        lambda x: aten.clone(aten._conj(x)) + 1,
        torch.randn(3, dtype=torch.complex64),
    ),
    "cast to another type": (lambda x: aten._to_copy(x, dtype=torch.float64) + 1, torch.randn(3)),
    "copy of another type": (lambda x: aten.copy(x, aten.gt(x, 0)) + 1, torch.randn(3)),
    "copy of a row": (lambda x: aten.copy(aten.sin(x), aten.select(x, 0, 0)), torch.randn(2, 3)),
    "slice_scatter of a part": (
        lambda x: aten.slice_scatter(x, aten.slice(x, 1, 0, 2), 1, 1, 3) + 1,
        torch.randn(2, 3),
    ),
    "repeated": (lambda x: aten.repeat(x, [1, 2]) + 1, torch.randn(2, 3)),
    "repeated in front": (lambda x: aten.repeat(x, [1, 1, 1]) + 1, torch.randn(2, 3)),
    "padded": (lambda x: aten.constant_pad_nd(x, [0, 1], 3.0) + 1, torch.randn(2, 3)),
    "moved by padding": (lambda x: aten.constant_pad_nd(x, [1, -1], 3.0) + 1, torch.randn(2, 3)),
    "square": (lambda x: aten.pow(x, 2) + 1, torch.randn(3)),
    "power that promotes": (lambda x: aten.pow(x, 1.0) + 1, numbers(3)),
    "round of floats": (lambda x: aten.round(x) + 1, torch.randn(3)),
    "cat of two": (lambda x: aten.cat([x, x], 1) + 1, torch.randn(2, 3)),
}


@pytest.mark.parametrize(("fn", "x"), FIRES.values(), ids=FIRES.keys())
def test_what_changes_nothing_is_dropped_and_the_result_is_eager_s(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)
    found = len(noops_in(module))

    assert found > 0
    assert dropped(module) == found
    assert noops_in(module) == []
    torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("fn", "x"), SILENT.values(), ids=SILENT.keys())
def test_anything_else_stays(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)
    before = str(module.graph)

    assert dropped(module) == 0
    assert str(module.graph) == before


@pytest.mark.parametrize(("fn", "x"), FIRES.values(), ids=FIRES.keys())
def test_without_fuel_nothing_changes(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)
    before = str(module.graph)

    assert dropped(module, fuel=0) == 0
    assert str(module.graph) == before


def test_before_and_after() -> None:
    def fn(x: Tensor) -> Tensor:
        y = aten.clone(aten.view(x, [2, 3]))
        result: Tensor = aten.cat([aten.sin(y)], 0) + 1
        return result

    module = graph_of(fn, torch.randn(2, 3))
    body = "\n".join(str(node.format_node()) for node in module.graph.nodes)
    assert body == BEFORE
    assert dropped(module) == 3
    body = "\n".join(str(node.format_node()) for node in module.graph.nodes)
    assert body == AFTER


BEFORE = """\
%x_1 : [num_users=1] = placeholder[target=x_1]
%view : [num_users=1] = call_function[target=torch.ops.aten.view.default](args = (%x_1, [2, 3]), kwargs = {})
%clone : [num_users=1] = call_function[target=torch.ops.aten.clone.default](args = (%view,), kwargs = {})
%sin : [num_users=1] = call_function[target=torch.ops.aten.sin.default](args = (%clone,), kwargs = {})
%cat : [num_users=1] = call_function[target=torch.ops.aten.cat.default](args = ([%sin],), kwargs = {})
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%cat, 1), kwargs = {})
return add"""  # noqa: E501  # the text of a graph
AFTER = """\
%x_1 : [num_users=1] = placeholder[target=x_1]
%sin : [num_users=1] = call_function[target=torch.ops.aten.sin.default](args = (%x_1,), kwargs = {})
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%sin, 1), kwargs = {})
return add"""  # noqa: E501  # the text of a graph


def test_fuel_is_spent_one_by_one_and_says_for_what() -> None:
    def fn(x: Tensor) -> Tensor:
        y: Tensor = aten.alias(aten.sin(aten.clone(x))) + 1
        return y

    x = torch.randn(2, 3)
    module = graph_of(fn, x)
    fuel = Fuel(1)

    assert drop_noops(module.graph, Ctx(fuel=fuel)) == 1
    assert fuel.spent == ["drop_noops: alias"]
    module.recompile()
    assert noops_in(module) == [aten.clone.default]
    assert torch.equal(module(x), fn(x))


def test_a_chain_collapses_to_its_beginning() -> None:
    def fn(x: Tensor) -> Tensor:
        y = aten.expand(aten.clone(aten.view(aten.clone(aten.alias(x)), [2, 3])), [2, 3])
        result: Tensor = aten.sin(y)
        return result

    module = graph_of(fn, torch.randn(2, 3))

    assert dropped(module) == 5
    (sin,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert sin.args[0].op == "placeholder"


def test_a_returned_view_reads_the_beginning_of_its_chain() -> None:
    module = graph_of(lambda x: aten.alias(aten.view(x, [2, 3])), torch.randn(2, 3))

    assert dropped(module) == 1
    assert noops_in(module) == [aten.alias.default]
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    assert alias.args[0].op == "placeholder"


def test_bits_of_another_type_are_a_view_that_stays() -> None:
    module = graph_of(lambda x: aten.view.dtype(x, torch.int32) + 1, torch.randn(2, 3))

    assert dropped(module) == 1  # a detach, which make_fx adds
    assert noops_in(module) == [aten.view.dtype]


def test_of_two_clones_in_a_row_the_returned_one_stays() -> None:
    module = graph_of(lambda x: aten.clone(aten.clone(x)), torch.randn(2, 3))

    assert dropped(module) == 1
    assert noops_in(module) == [aten.clone.default]


def test_strides_that_are_no_standard_ones_may_be_the_same() -> None:
    x = strided(2, 3, stride=(1, 2))

    assert dropped(graph_of(lambda x: aten.alias(x) + 1, x)) == 1
    assert dropped(graph_of(lambda x: aten.clone(x) + 1, x)) == 1


def test_a_complex_view_keeps_its_conjugation() -> None:
    x = torch.randn(2, 3, dtype=torch.complex64)

    def fn(x: Tensor) -> Tensor:
        y: Tensor = aten.alias(aten._conj(x)) * 2
        return y

    module = graph_of(fn, x)

    assert dropped(module) == 1
    assert torch.equal(module(x), fn(x))


def alias_that_gives(value: Any) -> fx.GraphModule:
    """alias(x) + 1, where the alias is said to have another value than x: f32[2, 3]."""
    module = graph_of(lambda x: aten.alias(x) + 1, torch.randn(2, 3))
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    alias.meta["val"] = value
    return module


@pytest.mark.parametrize(
    "value",
    [
        strided(2, 3, stride=(1, 2)),
        torch.randn(2, 3, dtype=torch.float64),
        torch._neg_view(torch.randn(2, 3)),
        torch.eye(2, 3).to_sparse(),
        None,
        (torch.randn(2, 3),),
    ],
    ids=["strides", "dtype", "negation", "layout", "unknown", "several"],
)
def test_a_view_that_differs_in_anything_stays(value: Any) -> None:
    assert dropped(alias_that_gives(value)) == 0


def test_a_view_of_the_same_geometry_is_dropped_whatever_its_values() -> None:
    assert dropped(alias_that_gives(torch.zeros(2, 3))) == 1


def test_a_constant_is_read_as_it_is() -> None:
    module = alias_that_gives(torch.randn(2, 3))
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    alias.target = aten.lift_fresh.default  # only functionalization leaves one in a graph

    assert dropped(module) == 1


# Writes


def test_a_copy_of_an_input_that_the_graph_writes_to_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        old = aten.clone(x)
        aten.copy_(x, aten.sin(x))
        result: Tensor = old + 1
        return result

    x = torch.randn(3)
    module = graph_of(fn, x)

    assert dropped(module) == 0
    assert torch.equal(module(x.clone()), fn(x.clone()))


def test_two_inputs_that_change_places_keep_their_copies() -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        one, other = aten.clone(x), aten.clone(y)
        aten.copy_(x, other)
        aten.copy_(y, one)

    assert dropped(graph_of(fn, torch.randn(3), torch.randn(3))) == 0


def test_the_new_value_of_an_input_may_lose_a_copy() -> None:
    def fn(x: Tensor) -> None:
        aten.copy_(x, aten.clone(aten.sin(x)))

    assert dropped(graph_of(fn, torch.randn(3))) == 1


# Symbolic sizes


def test_a_view_to_the_same_symbolic_size_is_dropped() -> None:
    module = graph_of(lambda x: aten.view(x, x.shape) + 1, torch.randn(4, 6), mode="symbolic")

    assert dropped(module) == 1
    x = torch.randn(7, 5)
    assert torch.equal(module(x), x + 1)


def test_a_slice_of_all_of_a_symbolic_size_is_dropped() -> None:
    def fn(x: Tensor) -> Tensor:
        y: Tensor = aten.slice(x, 0, 0, x.shape[0]) + 1
        return y

    module = graph_of(fn, torch.randn(4, 6), mode="symbolic")

    assert dropped(module) == 1
    x = torch.randn(7, 5)
    assert torch.equal(module(x), x + 1)


def test_a_view_that_moves_symbolic_sizes_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        rows, columns = x.shape
        y: Tensor = aten.view(x, [columns, rows]) + 1
        return y

    module = graph_of(fn, torch.randn(4, 6), mode="symbolic")

    assert dropped(module) == 0


@pytest.mark.parametrize("target", [aten.alias.default, aten.clone.default])
def test_comparing_symbolic_sizes_adds_no_guard(target: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return target(x) + 1, y * 2

    module = graph_of(fn, torch.randn(4, 6), torch.randn(3, 5), mode="symbolic")
    x, y = module.graph.find_nodes(op="placeholder")
    (noop,) = module.graph.find_nodes(op="call_function", target=target)
    noop.meta["val"] = y.meta["val"]  # whether their sizes are equal, nobody has asked yet
    guards = x.meta["val"].size(0).node.shape_env.guards
    before = len(guards)

    assert dropped(module) == 0
    assert len(guards) == before


# In a compilation


def test_a_compiled_function_returns_a_view_and_not_its_input() -> None:
    x = torch.randn(2, 3)

    out = stator.compile(lambda x: x.view(2, 3), strict=True)(x)

    assert out is not x
    assert out.data_ptr() == x.data_ptr()


def test_a_compiled_forward_holds_nothing_that_changes_nothing() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    stator.compile(lambda x: x.view(2, 3).detach().sin() * x.expand(2, 3), strict=True)(x)
    record = stator.last_compilation()

    assert record is not None
    assert not any(f"{target}" in record.graphs["forward"] for target in VIEWS)
    assert not any(f"{target}" in record.graphs["joint"] for target in VIEWS)


def swap_in_place(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def keep_and_count(x: Tensor, b: Tensor) -> Tensor:
    old = b.clone()
    b.add_(1)
    return (x * old).sin()


PROGRAMS: dict[str, tuple[Program, list[Tensor]]] = {
    "clone": (lambda x: x.clone(), [torch.randn(3)]),
    "view of a clone": (lambda x: x.clone().view(-1), [torch.randn(2, 3)]),
    "clone twice": (lambda x: (x.sin(), x.sin().clone()), [torch.randn(3)]),
    "copies of each other": (lambda x: (y := x + 1, y.clone(), y.view(-1)), [torch.randn(2, 3)]),
    "swap": (swap_in_place, [torch.randn(3), torch.randn(3)]),
    "old value": (keep_and_count, [torch.randn(3, requires_grad=True), torch.randn(3)]),
    "power": (lambda x: x.pow(1).exp(), [torch.randn(3, requires_grad=True)]),
    "pad": (lambda x: torch.nn.functional.pad(x, [0, 0]).sin(), [torch.randn(3)]),
    "cat": (lambda x: torch.cat([x]).sin(), [torch.randn(3, requires_grad=True)]),
    "whole slice": (lambda x: x[:, 0:9].sin(), [torch.randn(2, 3, requires_grad=True)]),
    "assigned": (lambda x: (y := x * 2, y[:].fill_(3), y)[2], [torch.randn(3)]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled_it_is_eager_s(fn: Program, inputs: list[Tensor], dynamic: bool) -> None:
    check(fn, *inputs, dynamic=dynamic)


@pytest.mark.parametrize("copied", ["input", "output"])
def test_what_the_backward_reads_is_safe_from_the_caller(copied: str) -> None:
    """A clone is saved for the backward; the caller writes to what it is a clone of."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        doubled = y * 2
        old = (y if copied == "input" else doubled).clone()
        return (x * old).sum(), doubled

    def used(fn: Program, x: Tensor, y: Tensor) -> Tensor | None:
        total, doubled = fn(x, y)
        (y if copied == "input" else doubled).zero_()
        total.backward()
        return x.grad

    x, y = torch.randn(3), torch.randn(3)
    ours = used(stator.compile(fn, strict=True), x.clone().requires_grad_(), y.clone())
    theirs = used(fn, x.clone().requires_grad_(), y.clone())
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)
