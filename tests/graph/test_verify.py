"""What a graph may not be, and the user's line of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from stator.errors import VerifyError
from stator.graph.verify import is_input_update, note_line, user_line, verify, why_not_functional
from tests.aot import custom_operators as custom_operators  # registers them

aten = torch.ops.aten

TRACE = """  File "train.py", line 40, in step
    loss = model(x)
  File "my models/net.py", line 7, in forward
    return x.add_(1)
"""


def graph_of(*calls: tuple[Any, ...]) -> fx.Graph:
    """Inputs x and y, then calls: a target and names of earlier values or constants."""
    graph = fx.Graph()
    values: dict[Any, fx.Node] = {name: graph.placeholder(name) for name in "xy"}
    for number, (target, *args) in enumerate(calls):
        given = tuple(values[arg] if isinstance(arg, str) else arg for arg in args)
        values[f"v{number}"] = graph.call_function(target, given)
    graph.output((values[f"v{len(calls) - 1}"],))
    return graph


def node_calling(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    found: fx.Node = node
    return found


# Malformed graphs


def reads_ahead() -> fx.Graph:
    graph = graph_of((aten.sin.default, "x"), (aten.cos.default, "v0"))
    sin, cos = (node_calling(graph, aten.sin.default), node_calling(graph, aten.cos.default))
    cos.append(sin)
    return graph


def reads_another_graph() -> fx.Graph:
    graph, other = (graph_of((aten.sin.default, "x")) for _ in range(2))
    node_calling(graph, aten.sin.default).args = (next(iter(other.nodes)),)
    return graph


def names_two_nodes_alike() -> fx.Graph:
    graph = graph_of((aten.sin.default, "x"), (aten.cos.default, "v0"))
    sin, cos = (node_calling(graph, aten.sin.default), node_calling(graph, aten.cos.default))
    cos.name = sin.name
    return graph


def reads_an_attribute_that_the_module_lacks() -> fx.Graph:
    module = fx.GraphModule(torch.nn.Module(), graph_of((aten.sin.default, "x")))
    with module.graph.inserting_before():
        module.graph.create_node("get_attr", "weight")
    return module.graph


def test_a_sound_graph_is_let_through() -> None:
    verify(graph_of((aten.mul.Tensor, "x", "y"), (aten.sum.default, "v0")), after="a_pass")


@pytest.mark.parametrize(
    "make",
    [
        reads_ahead,
        reads_another_graph,
        names_two_nodes_alike,
        reads_an_attribute_that_the_module_lacks,
    ],
)
def test_a_malformed_graph_is_refused_naming_the_pass(make: Callable[[], fx.Graph]) -> None:
    with pytest.raises(VerifyError, match="malformed") as caught:
        verify(make(), after="forward/a_pass")

    assert caught.value.stage == "forward/a_pass"


# Mutation


@pytest.mark.parametrize(
    "call",
    [
        (aten.add_.Tensor, "v0", "y"),
        (aten.relu_.default, "v0"),
        (aten.fill_.Scalar, "x", 0),
        (aten.zero_.default, "v0"),
        (aten.t_.default, "v0"),
        (aten.copy_.default, "v0", "y"),
    ],
    ids=lambda call: str(call[0]),
)
def test_an_aten_operator_that_writes_is_refused(call: tuple[Any, ...]) -> None:
    graph = graph_of((aten.sin.default, "x"), call)
    node = node_calling(graph, call[0])
    node.meta["stack_trace"] = TRACE

    with pytest.raises(VerifyError, match="mutates its argument") as caught:
        verify(graph, after="forward/a_pass")

    assert str(call[0]) in caught.value.what
    assert node.name in caught.value.what
    assert caught.value.where == "my models/net.py:7"


def test_an_operator_that_writes_to_its_out_argument_is_refused() -> None:
    graph = graph_of((aten.sin.default, "x"))
    sin = node_calling(graph, aten.sin.default)
    sin.target, sin.kwargs = aten.sin.out, {"out": graph.find_nodes(op="placeholder")[1]}

    with pytest.raises(VerifyError, match=r"aten\.sin\.out mutates"):
        verify(graph, after="a_pass")


def test_the_new_value_of_an_input_may_be_written_into_it() -> None:
    graph = graph_of((aten.sin.default, "x"), (aten.copy_.default, "x", "v0"))

    verify(graph, after="a_pass")
    assert is_input_update(node_calling(graph, aten.copy_.default))


def test_only_a_copy_is_an_input_update() -> None:
    graph = graph_of((aten.add_.Tensor, "x", "y"), (aten.copy_.default, "v0", "y"))

    assert not is_input_update(node_calling(graph, aten.add_.Tensor))
    assert not is_input_update(node_calling(graph, aten.copy_.default))


def test_a_custom_operator_may_write_what_it_declares() -> None:
    accumulate = torch.ops.stator_test.accumulate.default

    verify(graph_of((accumulate, "x", "y"), (aten.sin.default, "x")), after="a_pass")


@pytest.mark.parametrize(
    "target", [torch.add, max, aten.add.Tensor], ids=["torch", "builtin", "aten"]
)
def test_what_writes_to_nothing_is_functional(target: Any) -> None:
    graph = graph_of((target, "x", "y"))

    assert why_not_functional(node_calling(graph, target)) is None


# The user's line


def line_of(trace: str | None) -> str | None:
    graph = graph_of((aten.sin.default, "x"))
    node = node_calling(graph, aten.sin.default)
    if trace is not None:
        node.meta["stack_trace"] = trace
    return user_line(node)


def test_the_user_s_line_is_the_innermost_frame() -> None:
    assert line_of(TRACE) == "my models/net.py:7"


@pytest.mark.parametrize("trace", [None, "", "no frames here\n"], ids=repr)
def test_without_frames_there_is_no_line(trace: str | None) -> None:
    assert line_of(trace) is None


def test_a_frame_without_a_line_gives_the_file() -> None:
    assert line_of('File "net.py"\n') == "net.py"


def test_a_line_that_torch_recorded_is_read() -> None:
    captured: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        captured.append(module)
        return module.forward

    first = sine.__code__.co_firstlineno
    torch.compile(sine, backend=keep)(torch.ones(2))
    (node,) = (n for n in captured[0].graph.nodes if n.op.startswith("call"))

    assert user_line(node) == f"{__file__}:{first + 1}"


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_an_error_remembers_the_innermost_line_only() -> None:
    graph = graph_of((aten.sin.default, "x"), (aten.cos.default, "v0"))
    inner, outer = node_calling(graph, aten.sin.default), node_calling(graph, aten.cos.default)
    inner.meta["stack_trace"] = TRACE
    outer.meta["stack_trace"] = 'File "outer.py", line 1, in f'
    error: Any = RuntimeError("no")

    note_line(error, inner)
    note_line(error, outer)

    assert error.user_line == "my models/net.py:7"


def test_a_node_without_a_line_leaves_room_for_the_next() -> None:
    graph = graph_of((aten.sin.default, "x"), (aten.cos.default, "v0"))
    inner, outer = node_calling(graph, aten.sin.default), node_calling(graph, aten.cos.default)
    outer.meta["stack_trace"] = TRACE
    error: Any = RuntimeError("no")

    note_line(error, inner)
    note_line(error, outer)

    assert error.user_line == "my models/net.py:7"
