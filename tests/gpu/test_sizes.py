"""Sizes: that vary, that are zero, and that 32 bits do not count."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, OPTIONS, check, compiled, needs_card, randn

LENGTH: Final = 2**31 + 2**16 + 3
MARKED: Final = {0: 3, 2**31 - 1: 5, 2**31: 7, 2**31 + 1: 11, LENGTH - 1: 13}
NEEDED: Final = 40 << 30  # bytes of the device


def near(ours: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Whether ours is at most twice as far off as eager, and an ulp."""
    size = float(exact.abs().max()) if exact.numel() else 0.0
    errors = [float((one.double() - exact).abs().max()) if size else 0.0 for one in (ours, eager)]
    return bool(errors[0] <= 2 * errors[1] + torch.finfo(ours.dtype).eps * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_program_serves_all_sizes(dtype: torch.dtype) -> None:
    graphs = 0

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x @ weight, weight.shape[1:])).sum(0)

    def counted(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        from stator.backend import compile_fx

        return compile_fx(module, inputs, options={"strict": True, **OPTIONS})

    weight = randn(24, 40, dtype=dtype)
    run = torch.compile(formula, backend=counted, dynamic=True)
    for rows in (2, 3, 17, 64, 1000, 4097, 5):
        x = randn(rows, 24, dtype=dtype)
        assert near(run(x, weight), formula(x, weight), formula(x.double(), weight.double())), rows
    assert graphs == 1


def test_sizes_that_vary_in_training() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(x @ weight, -1).square().sum(-1).mean()

    run = compiled(loss, dynamic=True)
    for rows, columns in ((3, 7), (64, 33), (129, 500), (2, 2)):
        x, weight = randn(rows, 16), randn(16, columns)
        found = []
        for fn, wide in ((run, False), (loss, False), (loss, True)):
            leaf = (weight.double() if wide else weight.clone()).requires_grad_()
            (gradient,) = torch.autograd.grad(fn(x.double() if wide else x, leaf), leaf)
            found.append(gradient)
        assert near(*found), (rows, columns)


@pytest.mark.parametrize("size", [(0,), (0, 5), (5, 0), (3, 0, 4)], ids=str)
def test_nothing_at_all(size: tuple[int, ...]) -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [x * 2 + 1, x.sum(), x.sum(-1), x.sum(0), torch.cat((x, x)), x.exp().mean(-1)]

    check(formulas, randn(*size, grad=True))


def test_products_of_nothing() -> None:
    check(lambda x, y: (x @ y).relu() + 1, randn(0, 8, grad=True), randn(8, 5, grad=True))
    check(lambda x, y: (x @ y).relu() + 1, randn(4, 0, grad=True), randn(0, 5, grad=True))


def test_sizes_that_become_zero() -> None:
    run = compiled(lambda x: (x * 2).sum(0), dynamic=True)

    for rows in (5, 3, 0, 8):
        x = randn(rows, 6)
        assert torch.allclose(run(x), (x * 2).sum(0), atol=1e-5)


def _room() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > NEEDED)


@needs_card
@pytest.mark.skipif(not _room(), reason="needs 40 GB on the device")
class TestMoreElementsThan32BitsCount:
    """Places are behind the second billion; tensors of one byte and of two."""

    @pytest.fixture(autouse=True)
    def _give_back(self) -> object:
        yield
        torch.cuda.empty_cache()

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_whole_numbers(self, dynamic: bool) -> None:
        x = torch.zeros(LENGTH, dtype=torch.int8, device=DEVICE)
        for place, value in MARKED.items():
            x[place] = value
        places = torch.tensor(list(MARKED), device=DEVICE)

        result = compiled(lambda x: x * 2 + 1, dynamic=dynamic)(x)
        assert result[places].tolist() == [2 * value + 1 for value in MARKED.values()]
        assert int(result[2**31 + 5]) == 1
        del result
        total, most, count = compiled(
            lambda x: (x.sum(), x.amax(), (x > 4).sum()), dynamic=dynamic
        )(x)
        assert (int(total), int(most), int(count)) == (39, 13, 4)
        chosen = compiled(lambda x, i: x[i] * 2, dynamic=dynamic)(x, places)
        assert chosen.tolist() == [2 * value for value in MARKED.values()]

    def test_rows_that_begin_far_behind(self) -> None:
        rows, columns = 2**19 + 3, 4099  # the last begin behind 2**31 elements
        x = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)

        result = compiled(lambda x: torch.softmax(x, -1))(x)

        for row in (0, rows // 2, rows - 1):
            exact = torch.softmax(x[row].double(), -1)
            assert near(result[row], torch.softmax(x[row], -1), exact)
        del result
        sums = compiled(lambda x: x.sum(0, dtype=torch.float32))(x)
        expected = x.sum(0, dtype=torch.float32)
        assert torch.allclose(sums, expected, rtol=1e-3, atol=0.5)

    def test_transposed_reads_and_writes_by_place(self) -> None:
        size = 46400  # its square is behind 2**31
        x = torch.zeros(size, size, dtype=torch.int8, device=DEVICE)
        x[1, size - 1], x[size - 1, 2], x[size - 1, size - 1] = 5, 7, 9

        result = compiled(lambda x: x.t() + x)(x)

        assert [int(result[size - 1, 1]), int(result[2, size - 1])] == [5, 7]
        assert int(result[size - 1, size - 1]) == 18
        del result
        places = torch.tensor([5, LENGTH - 70000, size * size - 1], device=DEVICE)
        values = torch.tensor([1, 2, 3], dtype=torch.int8, device=DEVICE)
        flat = compiled(lambda x, i, v: x.view(-1).index_put((i,), v))(x, places, values)
        assert flat[places].tolist() == [1, 2, 3]
