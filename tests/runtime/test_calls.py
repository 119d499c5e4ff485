"""Calls of a plan: which C function does one, into which memory; which are nothing but views."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx

from stator.loops.index import Index
from stator.lower.sizes import Sizes, evaluate
from stator.runtime.calls import call_of, through_c, view_of
from stator.runtime.native import shims
from stator.runtime.plan import CPU, Call, View
from stator.torch_api import torch_symbol
from tests.lower.graphs import traced

aten = torch.ops.aten


def last_call(
    fn: Callable[..., Any], *inputs: Any, symbolic: bool = False
) -> tuple[fx.Node, Sizes]:
    """The last operator of a function, and the sizes that its inputs show."""
    graph = traced(fn, *inputs, symbolic=symbolic).graph
    sizes = Sizes()
    for placeholder in graph.find_nodes(op="placeholder"):
        sizes.learn(placeholder)
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return nodes[-1], sizes


def planned(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> Call:
    node, sizes = last_call(fn, *inputs, symbolic=symbolic)
    return through_c(call_of(node), node, sizes, CPU)


def looked(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> View | None:
    node, sizes = last_call(fn, *inputs, symbolic=symbolic)
    return view_of(call_of(node), node, sizes, CPU)


def numbers(indices: tuple[Index, ...]) -> tuple[int | None, ...]:
    return tuple(index.constant for index in indices)


# --- C functions ---


def test_a_product_goes_into_memory_of_the_plan() -> None:
    call = planned(lambda x, y: x @ y, torch.randn(3, 4), torch.randn(4, 5))

    assert call.symbol == "aoti_torch_cpu_mm_out"
    assert call.out is not None
    assert (numbers(call.out.size), numbers(call.out.stride)) == ((3, 5), (5, 1))
    assert call.out.dtype is torch.float32
    assert call.out.name == call.name


def test_a_product_of_sizes_known_at_run_time_too() -> None:
    call = planned(torch.bmm, torch.randn(2, 3, 4), torch.randn(2, 4, 5), symbolic=True)

    assert call.symbol == "aoti_torch_cpu_bmm_out"
    assert call.out is not None
    assert len(call.out.size) == 3
    assert call.out.is_dense


def test_torch_makes_the_results_of_other_functions() -> None:
    call = planned(lambda x: x.sort(), torch.randn(3, 4))

    assert call.symbol == "aoti_torch_cpu_sort"
    assert call.out is None
    assert call.bytes is not None
    assert call.bytes.constant == 12 * 4 + 12 * 8


def test_bytes_follow_from_sizes() -> None:
    node, sizes = last_call(lambda x: x.sort(), torch.randn(3, 4), symbolic=True)
    call = through_c(call_of(node), node, sizes, CPU)

    assert call.bytes is not None
    assert evaluate(call.bytes, sizes.hints) == 12 * 4 + 12 * 8


def test_gaps_are_bytes_too() -> None:
    call = planned(lambda x: aten.copy(x[:, :4], x[:, 4:]), torch.randn(3, 8))

    assert call.bytes is not None
    assert call.bytes.constant == (2 * 8 + 4) * 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2, torch.uint16], ids=str)
def test_types_that_kernels_do_not_know_are_torch_s(dtype: torch.dtype) -> None:
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        value = torch.empty(4, 4, dtype=dtype)
    x = graph.placeholder("x")
    x.meta["val"] = value
    node = graph.call_function(aten.mm.default, (x, x))
    node.meta["val"] = value

    call = through_c(call_of(node), node, Sizes(), CPU)

    assert (call.symbol, call.out) == (None, None)


def test_what_is_elsewhere_is_torch_s() -> None:
    call = planned(
        lambda x, y: x @ y, torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    )

    assert (call.symbol, call.out) == (None, None)


def on_gpu(target: Any, *sources: torch.Tensor) -> Call:
    """A call of an operator on fake tensors."""
    graph = fx.Graph()
    nodes = []
    for number, source in enumerate(sources):
        nodes.append(graph.placeholder(f"x{number}"))
        nodes[-1].meta["val"] = source
    node = graph.call_function(target, tuple(nodes))
    node.meta["val"] = target(*sources)
    return through_c(call_of(node), node, Sizes(), torch.device("cuda", 0))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Matrices on several devices, and a torch that has every function for all of them."""
    monkeypatch.setattr(shims, "torch_symbol", lambda name: 1)
    with torch._subclasses.FakeTensorMode():
        places = ("cuda:0", "cuda:1", "cpu")
        return {place: torch.empty(4, 4, device=place) for place in places}


def test_a_product_on_a_gpu_goes_into_memory_of_the_plan(fakes: dict[str, Tensor]) -> None:
    call = on_gpu(aten.mm.default, fakes["cuda:0"], fakes["cuda:0"])

    assert call.symbol == "aoti_torch_cuda_mm_out"
    assert call.out is not None
    assert on_gpu(aten.topk.default, fakes["cuda:0"], 2).symbol == "aoti_torch_cuda_topk"


@pytest.mark.parametrize("place", ["cpu", "cuda:1"])
def test_what_is_not_on_the_plan_s_gpu_is_torch_s(place: str, fakes: dict[str, Tensor]) -> None:
    call = on_gpu(aten.mm.default, fakes[place], fakes[place])

    assert (call.symbol, call.out) == (None, None)


def test_what_no_torch_has_is_called_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "torch_symbol", lambda name: None)
    monkeypatch.setattr(shims, "_elsewhere", lambda kind: frozenset())
    with torch._subclasses.FakeTensorMode():
        matrix = torch.empty(4, 4, device="cuda:0")

    call = on_gpu(aten.mm.default, matrix, matrix)

    assert (call.symbol, call.out) == (None, None)


def test_a_torch_without_gpus_knows_what_one_with_them_has() -> None:
    if torch_symbol("aoti_torch_cuda_mm_out") is not None:
        pytest.skip("torch was built for GPUs")
    with torch._subclasses.FakeTensorMode():
        matrix = torch.empty(4, 4, device="cuda:0")

    call = on_gpu(aten.mm.default, matrix, matrix)

    assert call.symbol == "aoti_torch_cuda_mm_out"  # packages are built without a card, too


def test_a_view_of_what_is_on_the_plan_s_gpu(fakes: dict[str, Tensor]) -> None:
    for place, is_view in (("cuda:0", True), ("cuda:1", False), ("cpu", False)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = fakes[place]
        node = graph.call_function(aten.t.default, (x,))
        node.meta["val"] = fakes[place].t()
        view = view_of(call_of(node), node, Sizes(), torch.device("cuda", 0))
        assert (view is not None) == is_view


def test_other_operators_are_called_by_python() -> None:
    call = planned(lambda x: torch.linalg.qr(x)[0], torch.randn(4, 4))

    assert (call.symbol, call.out) == (None, None)
    assert call.bytes is not None
    assert call.bytes.constant == 2 * 64


def test_what_may_return_its_argument_makes_no_bytes() -> None:
    call = planned(lambda x: aten.dequantize.self(x), torch.randn(4, 4))

    assert call.bytes is None


def test_calls_say_themselves() -> None:
    call = planned(lambda x, y: torch.addmm(x, y, y, alpha=2), torch.randn(4, 4), torch.randn(4, 4))

    shown = str(call)
    assert shown.startswith(f"{call.name} = aten.addmm.default(")
    assert shown.endswith(f"alpha=2, out={call.name})")


# --- views ---

PLACED: Final[dict[str, tuple[Callable[[Tensor], Any], int]]] = {
    "t": (lambda x: x.t(), 0),
    "expand": (lambda x: x.expand(2, 4, 6), 0),
    "permute": (lambda x: x.permute(1, 0), 0),
    "unsqueeze": (lambda x: x.unsqueeze(1), 0),
    "detach": (lambda x: aten.detach.default(x), 0),
    "alias": (lambda x: aten.alias.default(x), 0),
    "view": (lambda x: x.view(2, 12), 0),
    "select": (lambda x: x.select(0, 2), 12),
    "select from behind": (lambda x: x.select(1, -1), 5),
    "slice": (lambda x: aten.slice.Tensor(x, 0, 1, 3), 6),
    "slice from behind": (lambda x: aten.slice.Tensor(x, 1, -2), 4),
    "slice with steps": (lambda x: aten.slice.Tensor(x, 1, 1, 100, 2), 1),
    "slice beyond the end": (lambda x: aten.slice.Tensor(x, 0, 9), 24),
    "slice before the start": (lambda x: aten.slice.Tensor(x, 0, -9, 2), 0),
    "slice of all": (lambda x: aten.slice.Tensor(x, 0), 0),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_view_is_a_look_at_its_source(name: str) -> None:
    fn, offset = PLACED[name]
    x = torch.randn(4, 6)

    view = looked(fn, x)

    eager = fn(x)
    assert view is not None
    assert view.offset.constant == offset == eager.storage_offset()
    assert numbers(view.made.size) == tuple(eager.shape)
    assert numbers(view.made.stride) == tuple(eager.stride())


@pytest.mark.parametrize("name", PLACED)
def test_the_offset_counts_from_the_source(name: str) -> None:
    fn, _ = PLACED[name]
    x = torch.randn(7, 6)[2:6]

    view = looked(fn, x)

    assert view is not None
    assert view.offset.constant == fn(x).storage_offset() - 12


NOT_PLACED: Final[dict[str, Callable[[Tensor], Any]]] = {
    "by strides": lambda x: x.as_strided((2, 2), (1, 1)),
    "the diagonal": lambda x: x.diagonal(),
    "parts": lambda x: x.split(2),
    "no view at all": lambda x: x + 1,
    "a copy": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", NOT_PLACED)
def test_what_is_more_than_a_look_is_called(name: str) -> None:
    assert looked(NOT_PLACED[name], torch.randn(4, 6)) is None


def test_views_of_types_that_kernels_do_not_know_are_called() -> None:
    assert looked(lambda x: x.t(), torch.randn(4, 6).to(torch.complex64)) is None
    assert looked(lambda x: x.t(), torch.ones(4, 6).to(torch.float8_e5m2)) is None


def test_a_start_that_may_lie_beyond_the_end_is_called() -> None:
    x = torch.randn(4, 6)

    assert looked(lambda x: aten.slice.Tensor(x, 0, 2), x, symbolic=True) is None
    assert looked(lambda x: aten.slice.Tensor(x, 0, 0, 2), x, symbolic=True) is not None


def test_places_of_sizes_known_at_run_time() -> None:
    node, sizes = last_call(lambda x: x.select(0, -1), torch.randn(4, 6), symbolic=True)
    view = view_of(call_of(node), node, sizes, CPU)

    assert view is not None
    assert evaluate(view.offset, sizes.hints) == 18


def test_a_view_reads_its_source_and_makes_itself() -> None:
    view = looked(lambda x: x.t(), torch.randn(4, 6))

    assert view is not None
    assert view.takes == (view.source,)
    assert view.makes == (view.made.name,)
    assert view.writes == ()
    assert str(view) == str(view.call)


def test_a_line_of_the_program_goes_along() -> None:
    node, _ = last_call(torch.relu, torch.randn(3))
    node.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    y = x.relu()\n'

    assert call_of(node).line == "model.py:7"
