"""Nodes in words."""

from __future__ import annotations

import operator

import torch
from torch import fx

from stator.graph.text import LONGEST, graph_text, node_text, operator_name, shape_text

aten = torch.ops.aten


def graph() -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    total = made.call_function(aten.sum.dim_IntList, (x, [1]), {"keepdim": True})
    total.meta = {"val": torch.empty(2, 1), "stack_trace": '  File "net.py", line 7, in forward'}
    made.output((total, None))
    return made


def test_every_node_is_a_line() -> None:
    assert graph_text(graph()) == (
        ("x", "x: f32[2, 3] = input", None),
        (
            "sum_dim_int_list",
            "sum_dim_int_list: f32[2, 1] = aten.sum.dim_IntList(x, [1], keepdim=True)",
            "net.py:7",
        ),
        ("output", "return [sum_dim_int_list, None]", None),
    )


def test_long_lines_are_cut() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    node = made.call_function(aten.cat.default, ([x] * 500,))

    assert len(node_text(node)) == LONGEST
    assert node_text(node).endswith(" …")


def test_what_is_called_has_no_address() -> None:
    made = fx.Graph()
    x = made.placeholder("x")

    called = [
        made.call_function(torch.nn.functional.gelu, (x,)),
        made.call_function(operator.getitem, (x, 0)),
        made.call_function(torch.add, (x, x)),
        made.call_method("view", (x, 3)),
    ]

    assert [operator_name(node) for node in called] == ["gelu", "getitem", "torch.add", "view"]


def test_types_are_short() -> None:
    assert shape_text((torch.empty(2), None)) == "(f32[2], NoneType)"
    assert shape_text(torch.empty(1, dtype=torch.complex64)) == "complex64[1]"
    assert shape_text(3) == "int"
