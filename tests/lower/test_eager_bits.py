"""`Options.numerics="eager"`: what is declared exact is, bit for bit; the rest stays with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stator
from stator.core.dtypes import DType
from stator.lower.eager_bits import MEASURED, has_eager_bits
from stator.ops import table
from stator.ops.pointwise import IN_BF16, IN_HALVES
from stator.ops.table import Exact
from stator.pipeline import FREEZING, JOINT, KEEPS_BITS, POST_GRAD, PRE_GRAD, bits_changed_by
from tests.passes.on_cuda import fakes, graph_of

aten = torch.ops.aten
OPTIONS: Final = {"numerics": "eager", "strict": True}
FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES: Final = (torch.bfloat16, torch.float16)
EVERY: Final = (*FLOATS, torch.int64, torch.int32, torch.uint8)
on_measured = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in MEASURED,
    reason="torch's kernels for this processor were not measured: nothing but views is compiled",
)


def differing(ours: Any, eager: Any) -> int:
    """Elements with other bits; zeros have signs, all NaN are one."""
    if isinstance(eager, tuple):
        return sum(map(differing, ours, eager))
    assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
    if not eager.is_floating_point():
        return int((ours != eager).sum())
    same = (ours == eager) & (ours.signbit() == eager.signbit())
    return int((~(same | (ours.isnan() & eager.isnan()))).sum())


def values(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all sizes, zeros, infinities, NaN and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        low = 0 if dtype is torch.uint8 else -100
        return torch.randint(low, 100, (count,), generator=generator).to(dtype)
    scale = torch.tensor([1, 0.01, 10, 1000.0])
    drawn = torch.randn(count, generator=generator) * scale.repeat(count // 4 + 1)[:count]
    info = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), info.tiny / 4, info.max]
    made = drawn.to(dtype)
    if count > 100:
        made[torch.randperm(count, generator=generator)[:7]] = torch.tensor(special, dtype=dtype)
    return made


def laid_out(dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """A few elements, many, transposed, every second."""
    yield values(7, dtype, seed)
    yield values(1003, dtype, seed)
    yield values(37 * 40, dtype, seed).view(37, 40).t()
    yield values(2002, dtype, seed)[::2]


Formula = Callable[..., Any]
UNARY: Final[dict[str, Formula]] = {
    "neg, abs, sign": lambda x: (x.neg(), x.abs(), x.sign(), x.sgn()),
    "rounded": lambda x: (x.floor(), x.ceil(), x.trunc(), x.round()),
    "kinds": lambda x: (x.isnan(), x.isinf(), x.isfinite(), x.signbit(), x.logical_not()),
    "relu": lambda x: (x.relu(), F.relu6(x), x.clamp(-5, 12), x.clamp_min(3), x.clamp_max(3)),
    "quotients": lambda x: (x.reciprocal(), x / 7, x / 4, x * x),
    "numbers": lambda x: (x + 3, 2 - x, x * 3, x == 3, x < 3, x.masked_fill(x > 3, 2)),
    "casts and sums": lambda x: (x.float().bfloat16() + x, x.half() * x, x.double().half() - x),
    "casts": lambda x: (x.float(), x.double(), x.bfloat16(), x.half(), x.to(torch.int32), x.bool()),
    "moved": lambda x: (x.flip(0), torch.cat([x, x]), x.roll(1), x.repeat(2, *[1] * (x.dim() - 1))),
}
BINARY: Final[dict[str, Formula]] = {
    "sums": lambda x, y: (x + y, x - y, x * y),
    "extremes": lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.where(x > y, x, y)),
    "compared": lambda x, y: (x == y, x < y, x >= y, x.logical_and(y), x.logical_xor(y)),
}
OF_FLOATS: Final[dict[str, Formula]] = {
    "float numbers": lambda x, y: (x * 1.37, x / 1.37, x.clamp(-0.5, 1.2), x + 1.5, x - 0.25),
    "quotient": lambda x, y: (x / y, torch.fmax(x, y), torch.copysign(x, y), x.frac()),
    "fused by eager": lambda x, y: (torch.addcmul(x, y, x, value=0.37), torch.lerp(x, y, 0.3)),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=0.37),
    "activations": lambda x, y: (F.leaky_relu(x, 0.1), F.threshold(x, 0.3, 0.7), F.hardtanh(x)),
    "derivatives": lambda x, y: (aten.tanh_backward(x, y), aten.threshold_backward(x, y, 0.3)),
    "powers": lambda x, y: (x**2, x**1, x**-1, x.square()),
    "a chain": lambda x, y: torch.relu((x * 1.3 + y) * x - y / 3) + x.abs() * 0.7,
    "sums that round": lambda x, y: (x + 1.37, torch.add(x, y, alpha=0.37), 1.37 - x),
}


def check(formula: Formula, dtype: torch.dtype, arguments: int) -> None:
    compiled = stator.aot_function(formula, **OPTIONS)
    for inputs in zip(*(laid_out(dtype, seed) for seed in range(arguments)), strict=True):
        assert differing(compiled(*inputs), formula(*inputs)) == 0


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("name", UNARY)
def test_of_one(name: str, dtype: torch.dtype) -> None:
    check(UNARY[name], dtype, 1)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("name", BINARY)
def test_of_two(name: str, dtype: torch.dtype) -> None:
    check(BINARY[name], dtype, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OF_FLOATS)
def test_of_floats(name: str, dtype: torch.dtype) -> None:
    check(OF_FLOATS[name], dtype, 2)


FUNCTIONS: Final = {
    prim: getattr(torch, prim.name.lower()) for prim in sorted(IN_HALVES | IN_BF16, key=str)
}


@on_measured
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_half_precision(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    found = {prim: f for prim, f in FUNCTIONS.items() if prim in IN_HALVES or dtype is HALVES[0]}

    def all_of_them(x: Tensor) -> tuple[Tensor, ...]:
        others = (x.sigmoid(), F.silu(x), F.hardsigmoid(x))
        return (*(function(x) for function in found.values()), *others)

    names = (*found, "sigmoid", "silu", "hardsigmoid")
    for x in (every, every.repeat(2).view(2, -1).t()[:, 0]):
        ours = stator.aot_function(all_of_them, **OPTIONS)(x)
        wrong = map(differing, ours, all_of_them(x))
        assert {name: count for name, count in zip(names, wrong, strict=True) if count} == {}
    record = stator.last_compilation()
    assert record is not None
    assert record.called == []  # all of them became kernels


class Layers(nn.Module):
    """What a model has: products, norms, activations, dropout, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        x = self.batch(F.dropout(F.gelu(self.out(x)), 0.3).transpose(1, 2))
        return torch.softmax(x * 0.7 + torch.rand_like(x), -1)


def trained(model: Callable[[Tensor], Tensor], layers: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in layers.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_has_eagers_bits(dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    layers, own = Layers().to(dtype), Layers().to(dtype)
    own.load_state_dict(layers.state_dict())
    x = torch.randn(4, 6, 16).to(dtype)
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="stator", dynamic=dynamic, options=OPTIONS)

    ours, eager = trained(compiled, own, x), trained(layers, layers, x)

    assert [differing(one, other) for one, other in zip(ours, eager, strict=True)] == [0] * 10


def test_fast_kernels_round_otherwise() -> None:
    """What the option is for: without it the same chain has other bits."""
    x, y = (values(1003, torch.bfloat16, seed) for seed in (1, 2))
    chain = OF_FLOATS["a chain"]
    assert differing(stator.aot_function(chain)(x, y), chain(x, y)) > 0


def test_what_is_not_declared_exact_stays_with_torch() -> None:
    x = torch.randn(40)
    assert differing(stator.aot_function(lambda x: (x + 1).exp(), **OPTIONS)(x), (x + 1).exp()) == 0
    record = stator.last_compilation()
    assert record is not None
    assert record.called == ["aten.exp.default"]
    assert any("exp stays with torch: Options.numerics" in note for note in record.notes)


def test_a_new_operator_is_not_exact_until_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for tables in ("POINTWISE", "RULES", "EXACT"):
        monkeypatch.setattr(table, tables, dict(getattr(table, tables)))
    table.pointwise("one")(lambda b, x: x)
    table.lowers("other")(lambda t, result: None)
    assert table.EXACT["one"] is table.EXACT["other"] is Exact.NOWHERE
    assert set(table.EXACT) == {*table.POINTWISE, *table.RULES, *table.VIEW_RULES}


def test_where_a_kernel_is_exact() -> None:
    kinds = ([DType.I64], [DType.F32], [DType.BF16], [DType.F16], [DType.BF16, DType.F32])
    found = {exact: [exact.holds(one) for one in kinds] for exact in Exact}
    assert found[Exact.NOWHERE] == [False] * 5
    assert found[Exact.INTEGERS] == [True, False, False, False, False]
    assert found[Exact.WIDE] == [True, True, False, False, False]
    assert found[Exact.HALVES] == [False, False, True, True, False]
    assert found[Exact.BF16] == [False, False, True, False, False]
    assert found[Exact.EVERYWHERE] == [True] * 5


def test_passes_that_round_otherwise_are_left_out() -> None:
    ours = {pass_.__name__ for pass_ in (*PRE_GRAD, *JOINT, *FREEZING, *POST_GRAD)}
    assert ours >= KEEPS_BITS
    assert set(bits_changed_by()) == ours - KEEPS_BITS
    assert {"fuse_attention", "pad_mm", "seed_random", "pack_linear"} <= set(bits_changed_by())


@pytest.mark.parametrize("function", [torch.linalg.svdvals, torch.linalg.eigvalsh])
def test_vectors_that_nobody_reads_are_not_computed(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 5, dtype=torch.float64)
    x = x + x.t()
    assert differing(stator.aot_function(function, **OPTIONS)(x), function(x)) == 0
    x.requires_grad_()
    (ours,) = torch.autograd.grad(stator.aot_function(function, **OPTIONS)(x).sum(), x)
    (eager,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x.relu(), False),
        (lambda x: x + 1, False),
        (lambda x: x.clone(), True),
        (lambda x: x.t(), True),
        (lambda x: x.double(), False),
        (lambda x: torch.ones_like(x), False),
    ],
)
def test_of_a_gpu_nothing_is_known_but_that_moves_compute_nothing(
    program: Formula, expected: bool
) -> None:
    module = graph_of(program, *fakes((3, 4)))
    (node,) = (node for node in module.graph.nodes if node.op == "call_function")

    assert has_eager_bits(node) == expected
