"""Our math functions: within 2 ulp of the exact result, and vectorised.

`python -m tests.codegen.llvm.test_math` prints the greatest error of every function.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

import llvmlite.binding as llvm
import mpmath  # type: ignore[import-untyped]  # it ships none
import numpy as np
import pytest
from scipy import special

from stator.codegen.llvm import math
from stator.core.dtypes import DType
from stator.loops.prims import Prim

Array: TypeAlias = np.ndarray[Any, Any]
Key: TypeAlias = tuple[Prim, DType]

BINARY: Final = frozenset({Prim.POW, Prim.ATAN2, Prim.HYPOT})
OURS: Final = [key for key in math.FUNCTIONS if key not in math.LIBM]
CLOSE: Final = [key for key in OURS if key[0] is not Prim.NORMAL_CDF]
OURS_F32: Final = [key for key in CLOSE if key[1] is DType.F32]
OURS_F64: Final = [key for key in CLOSE if key[1] is DType.F64]
ULPS: Final = 2.0
MISMATCH: Final = float("inf")  # the error of a wrong NaN or of a zero with the wrong sign

# In f64, which is exact beside f32.
EXACT: Final[dict[Prim, Callable[..., Array]]] = {
    Prim.EXP: np.exp,
    Prim.EXP2: np.exp2,
    Prim.EXPM1: np.expm1,
    Prim.LOG: np.log,
    Prim.LOG2: np.log2,
    Prim.LOG10: np.log10,
    Prim.LOG1P: np.log1p,
    Prim.SIN: np.sin,
    Prim.COS: np.cos,
    Prim.TAN: np.tan,
    Prim.ASIN: np.arcsin,
    Prim.ACOS: np.arccos,
    Prim.ATAN: np.arctan,
    Prim.ATAN2: np.arctan2,
    Prim.SINH: np.sinh,
    Prim.COSH: np.cosh,
    Prim.TANH: np.tanh,
    Prim.ASINH: np.arcsinh,
    Prim.ACOSH: np.arccosh,
    Prim.ATANH: np.arctanh,
    Prim.ERF: special.erf,
    Prim.ERFC: special.erfc,
    Prim.NORMAL_CDF: special.ndtr,
    Prim.POW: np.power,
    Prim.HYPOT: np.hypot,
}
TYPES: Final = {DType.F32: "float", DType.F64: "double"}

SPECIAL: Final = (
    0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0, 3.0, -3.0,
    1e30, -1e30,
)  # fmt: skip
# Where functions change their formula, overflow, underflow or have their steepest error.
THRESHOLDS: Final = (
    0.1, 0.25, 0.5, 0.55, 0.75, 475 / 512, 1.0, 1.25, 2.0, 4.0, 6.0, 9.0, 10.05, 20.0, 88.72, 104.0,
    128.0, 149.0, 709.78, 745.13, 1024.0, 1074.0, 1e5, np.pi / 4, np.pi / 2, np.pi, 355.0,
    2 / 3, 4 / 3, 0.5**0.5, 2.0**0.5, 2.0**-10, 2.0**-25, 2.0**-54, np.log(2) / 2,
)  # fmt: skip


@cache
def target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        opt=3, cpu=llvm.get_host_cpu_name(), features=features, jit=True
    )


def loop_text(key: Key) -> str:
    """A loop that applies the function to arrays: (arguments…, result, length)."""
    prim, dtype = key
    type_ = TYPES[dtype]
    names = ["x", "y"] if prim in BINARY else ["x"]
    pointers = ", ".join(f"ptr noalias %{name}s" for name in [*names, "result"])
    loads = "\n".join(
        f"  %{name}_at = getelementptr {type_}, ptr %{name}s, i64 %i\n"
        f"  %{name} = load {type_}, ptr %{name}_at"
        for name in names
    )
    given = ", ".join(f"{type_} %{name}" for name in names)
    return f"""
{math.definitions([key])}
define void @apply({pointers}, i64 %n) "prefer-vector-width"="512" {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{loads}
  %value = call {type_} @{math.FUNCTIONS[key]}({given})
  %result_at = getelementptr {type_}, ptr %results, i64 %i
  store {type_} %value, ptr %result_at
  %next = add nuw nsw i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


def optimized(text: str) -> Any:
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = True
    builder = llvm.create_pass_builder(target_machine(), options)
    builder.getModulePassManager().run(module, builder)
    return module


@cache
def compiled(key: Key) -> Callable[..., None]:
    """The loop, applied to the addresses of arrays."""
    engine = llvm.create_mcjit_compiler(optimized(loop_text(key)), target_machine())
    engine.finalize_object()
    pointers = [ctypes.c_void_p] * (3 if key[0] in BINARY else 2)
    entry = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)(engine.get_function_address("apply"))

    def run(*arrays: Array, _engine: Any = engine) -> None:  # the code lives as long as its engine
        entry(*(array.ctypes.data for array in arrays), arrays[0].size)

    return run


def applied(key: Key, *arguments: Array) -> Array:
    arguments = tuple(np.ascontiguousarray(argument) for argument in arguments)
    result = np.empty_like(arguments[0])
    compiled(key)(*arguments, result)
    return result


def special_values(dtype: type) -> Array:
    limits = np.finfo(dtype)
    edges = [limits.smallest_subnormal, limits.tiny, limits.tiny / 2, limits.max]
    return np.array([*SPECIAL, *edges, *(-edge for edge in edges)], dtype)


def inputs(dtype: type, count: int) -> Array:
    """Special values, `count` bit patterns, and about as many values where things happen."""
    generator = np.random.default_rng(0)
    integer: Any = np.int32 if dtype is np.float32 else np.int64
    span = np.iinfo(integer)
    patterns = generator.integers(span.min, span.max, count, integer, endpoint=True)
    ranges = [generator.uniform(-s, s, count // 8) for s in (1.0, 4.0, 30.0, 1000.0)]
    small = np.exp2(generator.uniform(-60.0, 2.0, count // 8))
    near = np.arange(count // (4 * len(THRESHOLDS)), dtype=integer)
    above = [np.array(t, dtype).view(integer) + near for t in THRESHOLDS]
    below = [np.array(t, dtype).view(integer) - near for t in THRESHOLDS]
    positive = np.concatenate([small.astype(dtype), *(a.view(dtype) for a in above + below)])
    uniform: Array = np.concatenate(ranges).astype(dtype)
    return np.concatenate(
        [special_values(dtype), patterns.view(dtype), uniform, positive, -positive]
    )


def arguments_of(prim: Prim, count: int) -> tuple[Array, ...]:
    """Arguments in f32: of a binary function also all pairs of special values."""
    x = inputs(np.float32, count)
    if prim not in BINARY:
        return (x,)
    generator = np.random.default_rng(1)
    values = special_values(np.float32)
    first, second = (grid.ravel() for grid in np.meshgrid(values, values))
    # powers that neither overflow nor vanish: y log2(x) within the exponents of f32
    exponents = generator.uniform(-149.0, 128.0, count)
    bases = np.exp2(
        np.exp2(generator.uniform(-20.0, 7.0, count)) * generator.choice((-1, 1), count)
    )
    powers = exponents / np.log2(bases)
    integers = generator.integers(-60, 60, count)
    negative = -np.exp2(generator.uniform(-2.5, 2.5, count))
    xs, ys = [bases, negative], [powers, integers]
    return (
        np.concatenate([first, x, *(part.astype(np.float32) for part in xs)]),
        np.concatenate([second, generator.permutation(x), *(y.astype(np.float32) for y in ys)]),
    )


def errors_f32(got: Array, exact: Array) -> Array:
    """Errors in ulp of f32; an overflow counts as the power of two that it stands for."""
    limit = 2.0**128
    reached = np.where(np.isinf(got), np.copysign(limit, got.astype(np.float64)), got)
    meant = np.clip(exact, -limit, limit)
    exponent = np.clip(np.frexp(meant)[1] - 1, -126, 127)
    errors: Array = np.abs(reached - meant) / np.ldexp(1.0, exponent - 23)
    errors[np.isnan(exact)] = 0.0
    wrong_zero = (got == 0.0) & (np.signbit(got) != np.signbit(exact)) & ~np.isnan(exact)
    errors[(np.isnan(got) != np.isnan(exact)) | wrong_zero] = MISMATCH
    return errors


def worst_f32(key: Key, count: int = 1 << 20) -> tuple[float, str]:
    """The greatest error, and where it is."""
    arguments = arguments_of(key[0], count)
    with np.errstate(all="ignore"):
        exact = EXACT[key[0]](*(argument.astype(np.float64) for argument in arguments))
        got = applied(key, *arguments)
        errors = errors_f32(got, exact)
    at = int(np.argmax(errors))
    given = ", ".join(repr(argument[at]) for argument in arguments)
    return float(errors[at]), f"{key[0].name}({given}) = {exact[at]}, not {got[at]}"


def error_f64(prim: Prim, x: float, got: float) -> float:
    """The error in ulp of f64."""
    if not np.isfinite(x) or x == 0.0:
        with np.errstate(all="ignore"):
            expected = EXACT[prim](np.float64(x))
        if np.isnan(expected) or np.isnan(got):
            return 0.0 if np.isnan(expected) == np.isnan(got) else MISMATCH
        same_sign = np.signbit(expected) == np.signbit(got)
        return 0.0 if expected == got and same_sign else MISMATCH
    exact = EXACT_F64[prim](mpmath.mpf(x))
    if not isinstance(exact, mpmath.mpf) or not mpmath.isfinite(exact):  # complex, or a pole
        pole = -np.inf if isinstance(exact, mpmath.mpf) and exact < 0 else np.nan
        return 0.0 if np.array_equal(got, pole, equal_nan=True) else MISMATCH
    if np.isnan(got):
        return MISMATCH
    limit = mpmath.mpf(2) ** 1024
    meant = min(max(exact, -limit), limit)
    reached = mpmath.sign(got) * limit if np.isinf(got) else mpmath.mpf(got)
    exponent = min(max(int(mpmath.frexp(meant)[1]) - 1, -1022), 1023)
    return float(abs(reached - meant) / mpmath.mpf(2) ** (exponent - 52))


EXACT_F64: Final[dict[Prim, Callable[[Any], Any]]] = {
    Prim.EXP: mpmath.exp,
    Prim.EXP2: lambda x: mpmath.power(2, x),
    Prim.EXPM1: mpmath.expm1,
    Prim.LOG: mpmath.log,
    Prim.LOG1P: mpmath.log1p,
    Prim.SINH: mpmath.sinh,
    Prim.COSH: mpmath.cosh,
    Prim.TANH: mpmath.tanh,
    Prim.ERF: mpmath.erf,
}


def worst_f64(key: Key, count: int = 2000) -> tuple[float, str]:
    """The greatest error, and where it is."""
    x = inputs(np.float64, count)
    got = applied(key, x)
    with mpmath.workprec(160):
        errors = [error_f64(key[0], *pair) for pair in zip(x.tolist(), got.tolist(), strict=True)]
    at = int(np.argmax(errors))
    return errors[at], f"{key[0].name}({x[at]!r}) is not {got[at]!r}"


def named(key: Key) -> str:
    return f"{key[0].name.lower()}_{key[1].value}"


@pytest.mark.parametrize("key", OURS_F32, ids=named)
def test_f32_is_within_two_ulp(key: Key) -> None:
    error, where = worst_f32(key)
    assert error <= ULPS, f"{error} ulp: {where}"


@pytest.mark.parametrize("key", OURS_F64, ids=named)
def test_f64_is_within_two_ulp(key: Key) -> None:
    error, where = worst_f64(key)
    assert error <= ULPS, f"{error} ulp: {where}"


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_the_normal_distribution_is_exact_beside_one(dtype: DType) -> None:
    """No less than 1 + erf is: an ulp below 1; in the tail even better."""
    kind, ulp = (np.float32, 2.0**-24) if dtype is DType.F32 else (np.float64, 2.0**-53)
    x = inputs(kind, 1 << 16)
    with np.errstate(all="ignore"):  # some of the bit patterns are NaN that signal
        got = applied((Prim.NORMAL_CDF, dtype), x).astype(np.float64)
        exact = special.ndtr(x.astype(np.float64))

    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    known = ~np.isnan(exact)
    assert np.abs(got - exact)[known].max() <= 2 * ulp
    if dtype is DType.F32:
        near = known & (np.abs(x) < 5.5)
        assert (np.abs(got - exact)[near] / exact[near]).max() < 2e-3


@pytest.mark.parametrize("key", math.LIBM, ids=named)
def test_the_c_library_is_reached(key: Key) -> None:
    prim, dtype = key
    x = np.array([0.25, 0.5, 1.0, 1.75], np.float32 if dtype is DType.F32 else np.float64)
    arguments = (x, x + 1) if prim in BINARY else (x,)
    with np.errstate(all="ignore"):
        expected = EXACT[prim](*arguments)
    np.testing.assert_allclose(applied(key, *arguments), expected, rtol=1e-6)


@pytest.mark.parametrize("key", OURS, ids=named)
def test_loops_are_vectorised(key: Key) -> None:
    module = optimized(loop_text(key))
    calls = [line for line in str(module).splitlines() if re.search(r" call ", line)]
    assert all("@llvm." in line for line in calls), "something is not inlined"
    assert re.search(rf"<\d+ x {TYPES[key[1]]}>", str(module))
    if llvm.get_host_cpu_features().get("avx512f"):
        assert "zmm" in target_machine().emit_assembly(module)


def test_sigmoid_of_extremes() -> None:
    x = np.concatenate([special_values(np.float32), np.linspace(-120, 120, 4001, dtype=np.float32)])
    with np.errstate(all="ignore"):
        got = np.float32(1.0) / (np.float32(1.0) + applied((Prim.EXP, DType.F32), -x))
    exact = special.expit(x.astype(np.float64))
    is_denormal = exact < 2.0**-126  # where exp(-x) already overflows to infinity
    assert np.all(got[is_denormal & (x < -89)] == 0.0)
    # the sum and the quotient round too
    assert errors_f32(got[~is_denormal], exact[~is_denormal]).max() <= ULPS + 1.0


def test_every_inexact_primitive_has_a_function_for_both_types() -> None:
    assert set(math.FUNCTIONS) == {(prim, dtype) for prim in EXACT for dtype in TYPES}


def test_definitions_come_once_and_in_one_order() -> None:
    exp, log = (Prim.EXP, DType.F32), (Prim.LOG, DType.F32)
    text = math.definitions([log, exp, log])
    assert text == math.definitions([exp, log])
    assert re.findall(r"@(stator_\w+)\(", text) == ["stator_exp_f32", "stator_log_f32"]
    assert math.definitions([]) == ""


def main() -> None:
    for key in OURS:
        error, where = worst_f32(key) if key[1] is DType.F32 else worst_f64(key)
        print(f"{named(key):10} {error:.3f} ulp at {where}")


if __name__ == "__main__":
    main()
