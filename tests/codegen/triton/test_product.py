"""Matrix products with what follows them: right at all edges, and compiled for cards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.product import TILES, product_of, product_shapes
from stator.codegen.triton.shape import Shape, shape_of
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from tests.codegen.triton.kernels import COLUMNS, softmax

DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16}
SMALL: Final = Shape("product", 32, 16, 4, stages=2, height=16)


def text(m: int, n: int, k: int, left: str = "row", right: str = "row", kind: str = "bf16") -> str:
    """relu(a @ b + bias) + x; operands lie by rows or columns."""
    a = f"{k}*i0 + i2" if left == "row" else f"i0 + {m}*i2"
    b = f"i1 + {n}*i2" if right == "row" else f"{k}*i1 + i2"
    at = f"{n}*i0 + i1"
    return f"""
kernel product
  buffer y: {kind}[{m * n}]
  buffer a: {kind}[{m * k}]
  buffer b: {kind}[{k * n}]
  buffer bias: {kind}[{n}]
  buffer x: f32[{m * n}]
  outer i0: {m}, i1: {n}
  stage i2: {k}
    acc0 sum= mul(a[{a}], b[{b}])
  stage
    y[{at}] = add(max(add(acc0, bias[i1]), 0.0:f32), x[{at}])
"""


def run(kernel: Kernel, shape: Shape, given: dict[str, torch.Tensor]) -> None:
    """In Triton's interpreter."""
    places = [given[b.name].data_ptr() for b in (*kernel.written, *kernel.read)]
    interpreted(kernel, shape)(*places, 1)


def check(m: int, n: int, k: int, shape: Shape, **how: str) -> None:
    """Against float64."""
    kernel, dtype = parse(text(m, n, k, **how)), DTYPES[how.get("kind", "bf16")]
    torch.manual_seed(0)
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    bias, x = torch.randn(n).to(dtype), torch.randn(m, n)
    # Behind the result stands something that nobody may write to.
    y = torch.full((m * n + 64,), 7.0, dtype=dtype)
    left = a if how.get("left", "row") == "row" else a.t().contiguous()
    right = b if how.get("right", "row") == "row" else b.t().contiguous()

    run(kernel, shape, {"y": y, "a": left, "b": right, "bias": bias, "x": x})

    exact = (a.double() @ b.double() + bias.double()).relu() + x.double()
    torch.testing.assert_close(y[: m * n].view(m, n).double(), exact, atol=2e-2, rtol=1e-2)
    assert y[m * n :].eq(7).all()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("right", ["row", "column"])
@pytest.mark.parametrize("left", ["row", "column"])
def test_operands_lie_either_way(left: str, right: str, kind: str) -> None:
    check(32, 64, 48, SMALL, left=left, right=right, kind=kind)


@pytest.mark.parametrize("size", [(17, 33, 16), (16, 32, 17), (1 + 16 * 9, 31, 5), (50, 70, 90)])
def test_edges(size: tuple[int, int, int]) -> None:
    m, n, k = size
    check(m, n, k, SMALL)
    check(m, n, k, SMALL, left="column", right="column")


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_rows(special: float) -> None:
    m, n, k = 20, 40, 19
    kernel = parse(text(m, n, k))
    a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(k, n, dtype=torch.bfloat16)
    a[3, 18] = special
    y = torch.zeros(m, n, dtype=torch.bfloat16)
    bias, x = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(m, n)

    run(kernel, SMALL, {"y": y, "a": a, "b": b, "bias": bias, "x": x})

    expected = (a.float() @ b.float()).relu()
    torch.testing.assert_close(y.float(), expected, equal_nan=True)


@pytest.mark.parametrize("shape", product_shapes(parse(text(512, 512, 64))))
def test_every_shape_computes_the_same(shape: Shape) -> None:
    check(150, 300, 100, shape)


def test_tiles_are_all_taken_once() -> None:
    """More of them below each other than run together, and a last row of fewer."""
    shape = Shape("product", 16, 16, 4, height=16)

    check(16 * 19, 16 * 3, 16, shape)


def test_what_is_no_product_of_halves_is_none() -> None:
    assert product_of(parse(text(16, 16, 16))) is not None
    assert product_of(parse(text(16, 16, 16, kind="f32"))) is None
    assert product_of(parse(COLUMNS)) is None
    assert product_of(parse(softmax(4, 8))) is None
    assert shape_of(parse(text(16, 16, 16))).kind != "product"  # the model leaves it to libraries


def test_tiles_are_no_larger_than_the_matrices() -> None:
    large, small = (product_shapes(parse(text(n, n, 64))) for n in (512, 40))

    assert len(large) == len(TILES)
    assert [(s.height, s.outer) for s in small] == [(64, 64)]


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_cards(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    odd, even = (parse(text(*size)) for size in ((500, 700, 90), (512, 1024, 256)))
    turned = parse(text(512, 1024, 256, right="column"))
    shapes = product_shapes(even) if capability == 90 else product_shapes(even)[3:5]
    written = [write_kernel(k, shapes[0]) for k in (odd, even)]
    written += [write_kernel(turned, shape) for shape in shapes]

    for cubin in compile_all(written, capability):
        assert cubin.code.startswith(b"\x7fELF")
        assert cubin.shared <= (227 if capability == 90 else 163) << 10


def test_sums_are_of_float32() -> None:
    """A sum of halves would be off by far more."""
    kernel = parse(text(16, 32, 4096))
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.uniform(0.5, 1, (16, 4096))).to(torch.bfloat16)
    b = torch.from_numpy(rng.uniform(0.5, 1, (4096, 32))).to(torch.bfloat16)
    y, bias = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)

    run(kernel, SMALL, {"y": y, "a": a, "b": b, "bias": bias, "x": torch.zeros(16, 32)})

    exact = a.double() @ b.double()
    assert ((y.double() - exact).abs() / exact).max() < 2**-8
