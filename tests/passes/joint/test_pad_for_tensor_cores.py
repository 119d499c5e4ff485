"""Products on a GPU with odd sizes: padded where the model says so, along which memory runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint import pad_for_tensor_cores as module_under_test
from stator.passes.joint.pad_for_tensor_cores import Product, why_not_padded
from stator.passes.joint.pad_mm import PRODUCTS, pad_mm
from stator.torch_api import FakeTensorMode, ShapeEnv, guard_count
from tests.passes import on_cuda
from tests.rules.tracing import targets, traced

BF16: Final = torch.bfloat16


def product(rows: int, depth: int, columns: int, *lies: bool, dtype: Any = BF16) -> Product:
    return Product(1, rows, depth, columns, dtype, *lies)


@pytest.mark.parametrize(
    ("given", "extra"),
    [
        (product(8191, 4096, 4096), (0, 0, 0)),  # rows of a left operand may be odd
        (product(8191, 4095, 4095), (0, 1, 1)),
        (product(8191, 4095, 4096, True, False), (0, 1, 0)),
        (product(8191, 4095, 4096, False, True), (1, 0, 0)),  # memory runs along rows and columns
        (product(8191, 4095, 4096, False, False), (1, 1, 0)),
        (product(50257, 8192, 768, False, True), (7, 0, 0)),
        (product(8192, 768, 50257, True, False), (0, 0, 7)),
        (product(64, 65, 66, dtype=torch.float32), (0, 3, 2)),
    ],
)
def test_sizes_are_padded_along_which_memory_runs(given: Product, extra: tuple[int, ...]) -> None:
    assert given.extra == extra


@pytest.mark.parametrize(
    ("given", "pays"),
    [
        (product(8191, 4095, 4095), True),
        (product(8192, 768, 50257, True, False), True),  # GPT-2's logits
        (product(50257, 8192, 768, False, True), True),  # and the gradient of its embeddings
        (product(8191, 4095, 4095, dtype=torch.float32), True),
        (product(1024, 1023, 1023), False),  # over before copies are started
        (product(1 << 20, 63, 63), False),  # memory is what it waits for
    ],
)
def test_the_model(given: Product, pays: bool) -> None:
    assert (why_not_padded(given, cuts_for_nothing=True) is None) == pays


def test_what_others_read_costs_a_copy() -> None:
    shallow = product(16384, 128, 16383)

    assert shallow.cost(True) < shallow.cost(False)
    assert why_not_padded(shallow, True) is None
    assert "copies" in str(why_not_padded(shallow, False))


# --- the rewrite ---

Program = Callable[..., Any]


def tall(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w)


SHAPES: Final[dict[str, tuple[Program, list[tuple[int, ...]]]]] = {
    "by rows": (tall, [(9, 13), (13, 11)]),
    "a weight by columns": (lambda x, w: torch.mm(x, w.t()), [(9, 13), (11, 13)]),
    "a gradient": (lambda x, g: torch.mm(x.t(), g), [(13, 9), (13, 11)]),
    "both by columns": (lambda x, w: torch.mm(x.t(), w.t()), [(13, 9), (11, 13)]),
    "rows alone": (lambda x, g: torch.mm(x.t(), g), [(13, 9), (13, 16)]),
    "a bias": (lambda b, x, w: torch.addmm(b, x, w), [(11,), (9, 13), (13, 11)]),
    "a bias for rows": (lambda b, x, w: torch.addmm(b, x.t(), w), [(9, 1), (13, 9), (13, 11)]),
    "a bias of its size": (
        lambda b, x, w: torch.addmm(b, x.t(), w, alpha=2, beta=3),
        [(9, 11), (13, 9), (13, 11)],
    ),
    "several": (torch.bmm, [(3, 9, 13), (3, 13, 11)]),
    "several, by columns": (
        lambda x, w: torch.bmm(x.transpose(1, 2), w.transpose(1, 2)),
        [(3, 13, 9), (3, 11, 13)],
    ),
}


def products(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in PRODUCTS]


@pytest.mark.parametrize("name", SHAPES)
def test_a_padded_product_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "why_not_padded", lambda product, free: None)
    program, sizes = SHAPES[name]
    inputs = [torch.randn(size).to(BF16) for size in sizes]
    module = traced(program, *inputs)
    (node,) = products(module)
    expected = node.meta["val"].size(), node.meta["val"].stride()

    done = module_under_test.pad_for_tensor_cores(node, Ctx(), cuts_for_nothing=True)
    assert done == 1
    verify(module.graph, after="pad_mm")
    module.recompile()
    (padded,) = products(module)
    again = Product.of(padded)
    assert isinstance(again, Product)
    assert again.extra == (0, 0, 0)
    found = module(*inputs)
    assert (found.size(), found.stride()) == expected
    torch.testing.assert_close(found, program(*inputs), rtol=2e-2, atol=2e-1)


def test_on_a_gpu_the_pass_goes_by_this_model() -> None:
    module = on_cuda.graph_of(tall, *on_cuda.fakes((8191, 4095), (4095, 4095), dtype=BF16))
    ctx = Ctx()

    assert pad_mm(module.graph, ctx) == 1
    verify(module.graph, after="pad_mm")
    assert targets(module) == [
        "aten.constant_pad_nd.default",
        "aten.constant_pad_nd.default",
        "aten.mm.default",
        "aten.slice.Tensor",
        "aten.clone.default",
    ]
    assert ctx.record.notes == ["mm is padded by 0 rows, 1 in depth and 1 columns"]


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        (((512, 511), (511, 511)), BF16, "copies"),
        (((8191, 4095), (4095, 4095)), torch.float32, "without tensor cores"),
        (((8191, 4095), (4095, 4095)), torch.float64, "not for tensor cores"),
    ],
)
def test_what_is_left_has_a_reason(sizes: Any, dtype: torch.dtype, reason: str) -> None:
    module = on_cuda.graph_of(tall, *on_cuda.fakes(*sizes, dtype=dtype))
    ctx = Ctx()

    assert pad_mm(module.graph, ctx) == 0
    assert reason in ctx.record.notes[0]


def varying(
    program: Program, *sizes: tuple[int, ...], device: torch.device = on_cuda.CUDA
) -> fx.GraphModule:
    """Of a GPU's tensors, the sizes of 8192 being one that varies."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(8192), static_shapes=False).size(0)
    with mode:
        about: dict[str, Any] = {"dtype": BF16, "device": device}
        inputs = [torch.empty([rows if n == 8192 else n for n in s], **about) for s in sizes]
        module = on_cuda.graph_of(program, *inputs)
    before = guard_count(mode)
    module.meta["guards"] = lambda: guard_count(mode) - before
    return module


@pytest.mark.parametrize(
    ("program", "sizes", "padded"),
    [
        (SHAPES["a weight by columns"][0], ((8192, 768), (50257, 768)), "0 in depth and 7 columns"),
        (SHAPES["a gradient"][0], ((8192, 50257), (8192, 768)), "7 rows, 0 in depth"),
        (torch.bmm, ((8192, 511, 767), (8192, 767, 512)), "1 in depth and 0 columns"),
        (SHAPES["a bias"][0], ((50257,), (8192, 768), (768, 50257)), "0 in depth and 7 columns"),
        (tall, ((768, 8192), (8192, 50257)), None),
    ],
)
def test_where_sizes_vary_those_are_padded_that_do_not(
    program: Program, sizes: tuple[tuple[int, ...], ...], padded: str | None
) -> None:
    module, ctx = varying(program, *sizes), Ctx()

    assert pad_mm(module.graph, ctx) == (padded is not None)
    verify(module.graph, after="pad_mm")
    assert (padded or "a size varies along which memory runs") in ctx.record.notes[0]
    assert module.meta["guards"]() == 0


def test_a_padded_product_takes_other_sizes() -> None:
    program = SHAPES["a weight by columns"][0]
    module = varying(program, (8192, 768), (1001, 768), device=torch.device("cpu"))
    (node,) = products(module)
    assert module_under_test.pad_for_tensor_cores(node, Ctx(), cuts_for_nothing=True) == 1
    module.recompile()
    x, w = torch.randn(5, 768).to(BF16), torch.randn(1001, 768).to(BF16)

    assert module(x, w).stride() == (1001, 1)
    torch.testing.assert_close(module(x, w), program(x, w), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(("rows", "dtype"), [(8191, BF16), (8192, torch.float32)])
def test_aligned_products_are_not_spoken_of(rows: int, dtype: torch.dtype) -> None:
    module = on_cuda.graph_of(tall, *on_cuda.fakes((rows, 4096), (4096, 4096), dtype=dtype))
    ctx = Ctx()

    assert pad_mm(module.graph, ctx) == 0
    assert ctx.record.notes == []


def test_float32_is_padded_where_tensor_cores_multiply_it() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        module = on_cuda.graph_of(tall, *on_cuda.fakes((8191, 4095), (4095, 4095)))
        assert pad_mm(module.graph, Ctx()) == 1
    finally:
        torch.set_float32_matmul_precision(before)


def test_without_fuel_nothing_changes() -> None:
    module = on_cuda.graph_of(tall, *on_cuda.fakes((8191, 4095), (4095, 4095), dtype=BF16))

    assert pad_mm(module.graph, Ctx(fuel=Fuel(0))) == 0
