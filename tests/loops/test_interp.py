"""The reference interpreter: against torch, and rule by rule."""

import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stator.core.dtypes import TORCH_DTYPES, DType
from stator.loops import interp
from stator.loops.interp import NUMPY, bf16_bits, bf16_value, convert, run
from stator.loops.ir import Combine, Kernel
from stator.loops.parse import parse
from stator.loops.prims import Prim
from tests.fuzz.arguments import inputs
from tests.fuzz.compare import difference
from tests.fuzz.kernels import kernels


def execute(text: str, sizes: dict[str, int] | None = None, **tensors: torch.Tensor) -> None:
    """Run a kernel on tensors, by the names of its buffers."""
    arrays = {
        name: (t.view(torch.uint16) if t.dtype is torch.bfloat16 else t).view(-1).numpy()
        for name, t in tensors.items()
    }
    run(parse(text), arrays, sizes or {})


def test_softmax_with_a_symbolic_batch() -> None:
    text = """
kernel softmax
  buffer x: f32[33*s0]
  buffer out: f32[33*s0]
  scratch e: f32[33]
  outer i0: s0
  stage i1: 33
    acc0 max= x[33*i0 + i1]
  stage i1: 33
    e[i1] = exp(sub(x[33*i0 + i1], acc0))
    acc1 sum= e[i1]
  stage i1: 33
    out[33*i0 + i1] = div(e[i1], acc1)
"""
    for rows in (0, 1, 5):
        x = torch.randn(rows, 33)
        out = torch.empty_like(x)
        execute(text, {"s0": rows}, x=x, out=out)
        torch.testing.assert_close(out, x.softmax(-1), rtol=1e-6, atol=1e-7)


def test_column_sum_of_bf16() -> None:
    text = """
kernel column_sum
  buffer x: bf16[85]
  buffer out: bf16[17]
  outer i0: 17
  stage i1: 5
    acc0 sum= x[i0 + 17*i1]
  stage
    out[i0] = acc0
"""
    x, out = torch.randn(5, 17).bfloat16(), torch.empty(17, dtype=torch.bfloat16)
    execute(text, x=x, out=out)

    assert torch.equal(out, x.double().sum(0).bfloat16())


def test_gather_of_rows() -> None:
    text = """
kernel embedding
  buffer weight: f32[40]
  buffer rows: i64[6]
  buffer out: f32[24]
  outer i0: 6, i1: 4
  stage
    out[4*i0 + i1] = weight[4*[rows[i0]] + i1]
"""
    weight, rows = torch.randn(10, 4), torch.randint(0, 10, (6,))
    out = torch.empty(6, 4)
    execute(text, weight=weight, rows=rows, out=out)

    assert torch.equal(out, torch.nn.functional.embedding(rows, weight))


def test_update_in_place_and_order_of_statements() -> None:
    text = """
kernel update
  buffer x: f32[8]
  buffer twice: f32[8]
  outer i0: 8
  stage
    x[i0] = add(x[i0], 1.0:f32)
    twice[i0] = mul(x[i0], 2.0:f32)
"""
    x, twice = torch.arange(8.0), torch.empty(8)
    execute(text, x=x, twice=twice)

    assert torch.equal(x, torch.arange(8.0) + 1)
    assert torch.equal(twice, (torch.arange(8.0) + 1) * 2)


def test_floor_division_and_remainder_of_negative_indices() -> None:
    text = """
kernel floors
  buffer q: i64[7]
  buffer r: i64[7]
  outer i0: 7
  stage
    q[i0] = value(((i0 - 5) // 3))
    r[i0] = value(((i0 - 5) % 3))
"""
    q, r = torch.empty(7, dtype=torch.int64), torch.empty(7, dtype=torch.int64)
    execute(text, q=q, r=r)

    numbers = torch.arange(7) - 5
    assert torch.equal(q, numbers.div(3, rounding_mode="floor"))
    assert torch.equal(r, numbers.remainder(3))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernels(), st.integers(0, 2**20))
def test_fuzzed_kernels_run_and_repeat(kernel: Kernel, seed: int) -> None:
    first, sizes = inputs(kernel, seed)
    second, same_sizes = inputs(kernel, seed)
    untouched, _ = inputs(kernel, seed)
    run(kernel, first, sizes)
    run(kernel, second, same_sizes)

    assert difference(kernel, first, second) is None
    for buffer in kernel.read:
        np.testing.assert_array_equal(first[buffer.name], untouched[buffer.name])


def test_a_wrong_element_is_a_difference() -> None:
    kernel = parse("kernel k\n  buffer x: f32[4]\n  outer i0: 4\n  stage\n    x[i0] = 1.0:f32\n")
    right = np.ones(4, np.float32)
    found = {}
    for third in (1 + 1e-6, 1.001, math.nan):
        changed = np.array([1, 1, third, 1], np.float32)
        found[third] = difference(kernel, {"x": changed}, {"x": right})

    assert found[1 + 1e-6] is None
    assert found[1.001] == "x[2] is np.float32(1.001), not np.float32(1.0)"
    assert found[math.nan] is not None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("out[i0] = x[i0 + 1]", IndexError),
        ("out[i0] = x[i0 - 1]", IndexError),
        ("out[i0] = e[i0]", LookupError),
    ],
)
def test_wrong_accesses_are_errors(line: str, error: type[Exception]) -> None:
    text = "kernel k\n  buffer x: f32[4]\n  buffer out: f32[4]\n  scratch e: f32[4]\n  outer i0: 4"
    with pytest.raises(error):
        execute(f"{text}\n  stage\n    {line}\n", x=torch.ones(4), out=torch.ones(4))


# --- rules of single operations ---


def prim(which: Prim, dtype: DType, *args: float) -> Any:
    with np.errstate(all="ignore"):
        return interp.PRIMS[which](*(NUMPY[dtype](arg) for arg in args))


def test_every_primitive_is_there() -> None:
    assert interp.PRIMS.keys() == set(Prim)


@pytest.mark.parametrize(
    ("which", "dtype", "args", "result"),
    [
        (Prim.ADD, DType.I8, (127, 1), -128),
        (Prim.SUB, DType.U8, (3, 5), 254),
        (Prim.MUL, DType.I64, (2**62, 4), 0),
        (Prim.NEG, DType.I32, (-(2**31),), -(2**31)),
        (Prim.ABS, DType.I8, (-128,), -128),
        (Prim.DIV, DType.I64, (-7, 2), -3),
        (Prim.DIV, DType.I64, (7, 0), 0),
        (Prim.DIV, DType.I64, (-(2**63), -1), -(2**63)),
        (Prim.DIV, DType.U8, (200, 7), 28),
        (Prim.MOD, DType.I64, (-7, 2), -1),
        (Prim.MOD, DType.I64, (7, -2), 1),
        (Prim.MOD, DType.I32, (7, 0), 0),
        (Prim.MOD, DType.F32, (-7.5, 2.0), -1.5),
        (Prim.MAX, DType.F32, (math.nan, 1.0), math.nan),
        (Prim.MAX, DType.F32, (1.0, math.nan), math.nan),
        (Prim.MIN, DType.F32, (math.nan, 1.0), math.nan),
        (Prim.MIN, DType.F32, (1.0, math.nan), math.nan),
        (Prim.MIN, DType.BOOL, (True, False), False),
        (Prim.NE, DType.F32, (math.nan, math.nan), True),
        (Prim.LT, DType.F32, (math.nan, 1.0), False),
        (Prim.NOT, DType.BOOL, (True,), False),
        (Prim.NOT, DType.U8, (1,), 254),
        (Prim.SHL, DType.I8, (1, 7), -128),
        (Prim.SHL, DType.I8, (1, 8), 0),
        (Prim.SHL, DType.I8, (1, -1), 0),
        (Prim.SHR, DType.I8, (-7, 1), -4),
        (Prim.SHR, DType.I8, (-7, 9), -1),
        (Prim.SHR, DType.I8, (7, -1), 0),
        (Prim.SHR, DType.U8, (200, 8), 0),
        (Prim.ROUND, DType.F32, (2.5,), 2.0),
        (Prim.ROUND, DType.F32, (-3.5,), -4.0),
        (Prim.DIV, DType.F32, (1.0, 0.0), math.inf),
        (Prim.SQRT, DType.F32, (-1.0,), math.nan),
        (Prim.LOG, DType.F32, (0.0,), -math.inf),
        (Prim.EXP, DType.F32, (100.0,), math.inf),
        (Prim.POW, DType.F64, (-math.inf, 0.5), math.inf),
        (Prim.POW, DType.F32, (-0.0, 0.5), 0.0),
        (Prim.POW, DType.F32, (-2.0, 0.5), math.nan),
        (Prim.POW, DType.F32, (-2.0, 3.0), -8.0),
        (Prim.POW, DType.F32, (-0.0, -3.0), -math.inf),
        (Prim.POW, DType.F32, (-0.0, -2.0), math.inf),
        (Prim.POW, DType.F32, (0.0, -0.5), math.inf),
        (Prim.POW, DType.F64, (-1e200, 3.0), -math.inf),
        (Prim.POW, DType.F64, (-1e200, 2.0), math.inf),
        (Prim.POW, DType.F32, (math.nan, 0.0), 1.0),
        # 0.1f * 10f - 1f: the product alone would round to 1
        (Prim.FMA, DType.F32, (0.1, 10.0, -1.0), 1.4901161193847656e-08),
        (Prim.FMA, DType.F64, (1e200, 1e200, -math.inf), -math.inf),
        (Prim.FMA, DType.F32, (math.inf, 0.0, 1.0), math.nan),
    ],
)
def test_primitives(which: Prim, dtype: DType, args: Sequence[float], result: float) -> None:
    found = prim(which, dtype, *args)

    np.testing.assert_equal(float(found), float(result))
    is_bool = isinstance(result, bool) and not isinstance(found, np.integer)
    assert type(found) is (np.bool_ if is_bool else NUMPY[dtype])


def test_f32_arithmetic_rounds_each_time() -> None:
    third = prim(Prim.DIV, DType.F32, 1.0, 3.0)

    assert third.dtype == np.float32
    assert third == torch.tensor(1.0).div(3.0).item()
    assert prim(Prim.ADD, DType.F32, 2**24, 1) == 2**24


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "target", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
)
def test_conversion_from_floats_is_eagers(source: torch.dtype, target: torch.dtype) -> None:
    numbers = [0.0, -0.0, 1.9, 99.9, -1.9, 127.5, -129.0, 300.7, -300.7, 70000.0, 3e9, -3e9, 1e20]
    numbers += [4294967297.0, math.nan, math.inf, -math.inf, 2.0**31, -(2.0**63), 2.0**63]
    kind, dtype = NUMPY[TORCH_DTYPES[source]], TORCH_DTYPES[target]

    found = [convert(kind(number), dtype).item() for number in numbers]
    # What does not fit is converted in each machine's way; the first four numbers do fit.
    compared = len(numbers) if platform.machine() == "x86_64" else 4
    expected = torch.tensor(numbers, dtype=source).to(target).tolist()
    assert found[:compared] == expected[:compared]


@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.uint8, torch.int8])
@pytest.mark.parametrize("target", list(TORCH_DTYPES))
def test_conversion_from_integers_is_eagers(source: torch.dtype, target: torch.dtype) -> None:
    if target in (torch.bfloat16, torch.float16):
        return  # no computation has these types
    limits = torch.iinfo(source)
    numbers = [0, 1, 77, 16777217 % limits.max, limits.min, limits.max, limits.max - 1]
    kind, dtype = NUMPY[TORCH_DTYPES[source]], TORCH_DTYPES[target]

    expected = torch.tensor(numbers, dtype=source).to(target).tolist()
    assert [convert(kind(number), dtype).item() for number in numbers] == expected


def test_bf16_rounds_half_to_even() -> None:
    numbers = torch.randn(500) * torch.logspace(-38, 38, 500)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, 0.0, -0.0])
    special = torch.tensor([math.inf, -math.inf])
    values = torch.cat([numbers, ties, special])

    bits = np.array([bf16_bits(float(value)) for value in values], np.uint16)
    rounded = torch.from_numpy(bits).view(torch.bfloat16)
    assert torch.equal(rounded, values.bfloat16())
    back = torch.tensor([float(bf16_value(int(b))) for b in bits])
    assert torch.equal(back, rounded.float())
    assert math.isnan(bf16_value(int(bf16_bits(math.nan))))


# --- accumulation ---


def total(combine: Combine, dtype: DType, *values: float) -> Any:
    return interp.combined(combine, [NUMPY[dtype](value) for value in values], dtype)


@pytest.mark.parametrize(
    ("combine", "dtype", "neutral"),
    [
        (Combine.SUM, DType.F32, 0.0),
        (Combine.PROD, DType.F32, 1.0),
        (Combine.MAX, DType.F32, -math.inf),
        (Combine.MIN, DType.F64, math.inf),
        (Combine.SUM, DType.I32, 0),
        (Combine.PROD, DType.I32, 1),
        (Combine.MAX, DType.I8, -128),
        (Combine.MIN, DType.I8, 127),
        (Combine.MAX, DType.U8, 0),
        (Combine.MIN, DType.U8, 255),
        (Combine.ANY, DType.BOOL, False),
        (Combine.ALL, DType.BOOL, True),
        (Combine.MAX, DType.BOOL, False),
        (Combine.MIN, DType.BOOL, True),
    ],
)
def test_nothing_accumulated_is_neutral(combine: Combine, dtype: DType, neutral: float) -> None:
    found = total(combine, dtype)

    assert found == neutral
    assert type(found) is NUMPY[dtype]
    np.testing.assert_equal(total(combine, dtype, 1), NUMPY[dtype](1))


def test_sums_are_rounded_once() -> None:
    assert total(Combine.SUM, DType.F32, 1e8, 1.0, -1e8) == 1.0
    assert total(Combine.SUM, DType.F64, 1e308, 1e308, -1e308) == 1e308
    assert total(Combine.SUM, DType.F64, 1e308, 1e308) == math.inf
    assert math.isnan(total(Combine.SUM, DType.F32, math.inf, -math.inf))
    assert total(Combine.SUM, DType.F32, math.inf, 1.0) == math.inf


def test_products_do_not_overflow_on_the_way() -> None:
    assert total(Combine.PROD, DType.F32, 1e30, 1e30, 1e-30, -1.0) == -np.float32(1e30)
    assert math.isnan(total(Combine.PROD, DType.F32, 0.0, math.inf))
    assert total(Combine.PROD, DType.F32, -2.0, math.inf) == -math.inf
    assert math.copysign(1.0, total(Combine.PROD, DType.F32, -2.0, 0.0)) == -1.0


def test_extremes_let_nan_win() -> None:
    assert math.isnan(total(Combine.MAX, DType.F32, 1.0, math.nan, 2.0))
    assert math.isnan(total(Combine.MIN, DType.F32, math.nan, 2.0))


def test_integers_wrap() -> None:
    assert total(Combine.SUM, DType.I8, 127, 1) == -128
    assert total(Combine.PROD, DType.U8, 16, 17) == 16
