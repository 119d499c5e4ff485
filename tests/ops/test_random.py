"""Random numbers of kernels: those of the reference, spread as they should be, and independent."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from stator import pipeline
from stator.errors import StatorWarning
from stator.ops import draws
from stator.torch_api import FakeTensorMode
from tests.ops.fused import FLOATS, torch_calls
from tests.parity import compiled

Program = Callable[[Tensor], Any]

MANY: Final = 1 << 18
UNLIKELY: Final = 1e-4  # a right generator fails a test that often, and with a fixed seed never

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def ours(
    program: Callable[..., Any], *, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """`program` compiled, its random numbers in kernels."""
    return compiled(
        program, dynamic=dynamic, options={"kernels": True, "fallback_random": False, **options}
    )


def drawn(program: Program, x: Tensor, seed: int = 0) -> Any:
    """What one call of the compiled program gives after `torch.manual_seed`."""
    call = ours(program)
    torch.manual_seed(seed)
    return call(x)


def seed_after(seed: int) -> Tensor:
    """The seed that a graph draws first."""
    torch.manual_seed(seed)
    return draws.draw_seed()


def many(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(MANY, dtype=dtype)


# --- the same numbers as the reference ---

EXACT: dict[str, tuple[Program, Callable[[Tensor, Tensor], Tensor]]] = {
    "rand": (
        lambda x: torch.rand(x.shape, dtype=x.dtype),
        lambda seed, x: draws.uniform(seed, 0, (0.0, 1.0), x.shape, x.dtype),
    ),
    "rand_like": (
        torch.rand_like,
        lambda seed, x: draws.uniform(seed, 0, (0.0, 1.0), x.shape, x.dtype),
    ),
    "uniform": (
        lambda x: torch.empty_like(x).uniform_(-2, 3),
        lambda seed, x: draws.uniform(seed, 0, (-2.0, 3.0), x.shape, x.dtype),
    ),
    "bernoulli of a number": (
        lambda x: torch.bernoulli(x, 0.3),
        lambda seed, x: draws.coins(seed, 0, 0.3, x.shape, x.dtype),
    ),
    "bernoulli of a tensor": (
        lambda x: torch.bernoulli(x.abs().clamp(max=1)),
        lambda seed, x: draws.coins(seed, 0, x.abs().clamp(max=1), x.shape, x.dtype),
    ),
    "in place, of a tensor": (
        lambda x: torch.empty(x.shape, dtype=torch.int16).bernoulli_(x.abs().clamp(max=1)),
        lambda seed, x: draws.coins(seed, 0, x.abs().clamp(max=1), x.shape, torch.int16),
    ),
    "second of two": (
        lambda x: (torch.randn_like(x), torch.rand_like(x))[1],
        lambda seed, x: draws.uniform(seed, 1, (0.0, 1.0), x.shape, x.dtype),
    ),
}
TYPED: Final = ("rand_like", "uniform", "bernoulli of a tensor")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in EXACT),
        *((name, dtype) for name in TYPED for dtype in FLOATS[1:]),
    ],
)
def test_kernels_draw_the_numbers_of_the_reference(name: str, dtype: torch.dtype) -> None:
    program, reference = EXACT[name]
    x = torch.randn(37, 5).to(dtype)
    found = drawn(program, x, seed=3)

    assert torch.equal(found, reference(seed_after(3), x))
    assert set(torch_calls()) == {"draw_seed"}


NORMAL: dict[str, tuple[Program, Callable[[Tensor, Tensor], Tensor]]] = {
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), lambda z, x: z),
    "randn_like": (torch.randn_like, lambda z, x: z),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), lambda z, x: z * 2 + 1),
    "of numbers": (
        lambda x: torch.normal(1.0, 2.0, x.shape, dtype=x.dtype),
        lambda z, x: z * 2 + 1,
    ),
    "of a mean": (lambda x: torch.normal(x, 2.0), lambda z, x: z * 2 + x),
    "of a deviation": (lambda x: torch.normal(1.0, x.abs()), lambda z, x: z * x.abs() + 1),
    "of both": (lambda x: torch.normal(x, x.abs()), lambda z, x: z * x.abs() + x),
    "broadcast": (lambda x: torch.normal(x, x[:1].abs()), lambda z, x: z * x[:1].abs() + x),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NORMAL), *(("randn_like", d) for d in FLOATS[1:])],
)
def test_normal_numbers_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    program, reference = NORMAL[name]
    x = torch.randn(37, 5).to(dtype)
    found = drawn(program, x, seed=3)

    standard = draws.normal(seed_after(3), 0, x.shape, dtype).double()
    error = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(
        found.double(), reference(standard, x.double()), rtol=error, atol=error
    )
    assert set(torch_calls()) == {"draw_seed"}


BOUNDS: Final = ((-3, 40), (0, 1), (0, 1 << 31), (5, (1 << 32) + 9), (-(1 << 63), (1 << 63) - 1))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_integers_are_those_of_the_reference(bounds: tuple[int, int]) -> None:
    found = drawn(lambda x: torch.randint(*bounds, (999,)) + x, torch.zeros((), dtype=torch.int64))

    expected = draws.integers(seed_after(0), 0, bounds, (999,), torch.int64)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64],
    ids=str,
)
def test_integers_come_in_every_type(dtype: torch.dtype) -> None:
    high = 2 if dtype is torch.bool else 100
    found = drawn(lambda x: (torch.randint(high, (99,), dtype=dtype), x + 1), torch.zeros(3))[0]
    like = drawn(lambda x: torch.randint_like(x, 0, high), torch.zeros(99, dtype=dtype))

    expected = draws.integers(seed_after(0), 0, (0, high), (99,), dtype)
    assert torch.equal(found, expected)
    assert torch.equal(like, expected)


def test_the_upper_bits_of_a_product_are_exact() -> None:
    seed = seed_after(1)
    first, second = draws._words(seed, 0, (500,))
    for low, high in BOUNDS:
        words = zip(first.tolist(), second.tolist(), strict=True)
        whole = [(b << 32 | a) * (high - low) >> 64 for a, b in words]
        found = draws.integers(seed, 0, (low, high), (500,), torch.int64)

        assert found.tolist() == [low + number for number in whole]


# --- devices ---


def test_numbers_are_made_where_the_seed_lies_and_nobody_waits_for_it() -> None:
    with FakeTensorMode():  # of which no number can be asked
        seed = draws.draw_seed(torch.device("cuda", 0))
        made = [
            draws.uniform(seed, 0, (0.0, 2.0), (3, 4), torch.bfloat16),
            draws.normal(seed, 0, (3, 4), torch.float64),
            draws.coins(seed, 0, 0.5, (3, 4), torch.bool),
            draws.integers(seed, 0, (3, 1 << 40), (3, 4), torch.int64),
        ]

    assert {value.device for value in (seed, *made)} == {torch.device("cuda", 0)}


def test_the_seed_of_the_cpu_is_drawn_there_whatever_the_default() -> None:
    expected = seed_after(5)
    torch.manual_seed(5)
    with torch.device("meta"):
        found = draws.draw_seed()

    assert torch.equal(found, expected)


def test_the_device_says_which_generator_draws() -> None:
    assert not draws.takes_philox("cpu")
    assert draws.takes_philox("cuda")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tensors of the CPU draw as those of a GPU, by its kernels; options for that."""
    pytest.importorskip("triton")
    monkeypatch.setattr(draws, "takes_philox", lambda device: True)
    return {"codegen": "triton", "cache": False}


BY_PHILOX: Final = ("rand", "uniform", "bernoulli of a number", "bernoulli of a tensor")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BY_PHILOX)
@pytest.mark.parametrize("size", [(37, 5), (6, 64)])
def test_kernels_of_a_gpu_draw_the_numbers_of_the_reference(
    name: str, size: tuple[int, ...], dtype: torch.dtype, as_on_a_gpu: dict[str, Any]
) -> None:
    program, reference = EXACT[name]
    x = torch.randn(size).to(dtype)
    call = ours(program, **as_on_a_gpu)
    torch.manual_seed(3)

    found = call(x)

    assert torch.equal(found, reference(seed_after(3), x))
    assert set(torch_calls()) == {"draw_seed"}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_numbers_of_a_gpu_are_uniform() -> None:
    there = draws.uniform(seed_after(0), 0, (0.0, 1.0), (MANY,), torch.float32)

    assert abs(there.double().mean() - 0.5) < 5 / math.sqrt(12 * MANY)
    assert stats.kstest(there.numpy(), "uniform").pvalue > UNLIKELY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(30, 64), (3, 257), (5, 36)])
def test_a_backward_of_a_gpu_draws_the_mask_again(
    size: tuple[int, ...], dtype: torch.dtype, as_on_a_gpu: dict[str, Any]
) -> None:
    x = torch.ones(size, dtype=dtype, requires_grad=True)
    bias = torch.zeros(size, dtype=dtype).t().contiguous().t()
    call = ours(lambda x: F.dropout(x * 1.5, 0.3, training=True) + bias, **as_on_a_gpu)

    result = call(x)
    result.backward(torch.ones_like(result))

    assert x.grad is not None
    assert torch.equal(x.grad, result)  # of ones, both are the mask, scaled
    assert 0.1 < float((result == 0).double().mean()) < 0.5


def test_a_layout_changes_no_number_on_a_gpu(as_on_a_gpu: dict[str, Any]) -> None:
    sizes = torch.zeros(2, 4, 4, 5), torch.zeros(5, 4, 4, 2).permute(3, 2, 1, 0)
    found = []
    for x in sizes:
        torch.manual_seed(1)
        found.append(ours(torch.rand_like, **as_on_a_gpu)(x))

    assert torch.equal(found[0], found[1])
    assert torch.equal(
        found[0], draws.uniform(seed_after(1), 0, (0.0, 1.0), (2, 4, 4, 5), torch.float32)
    )


# --- ranges ---


@each_float
def test_numbers_from_zero_to_one_leave_out_the_one(dtype: torch.dtype) -> None:
    found = drawn(torch.rand_like, torch.zeros(1 << 20, dtype=dtype)).double()

    assert found.min() >= 0
    assert found.max() < 1
    assert found.max() > 1 - 2 * max(torch.finfo(dtype).eps, 1e-5)


@each_float
@pytest.mark.parametrize("bounds", [(1.0, 2.0), (-1.0, 1.0), (-3.0, -2.0), (0.0, 1e-3)])
def test_a_range_leaves_out_its_end(bounds: tuple[float, float], dtype: torch.dtype) -> None:
    low, high = bounds
    found = drawn(lambda x: torch.empty_like(x).uniform_(low, high), many(dtype))

    assert found.min() >= torch.tensor(low, dtype=dtype)
    assert found.double().max() < high


def test_a_range_of_one_number_is_that_number() -> None:
    assert drawn(lambda x: torch.empty_like(x).uniform_(2, 2), torch.zeros(9)).tolist() == [2] * 9


@pytest.mark.parametrize("digits", sorted(draws.DIGITS.values()))
@pytest.mark.parametrize("high", [1.0, 2.0, 3.0, 0.1, -1.0, -0.3, 1e-3])
def test_the_largest_number_below(high: float, digits: int) -> None:
    found = draws.largest_below(high, -10.0, digits)
    mantissa, exponent = math.frexp(found)

    assert found < high
    assert math.ldexp(mantissa, digits).is_integer()
    assert found + math.ldexp(1.0, exponent - digits) >= high


# --- distribution ---


@each_float
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    found = drawn(torch.rand_like, many(dtype)).double()
    step = 2.0 ** -draws.DIGITS[dtype]  # on a grid: its points stand for what is above them
    spread = found + torch.rand(MANY, dtype=torch.float64) * step

    assert abs(spread.mean() - 0.5) < 5 / math.sqrt(12 * MANY)
    assert abs(spread.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / MANY)
    assert stats.kstest(spread.numpy(), "uniform").pvalue > UNLIKELY


@each_float
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    found = drawn(torch.randn_like, many(dtype)).double()

    assert abs(found.mean()) < 5 / math.sqrt(MANY)
    assert abs(found.var() - 1) < 5 * math.sqrt(2 / MANY) + torch.finfo(dtype).eps
    assert abs((found**3).mean()) < 5 * math.sqrt(15 / MANY)
    assert abs((found**4).mean() - 3) < 5 * math.sqrt(96 / MANY) + 8 * torch.finfo(dtype).eps
    assert 4 < found.abs().max() < 8
    if dtype in (torch.float32, torch.float64):
        assert stats.kstest(found.numpy(), "norm").pvalue > UNLIKELY


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9])
def test_coins_fall_as_often_as_asked(p: float) -> None:
    number = drawn(lambda x: torch.bernoulli(x, p), many()).double()
    tensor = drawn(torch.bernoulli, many() + p).double()

    for found in (number, tensor):
        assert set(found.unique().tolist()) <= {0.0, 1.0}
        assert abs(found.mean() - p) < 5 * math.sqrt(p * (1 - p) / MANY)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_coins_that_are_settled(p: float) -> None:
    assert (drawn(lambda x: torch.bernoulli(x, p), many()) == p).all()
    assert (drawn(torch.bernoulli, many() + p) == p).all()


def test_integers_are_equally_frequent() -> None:
    found = drawn(lambda x: torch.randint_like(x, -3, 10), many())

    counts = torch.bincount(found.long() + 3, minlength=13)
    assert len(counts) == 13
    assert stats.chisquare(counts.numpy()).pvalue > UNLIKELY


def test_every_bit_is_set_half_of_the_time_and_with_no_other() -> None:
    words = drawn(lambda x: torch.randint(-(1 << 63), (1 << 63) - 1, x.shape), many())
    bits = (words[:, None] >> torch.arange(64) & 1).double() - 0.5

    deviations = bits.sum(0) / math.sqrt(MANY / 4)
    assert stats.chi2.sf((deviations**2).sum().item(), 64) > UNLIKELY
    together = (bits.t() @ bits).fill_diagonal_(0) / (MANY / 4) * math.sqrt(MANY)
    assert together.abs().max() < 5.5  # the largest of 2016 deviations


# --- independence ---


def correlation(x: Tensor, y: Tensor) -> float:
    """In deviations of what independent numbers have."""
    pair = torch.stack([x.flatten().double(), y.flatten().double()])
    found: float = torch.corrcoef(pair)[0, 1].item()
    return abs(found) * math.sqrt(x.numel())


@pytest.mark.parametrize("program", [torch.rand_like, torch.randn_like])
def test_neighbours_have_nothing_in_common(program: Program) -> None:
    found = drawn(program, many())

    for step in (1, 2, 16, 1000):
        assert correlation(found[:-step], found[step:]) < 5
        assert correlation(found[:-step].abs(), found[step:].abs()) < 5


@pytest.mark.parametrize("program", [torch.rand_like, torch.randn_like])
def test_draws_of_one_graph_have_nothing_in_common(program: Program) -> None:
    first, second = drawn(lambda x: (program(x), program(x)), many())

    assert correlation(first, second) < 5
    assert not (first == second).double().mean() > 1e-3


@pytest.mark.parametrize("program", [torch.rand_like, torch.randn_like])
def test_calls_and_seeds_have_nothing_in_common(program: Program) -> None:
    call = ours(program)
    torch.manual_seed(0)
    first, second = call(many()), call(many())
    torch.manual_seed(1)
    other = call(many())

    assert correlation(first, second) < 5
    assert correlation(first, other) < 5


def test_uniform_and_normal_numbers_of_one_graph_have_nothing_in_common() -> None:
    first, second = drawn(lambda x: (torch.rand_like(x), torch.randn_like(x)), many())

    assert correlation(first, second) < 5
    assert correlation(first, second.abs()) < 5


# --- sizes and layouts ---


@pytest.mark.parametrize("size", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_sizes_of_few_elements_or_none(size: tuple[int, ...]) -> None:
    found = drawn(lambda x: (torch.rand_like(x), F.dropout(x + 1, 0.5)), torch.zeros(size), seed=2)

    assert torch.equal(found[0], draws.uniform(seed_after(2), 0, (0.0, 1.0), size, torch.float32))
    assert found[1].shape == size


def test_a_layout_changes_no_number() -> None:
    x = torch.zeros(2, 3, 4, 5)
    plain = drawn(torch.rand_like, x)
    last = drawn(torch.rand_like, x.to(memory_format=torch.channels_last))
    turned = drawn(torch.rand_like, torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0))

    assert last.is_contiguous(memory_format=torch.channels_last)
    assert turned.stride() == (1, 2, 6, 24)
    assert torch.equal(plain, last)
    assert torch.equal(plain, turned)


def test_a_changed_size_draws_from_the_same_code() -> None:
    call = ours(lambda x: torch.rand_like(x) + torch.randint(0, x.shape[0], x.shape), dynamic=True)
    for rows in (3, 8, 33):
        torch.manual_seed(rows)
        found = call(torch.zeros(rows, 5))
        seed = seed_after(rows)
        part = draws.uniform(seed, 0, (0.0, 1.0), (rows, 5), torch.float32)
        whole = draws.integers(seed, 1, (0, rows), (rows, 5), torch.int64)

        assert torch.equal(found, part + whole)
    assert set(torch_calls()) == {"draw_seed"}


def test_a_size_that_makes_an_empty_range_is_refused() -> None:
    call = ours(lambda x: torch.randint(4, x.shape[0], (3,)) + x.sum(), dynamic=True)
    call(torch.zeros(9))

    with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
        call(torch.zeros(4))


def test_threads_change_no_number() -> None:
    call = ours(torch.randn_like)
    before = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        found.append(call(many()))
    torch.set_num_threads(before)

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- dropout ---


@each_float
def test_dropout_keeps_the_mean(dtype: torch.dtype) -> None:
    found = drawn(lambda x: F.dropout(x, 0.2), torch.ones(MANY, dtype=dtype))

    assert set(found.unique().tolist()) == {0.0, torch.tensor(1.25, dtype=dtype).item()}
    assert abs((found != 0).double().mean() - 0.8) < 5 * math.sqrt(0.16 / MANY)


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (1.0, 0.0)])
def test_native_dropout_of_nothing_and_of_everything(p: float, kept: float) -> None:
    out, mask = drawn(lambda x: torch.native_dropout(x + 1, p, True), torch.zeros(99))

    assert (out == kept).all()
    assert (mask == bool(kept)).all()


def test_a_dropped_nan_stays_nan_as_in_eager() -> None:
    found = drawn(lambda x: F.dropout(x, 0.5), torch.full((64,), math.nan))

    assert found.isnan().all()


def test_dropout_and_a_residual_are_one_kernel_and_the_seed(tmp_path: Path) -> None:
    call = ours(lambda x, y: F.dropout(x, 0.3) + y, dump_dir=tmp_path)
    call(torch.ones(64, 32, requires_grad=True), torch.ones(64, 32))
    (file,) = tmp_path.glob("compilation_*/forward_plan.txt")
    steps = [line.partition(" = ")[2].partition("(")[0] for line in file.read_text().splitlines()]

    assert [step for step in steps if step] == ["draw_seed", "kernel_1"]


def test_layers_share_one_kernel(tmp_path: Path) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = F.dropout(x @ w, 0.3) + x
        return x

    ours(program, dump_dir=tmp_path)(torch.ones(16, 16), torch.ones(16, 16))
    (file,) = tmp_path.glob("compilation_*/forward.ll")

    assert file.read_text().count("define void @kernel") == 1


def test_an_input_is_filled_in_place() -> None:
    def program(x: Tensor, y: Tensor) -> None:
        x.uniform_(-1, 1)
        y.normal_()

    x, y = torch.zeros(2, 500).unbind()
    call = ours(program)
    torch.manual_seed(5)
    call(x, y)

    seed = seed_after(5)
    assert torch.equal(x, draws.uniform(seed, 0, (-1.0, 1.0), (500,), torch.float32))
    torch.testing.assert_close(y, draws.normal(seed, 1, (500,), torch.float32))


def test_a_graph_that_runs_without_kernels_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3) + torch.rand_like(x)

    x = torch.randn(50, 7)
    expected = drawn(program, x, seed=6)
    monkeypatch.setattr(pipeline, "plan_kernels", _fails)
    call = ours(program, strict=False)
    torch.manual_seed(6)
    with pytest.warns(StatorWarning, match="for the test"):
        found = call(x)

    torch.testing.assert_close(found, expected)


def _fails(*arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("for the test")


# --- what eager refuses ---


@pytest.mark.parametrize("wrong", [-0.5, 1.5, math.nan])
def test_a_probability_that_is_none(wrong: float) -> None:
    call = ours(lambda x: torch.bernoulli(x * 1.0))
    call(torch.full((9,), 0.5))

    with pytest.raises(RuntimeError, match="p_in >= 0 && p_in <= 1"):
        call(torch.tensor([0.5] * 8 + [wrong]))


@pytest.mark.parametrize("wrong", [-0.5, math.nan])
def test_a_deviation_below_zero(wrong: float) -> None:
    call = ours(lambda x: torch.normal(x, x))
    call(torch.full((9,), math.inf))

    with pytest.raises(RuntimeError, match="std >= 0"):
        call(torch.tensor([0.5] * 8 + [wrong]))
