"""Which line of the user's program a node came from, and what nodes without one are given."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from stator.graph.capture import take_callers_line
from stator.graph.edit import spread_lines
from stator.graph.verify import user_line

TORCH = Path(torch.__file__).parent


def trace_of(*frames: str) -> str:
    """A stack trace, the innermost frame last."""
    return "".join(f'  File "{file}", line {n}, in f\n' for n, file in enumerate(frames, 1))


def chain(*traces: str | None) -> tuple[fx.Graph, list[fx.Node]]:
    """Operators that read one another, each with a trace or none."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for trace in traces:
        nodes.append(graph.call_function(torch.ops.aten.neg.default, (nodes[-1],)))
        if trace is not None:
            nodes[-1].meta["stack_trace"] = trace
    graph.output((nodes[-1],))
    return graph, nodes[1:]


def test_the_innermost_frame_outside_of_torch_counts() -> None:
    _, (node,) = chain(trace_of("train.py", "net.py", f"{TORCH}/nn/modules/linear.py"))

    assert user_line(node) == "net.py:2"


def test_a_frame_of_torch_is_better_than_none() -> None:
    _, (node,) = chain(trace_of(f"{TORCH}/_dynamo/external_utils.py", f"{TORCH}/optim/adam.py"))

    assert user_line(node) == f"{TORCH}/optim/adam.py:2"


def test_generated_code_is_nobodys_line() -> None:
    _, (node,) = chain(trace_of(f"{TORCH}/_dynamo/external_utils.py", "<eval_with_key>.3"))

    assert user_line(node) is None


def test_nodes_without_a_line_take_that_of_what_they_read() -> None:
    graph, nodes = chain(trace_of("net.py"), None, None)

    spread_lines(graph)

    assert [user_line(node) for node in nodes] == ["net.py:1"] * 3


def test_those_that_read_none_with_a_line_take_that_of_their_reader() -> None:
    graph, nodes = chain(None, None, trace_of("net.py"))

    spread_lines(graph)

    assert [user_line(node) for node in nodes] == ["net.py:1"] * 3


def test_a_graph_without_lines_stays_so() -> None:
    graph, nodes = chain(None, None)

    spread_lines(graph)

    assert [user_line(node) for node in nodes] == [None, None]


def test_captured_nodes_without_a_line_take_their_callers() -> None:
    graph, nodes = chain(None, trace_of("net.py"))

    take_callers_line(graph)

    line = test_captured_nodes_without_a_line_take_their_callers.__code__.co_firstlineno + 3
    assert [user_line(node) for node in nodes] == [f"{__file__}:{line}", "net.py:1"]
