"""Slow reference interpreter of kernels: the oracle in tests.

Every operation is one numpy scalar operation, rounded to its type.  What the IR leaves open, this
interpreter settles so:
- float sums and products are the exact ones, rounded once (a backend may reassociate);
- MIN and MAX of 0.0 and -0.0 may give either; a sum of zeros is 0.0;
- integer MOD by zero gives 0; the least integer divided by -1 is itself;
- a shift count that is negative or reaches the width moves everything out: SHL gives 0, SHR gives
  the sign (0 or -1);
- a float that does not fit an integer type converts as eager does on x86: to i64 and i32 it gives
  the least number, as NaN does; to i16 and i8 it goes through i32, to u8 through i64, and wraps.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, TypeAlias

import numpy as np

from stator.core.dtypes import DType
from stator.loops.index import Axis, Clamped, Element, Index, Quotient, Remainder, Symbol
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
    Buffer,
    Cast,
    Combine,
    Const,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Store,
    Within,
)
from stator.loops.philox import philox_one
from stator.loops.prims import Prim
from stator.loops.threefry import threefry, threefry_one

Scalar: TypeAlias = Any  # a numpy scalar of the expression's type
Array: TypeAlias = "np.ndarray[Any, Any]"

# How a buffer of each type stands in numpy; bf16 by its bits.
NUMPY: Final[dict[DType, Any]] = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.I16: np.int16,
    DType.I8: np.int8,
    DType.U8: np.uint8,
    DType.BOOL: np.bool_,
}


def run(kernel: Kernel, arguments: Mapping[str, Array], sizes: Mapping[str, int]) -> None:
    """Run the kernel on 1-D arrays by buffer name, with numbers by symbol name.

    Arrays have the types that `NUMPY` says.  What the kernel stores is written into them.
    """
    for buffer in (*kernel.read, *kernel.written):
        if arguments[buffer.name].dtype != NUMPY[buffer.dtype]:
            raise TypeError(f"{buffer.name} is {arguments[buffer.name].dtype}, not {buffer.dtype}")
    with np.errstate(all="ignore"):
        outer = _Machine(dict(arguments), sizes)
        for _ in outer.points(kernel.outer):
            machine = _Machine(outer.arrays, sizes, dict(outer.axes), outer.lengths)
            for stage in kernel.stages:
                machine.run_stage(stage)


def bf16_bits(value: float) -> np.uint16:
    """The bits of an f32 rounded to bf16, half to even."""
    bits = int(np.float32(value).view(np.uint32))
    if math.isnan(value):
        return np.uint16(bits >> 16 | 0x40)  # quiet, also where only low bits were set
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def bf16_value(bits: int) -> np.float32:
    """The f32 that has these bits as bf16."""
    return np.uint32(int(bits) << 16).view(np.float32)


@dataclass
class _Machine:
    """One outer iteration."""

    arrays: dict[str, Array]
    sizes: Mapping[str, int]
    axes: dict[Axis, int] = field(default_factory=dict)
    lengths: dict[Buffer, int] = field(default_factory=dict)
    scratch: dict[tuple[Buffer, int], Scalar] = field(default_factory=dict)
    accumulated: dict[str, Scalar] = field(default_factory=dict)

    def points(self, axes: tuple[Axis, ...]) -> Iterator[None]:
        """Set the axes to each of their points, the last one fastest."""
        for values in itertools.product(*(range(self.index(axis.size, {})) for axis in axes)):
            self.axes.update(zip(axes, values, strict=True))
            yield

    def run_stage(self, stage: Stage) -> None:
        taken: dict[Accumulate, list[Scalar]] = {
            statement: [] for statement in stage.body if isinstance(statement, Accumulate)
        }
        sums = {s: ExactSum() for s in taken if s.combine is Combine.SUM and s.value.dtype.is_float}
        for _ in self.points(stage.inner):
            for statement in stage.body:
                # What was computed for one statement is not kept: a store may have changed it.
                known: dict[Expr, Scalar] = {}
                value = self.value(statement.value, known)
                if isinstance(statement, Store):
                    self.put(statement, self.index(statement.index, known), value)
                    continue
                taken[statement].append(value)
                if stage.in_order and statement in sums:  # each is the last one and a value more
                    sums[statement].add(value)
                    total = sums[statement].rounded(NUMPY[statement.value.dtype])
                    self.accumulated[statement.name] = total
                elif stage.in_order:
                    self.accumulate(statement, taken[statement])
        for statement, values in taken.items():
            self.accumulate(statement, values)

    def accumulate(self, statement: Accumulate, values: list[Scalar]) -> None:
        total = combined(statement.combine, values, statement.value.dtype)
        self.accumulated[statement.name] = total

    def put(self, statement: Store, place: int, value: Scalar) -> None:
        if statement.combine is not None:
            before = self.load(statement.buffer, place)
            value = combined(statement.combine, [before, value], statement.value.dtype)
        self.store(statement.buffer, place, value)

    def store(self, buffer: Buffer, place: int, value: Scalar) -> None:
        self.check(buffer, place)
        rounded = bf16_bits(value) if buffer.dtype is DType.BF16 else NUMPY[buffer.dtype](value)
        if buffer.is_scratch:
            self.scratch[buffer, place] = rounded
        else:
            self.arrays[buffer.name][place] = rounded

    def load(self, buffer: Buffer, place: int) -> Scalar:
        self.check(buffer, place)
        if not buffer.is_scratch:
            stored = self.arrays[buffer.name][place]
        elif (buffer, place) in self.scratch:
            stored = self.scratch[buffer, place]
        else:
            raise LookupError(f"{buffer.name}[{place}] is loaded before it is stored")
        if buffer.dtype is DType.BF16:
            return bf16_value(stored)
        return NUMPY[buffer.dtype.computed_in](stored)

    def check(self, buffer: Buffer, place: int) -> None:
        if buffer not in self.lengths:
            self.lengths[buffer] = self.index(buffer.size, {})
        if not 0 <= place < self.lengths[buffer]:
            at = {axis.name: value for axis, value in self.axes.items()}
            raise IndexError(f"{buffer.name}[{place}] is out of bounds at {at}")

    def value(self, expr: Expr, known: dict[Expr, Scalar]) -> Scalar:
        if expr not in known:
            known[expr] = self.computed(expr, known)
        return known[expr]

    def computed(self, expr: Expr, known: dict[Expr, Scalar]) -> Scalar:
        match expr:
            case Const():
                return NUMPY[expr.dtype](expr.value)
            case Load():
                return self.load(expr.buffer, self.index(expr.index, known))
            case IndexValue():
                return convert(np.int64(self.index(expr.index, known)), expr.dtype)
            case Accumulated():
                return self.accumulated[expr.name]
            case Cast():
                return convert(self.value(expr.value, known), expr.dtype)
            case Apply():
                args = [self.value(arg, known) for arg in expr.args]
                return PRIMS[expr.prim](*args)
            case Within():
                place, limit = self.index(expr.index, known), self.index(expr.limit, known)
                return self.value(expr.inside if 0 <= place < limit else expr.outside, known)
        raise AssertionError(f"{type(expr).__name__} has no meaning here")

    def index(self, index: Index, known: dict[Expr, Scalar]) -> int:
        total = 0
        for product, factor in index.terms:
            for atom in product:
                factor *= self.atom(atom, known)
            total += factor
        return total

    def atom(self, atom: object, known: dict[Expr, Scalar]) -> int:
        match atom:
            case Axis():
                return self.axes[atom]
            case Symbol():
                return self.sizes[atom.name]
            case Quotient():
                return self.index(atom.value, known) // self.index(atom.by, known)
            case Remainder():
                return self.index(atom.value, known) % self.index(atom.by, known)
            case Clamped():
                most = min(self.index(atom.value, known), self.index(atom.high, known))
                return max(self.index(atom.low, known), most)
            case Element():
                return int(self.value(atom.expr, known))
        raise AssertionError(f"{atom} is no index")


# --- conversion ---


def convert(value: Scalar, dtype: DType) -> Scalar:
    """A scalar in another type, as eager converts it."""
    kind = NUMPY[dtype]
    if dtype is DType.BOOL:
        return np.bool_(value != 0)
    if isinstance(value, np.floating) and not dtype.is_float:
        return wrapped(_truncated(value, dtype), kind)
    if dtype.is_float:
        return kind(value)
    return wrapped(int(value), kind)


def _truncated(value: Scalar, dtype: DType) -> int:
    """The whole part, if the integer type that x86 converts to holds it; else its least number."""
    least = -(2**63) if dtype in (DType.I64, DType.U8) else -(2**31)
    if not math.isfinite(value) or not least <= math.trunc(float(value)) < -least:
        return least
    return math.trunc(float(value))


def wrapped(value: int, kind: Any) -> Scalar:
    """An integer of any size in a type of fixed width."""
    bits = np.iinfo(kind).bits
    low = value & (1 << bits) - 1
    if np.iinfo(kind).min < 0 and low >> bits - 1:
        low -= 1 << bits
    return kind(low)


# --- accumulation ---


def combined(combine: Combine, values: list[Scalar], dtype: DType) -> Scalar:
    """All values that one accumulator took in."""
    kind = NUMPY[dtype]
    match combine:
        case Combine.SUM:
            return exact_sum(values, kind) if dtype.is_float else wrapped(_sum(values), kind)
        case Combine.PROD:
            return exact_product(values, kind) if dtype.is_float else wrapped(_prod(values), kind)
        case Combine.ANY:
            return np.bool_(any(values))
        case Combine.ALL:
            return np.bool_(all(values))
        case Combine.MAX | Combine.MIN:
            choose = maximum if combine is Combine.MAX else minimum
            total = _extreme(dtype, kind, least=combine is Combine.MAX)
            for value in values:
                total = choose(total, value)
            return total


def _sum(values: list[Scalar]) -> int:
    return sum(int(value) for value in values)


def _prod(values: list[Scalar]) -> int:
    return math.prod(int(value) for value in values)


@dataclass
class ExactSum:
    """A sum of floats that grows, and is rounded where it is read."""

    finite: Fraction = Fraction()
    special: float = 0.0  # infinite or NaN, if a value was

    def add(self, value: Scalar) -> None:
        if math.isfinite(value):
            self.finite += Fraction(float(value))
        else:
            self.special += float(value)

    def rounded(self, kind: Any) -> Scalar:
        return kind(self.special) if self.special != 0 else _rounded_to(self.finite, kind)


def exact_sum(values: list[Scalar], kind: Any) -> Scalar:
    """The sum of floats, rounded once."""
    total = ExactSum()
    for value in values:
        total.add(value)
    return total.rounded(kind)


def exact_product(values: list[Scalar], kind: Any) -> Scalar:
    """The product of floats, rounded once, however large the parts of it are."""
    sign = math.prod(math.copysign(1.0, value) for value in values)
    sizes = [abs(float(value)) for value in values]
    if any(math.isnan(size) for size in sizes) or (0.0 in sizes and math.inf in sizes):
        return kind(math.nan)
    if math.inf in sizes:
        return kind(sign * math.inf)
    return kind(sign) * _rounded_to(
        math.prod((Fraction(size) for size in sizes), start=Fraction(1)), kind
    )


def _rounded(exact: Fraction) -> float:
    """The nearest f64."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _rounded_to(exact: Fraction, kind: Any) -> Scalar:
    """The nearest number of a float type; rounding to odd first makes rounding twice right."""
    near = _rounded(exact)
    if kind is np.float32 and math.isfinite(near) and Fraction(near) != exact:
        toward = math.inf if Fraction(near) < exact else -math.inf
        if int(np.float64(near).view(np.int64)) % 2 == 0:
            near = math.nextafter(near, toward)
    return kind(near)


def _extreme(dtype: DType, kind: Any, *, least: bool) -> Scalar:
    if dtype.is_float:
        return kind(-math.inf if least else math.inf)
    if dtype is DType.BOOL:
        return np.bool_(not least)
    limits = np.iinfo(kind)
    return kind(limits.min if least else limits.max)


# --- primitives ---


def maximum(x: Scalar, y: Scalar) -> Scalar:
    """The larger one; NaN if one of them is."""
    return x if x != x or x > y else y


def minimum(x: Scalar, y: Scalar) -> Scalar:
    """The smaller one; NaN if one of them is."""
    return x if x != x or x < y else y


def _arithmetic(
    on_integers: Callable[..., int], on_floats: Callable[..., Any]
) -> Callable[..., Any]:
    """On integers: computed without limits, then wrapped."""

    def apply(*args: Scalar) -> Scalar:
        if isinstance(args[0], np.floating):
            return type(args[0])(on_floats(*args))
        return wrapped(on_integers(*(int(arg) for arg in args)), type(args[0]))

    return apply


def _divided(x: int, y: int) -> int:
    """Toward zero; by zero gives 0."""
    if y == 0:
        return 0
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _remainder(x: int, y: int) -> int:
    return x - _divided(x, y) * y if y else 0


def _shifted_left(x: Scalar, count: Scalar) -> Scalar:
    bits = np.iinfo(type(x)).bits
    return wrapped(int(x) << int(count) if 0 <= count < bits else 0, type(x))


def _shifted_right(x: Scalar, count: Scalar) -> Scalar:
    bits = np.iinfo(type(x)).bits
    return type(x)(int(x) >> (int(count) if 0 <= count < bits else bits))


def _fused_multiply_add(x: Scalar, y: Scalar, z: Scalar) -> Scalar:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y + z
    if not math.isfinite(z):  # even if x * y overflows
        return z
    product = Fraction(float(x)) * Fraction(float(y))
    exact = product + Fraction(float(z))
    if exact == 0:
        return x * y + z if product == 0 else type(x)(0.0)
    return _rounded_to(exact, type(x))


def _power(x: Scalar, y: Scalar) -> float:
    """C's pow.  numpy's takes the square root where y is 0.5, so it differs at -0.0 and -inf."""
    try:
        return math.pow(x, y)
    except (OverflowError, ValueError):
        if x < 0 and math.isfinite(y) and not float(y).is_integer():
            return math.nan
        is_odd = math.fmod(y, 2) != 0 and float(y).is_integer()
        return math.copysign(math.inf, x) if is_odd else math.inf


def _through_f64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computed in f64, then rounded: for f32, as good as exact."""
    return lambda *args: type(args[0])(function(*(np.float64(arg) for arg in args)))


def _random_word(function: Callable[..., int]) -> Callable[..., Any]:
    def draw(*args: Scalar) -> Scalar:
        return wrapped(function(*(int(arg) & 0xFFFFFFFF for arg in args)), np.int32)

    return draw


PRIMS: Final[dict[Prim, Callable[..., Any]]] = {
    Prim.ADD: _arithmetic(operator.add, operator.add),
    Prim.SUB: _arithmetic(operator.sub, operator.sub),
    Prim.MUL: _arithmetic(operator.mul, operator.mul),
    Prim.NEG: _arithmetic(operator.neg, operator.neg),
    Prim.ABS: _arithmetic(abs, abs),
    Prim.DIV: _arithmetic(_divided, operator.truediv),
    Prim.MOD: _arithmetic(_remainder, np.fmod),
    Prim.MIN: minimum,
    Prim.MAX: maximum,
    Prim.EQ: lambda x, y: np.bool_(x == y),
    Prim.NE: lambda x, y: np.bool_(x != y),
    Prim.LT: lambda x, y: np.bool_(x < y),
    Prim.LE: lambda x, y: np.bool_(x <= y),
    Prim.GT: lambda x, y: np.bool_(x > y),
    Prim.GE: lambda x, y: np.bool_(x >= y),
    Prim.IS_NAN: lambda x: np.bool_(x != x),
    Prim.AND: operator.and_,
    Prim.OR: operator.or_,
    Prim.XOR: operator.xor,
    Prim.NOT: np.invert,
    Prim.SHL: _shifted_left,
    Prim.SHR: _shifted_right,
    Prim.WHERE: lambda condition, x, y: x if condition else y,
    Prim.SQRT: np.sqrt,
    Prim.FLOOR: np.floor,
    Prim.CEIL: np.ceil,
    Prim.TRUNC: np.trunc,
    Prim.ROUND: np.rint,
    Prim.COPYSIGN: np.copysign,
    Prim.TO_F16: lambda x: np.float32(np.float16(x)),
    Prim.TO_BF16: lambda x: bf16_value(int(bf16_bits(x))),
    Prim.FMA: _fused_multiply_add,
    Prim.EXP: _through_f64(np.exp),
    Prim.EXP2: _through_f64(np.exp2),
    Prim.EXPM1: _through_f64(np.expm1),
    Prim.LOG: _through_f64(np.log),
    Prim.LOG2: _through_f64(np.log2),
    Prim.LOG10: _through_f64(np.log10),
    Prim.LOG1P: _through_f64(np.log1p),
    Prim.SIN: _through_f64(np.sin),
    Prim.COS: _through_f64(np.cos),
    Prim.TAN: _through_f64(np.tan),
    Prim.ASIN: _through_f64(np.arcsin),
    Prim.ACOS: _through_f64(np.arccos),
    Prim.ATAN: _through_f64(np.arctan),
    Prim.ATAN2: _through_f64(np.arctan2),
    Prim.SINH: _through_f64(np.sinh),
    Prim.COSH: _through_f64(np.cosh),
    Prim.TANH: _through_f64(np.tanh),
    Prim.ASINH: _through_f64(np.arcsinh),
    Prim.ACOSH: _through_f64(np.arccosh),
    Prim.ATANH: _through_f64(np.arctanh),
    Prim.ERF: _through_f64(math.erf),
    Prim.ERFC: _through_f64(math.erfc),
    Prim.NORMAL_CDF: _through_f64(lambda x: 0.5 * math.erfc(-x * math.sqrt(0.5))),
    Prim.POW: _through_f64(_power),
    Prim.HYPOT: _through_f64(np.hypot),
    Prim.THREEFRY_0: _random_word(lambda a, b, c, d: threefry((a, b), (c, d))[0]),
    Prim.THREEFRY_1: _random_word(lambda a, b, c, d: threefry((a, b), (c, d))[1]),
    Prim.THREEFRY_ONE: _random_word(lambda a, b, c, d: threefry_one((a, b), (c, d))),
    Prim.PHILOX_ONE: _random_word(lambda a, b, c, d, e: philox_one((a, b), c, (d, e))),
}
