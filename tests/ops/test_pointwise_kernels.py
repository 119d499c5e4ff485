"""Every pointwise operator as machine code against eager, in every type that eager takes.

The same calls and the same judgement as for formulas; here lowering, code generation and the
executor take part.  Each type sees some of an operator's numbers, all types together see all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from stator.core.events import start_compilation
from stator.ops.table import POINTWISE
from stator.options import Options
from stator.pipeline import make_tools
from tests.ops.evaluate import lowered
from tests.ops.pointwise_cases import (
    DTYPES,
    REFUSALS,
    Case,
    cases_of,
    require_as_good,
    values_of,
)

aten = torch.ops.aten

NUMBERS_OF_A_TYPE: Final = 5
# Operators of corresponding elements that are rules: they ask for the type, or have two results.
RULES_OF_ELEMENTS: Final = (
    aten.nan_to_num.default,
    aten.log_sigmoid_forward.default,
    aten._prelu_kernel_backward.default,
)
# Their tensors are not broadcast, or torch 2.11 does not know to what.
OF_ONE_SIZE: Final = (aten._prelu_kernel_backward.default, aten.log_sigmoid_backward.default)
BEYOND_INTEGERS: Final = (
    127.9, -128.9, 255.5, 300.7, 65543.0, 2.0**31 + 5, 2.0**32 + 7, -(2.0**31) - 3, 1e10 + 7,
    2.0**40 + 77, 2.0**62, 2.0**63, 1e19, -1e19, math.nan, math.inf, -math.inf,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Calls of one operator in one graph: what the kernels gave, and who stayed with torch."""

    results: list[tuple[Tensor, ...]]  # of each call
    externs: int


def calls_of(target: Any) -> Iterator[list[Case]]:
    """Cases by the types of their tensors, with some of the numbers each."""
    by_types = itertools.groupby(cases_of(target), lambda case: tuple(map(_type, case.args)))
    for turn, (_, group) in enumerate(by_types):
        cases = [expanded(case) if target in OF_ONE_SIZE else case for case in group]
        step = max(len(cases) // NUMBERS_OF_A_TYPE, 1)
        yield cases[turn % step :: step]


def expanded(case: Case) -> Case:
    """The same call on tensors of one size."""
    size = torch.broadcast_shapes(*(arg.shape for arg in case.args))
    return case.on(lambda tensor: tensor.expand(size))


def _type(arg: Any) -> Any:
    return (arg.dtype, arg.ndim) if isinstance(arg, Tensor) else None


def is_taken(case: Case) -> bool:
    """Whether both the formula and eager take the call.

    The formula is asked first: what it refuses, integers divided, could end the process in eager.
    """
    try:
        like = case.on(lambda tensor: tensor.to("meta")).run()
        if case.target in POINTWISE:
            lowered(POINTWISE[case.target], case.args, case.kwargs, like)
        eager = case.run()
    except (*REFUSALS, NotImplementedError):
        return False
    # Of some mixtures torch itself is not sure which type the result has.
    return not case.is_mixed or _dtypes(eager) == _dtypes(like)


def _dtypes(results: Any) -> list[torch.dtype]:
    return [result.dtype for result in _several(results)]


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def run(cases: list[Case]) -> Run:
    """All calls as one graph, through kernels."""
    tensors: dict[int, Tensor] = {}
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[int, fx.Node] = {}

    def node_of(tensor: Tensor) -> fx.Node:
        if id(tensor) not in nodes:
            node = graph.placeholder(f"x{len(nodes)}")
            node.meta["val"] = mode.from_tensor(tensor)
            nodes[id(tensor)], tensors[id(tensor)] = node, tensor
        return nodes[id(tensor)]

    given = [case.on(node_of) for case in cases]  # placeholders stand before the calls
    calls = []
    for case in given:
        call = graph.call_function(case.target, case.args, case.kwargs)
        with mode:
            fakes = [a.meta["val"] if isinstance(a, fx.Node) else a for a in case.args]
            call.meta["val"] = case.target(*fakes, **case.kwargs)
        calls.append(call)
    parts = [_parts(call) for call in calls]
    graph.output(tuple(part for call in parts for part in call))
    record = start_compilation()
    tools = make_tools(Options(strict=True, kernels=True), record)
    compiled = tools.compile_graph(fx.GraphModule({}, graph), "calls")
    results = iter(compiled.run([*tensors.values()]))
    return Run(
        [tuple(itertools.islice(results, len(call))) for call in parts],
        sum("stays with torch" in note for note in record.notes),
    )


def _parts(call: fx.Node) -> list[fx.Node]:
    """The nodes that hold the tensors of a call: itself, or one for each of its results."""
    value = call.meta["val"]
    if isinstance(value, Tensor):
        return [call]
    parts = [call.graph.call_function(operator.getitem, (call, n)) for n in range(len(value))]
    for part, tensor in zip(parts, value, strict=True):
        part.meta["val"] = tensor
    return parts


@pytest.mark.parametrize("target", [*POINTWISE, *RULES_OF_ELEMENTS], ids=str)
def test_kernel_is_as_good_as_eager(target: Any) -> None:
    # One graph for all types: each has kernels of its own, only what calls them is shared.
    taken = [case for cases in calls_of(target) for case in cases if is_taken(case)]
    assert taken, "no call became a kernel"

    found = run(taken)

    assert not found.externs, f"{found.externs} of {len(taken)} calls stay with torch"
    for case, results in zip(taken, found.results, strict=True):
        require_all_as_good(case, results)


def require_all_as_good(case: Case, results: tuple[Tensor, ...]) -> None:
    """Fail where one of the results is worse than eager's."""
    for number, (ours, eager) in enumerate(zip(results, _several(case.run()), strict=True)):
        assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape), str(case)
        require_as_good(dataclasses.replace(case, output=number), ours, eager)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversion_is_that_of_eager(source: torch.dtype) -> None:
    """Beyond the target too, where C++ leaves it open: the same instructions wrap the same way."""
    x = torch.cat([values_of(source, 512), torch.tensor(BEYOND_INTEGERS).to(source)])
    cases = [Case(torch.ops.aten._to_copy.default, (x,), {"dtype": target}) for target in DTYPES]
    found = run(cases)

    assert not found.externs
    for case, (ours,) in zip(cases, found.results, strict=True):
        torch.testing.assert_close(ours, case.run(), rtol=0, atol=0, equal_nan=True, msg=str(case))
