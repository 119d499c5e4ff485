"""Scalar expressions evaluated over whole tensors: every primitive as torch computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stator.core.dtypes import TORCH_DTYPES, DType
from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Apply, Buffer, Cast, Const, Expr, Load
from stator.loops.philox import philox_one
from stator.loops.prims import Prim
from stator.loops.threefry import Words, threefry, threefry_one
from stator.ops.table import Pointwise, Promotion

TO_TORCH: Final = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Floats: true division; integers: toward zero, by zero gives 0."""
    if x.is_floating_point():
        return x / y
    quotient = torch.div(x, torch.where(y == 0, 1, y), rounding_mode="trunc")
    return torch.where(y == 0, 0, quotient)


def by_numpy(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """For where torch's vector code errs: the remainder of huge quotients, log1p of subnormals."""

    def compute(*args: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(*(arg.numpy() for arg in args))))

    return compute


def remainder(x: Tensor, y: Tensor) -> Tensor:
    """With the sign of the dividend."""
    return by_numpy(np.fmod)(x, y) if x.is_floating_point() else torch.fmod(x, y)


def fused_multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z in numpy's widest type: rounded twice, but the first time far below."""
    wide = [tensor.numpy().astype(np.longdouble) for tensor in (x, y, z)]
    with np.errstate(all="ignore"):
        total = wide[0] * wide[1] + wide[2]
        return torch.from_numpy(np.asarray(total).astype(np.float64)).to(x.dtype)


def _pairs(words: Sequence[Tensor]) -> tuple[Words, Words]:
    """A key and a counter, in 64-bit integers."""
    wide = [word.to(torch.int64) & 0xFFFFFFFF for word in words]
    return (wide[0], wide[1]), (wide[2], wide[3])


def random_words(*words: Tensor) -> tuple[Tensor, Tensor]:
    """Both words of a key (the first two) and a counter (the last two)."""
    first, second = threefry(*_pairs(words))
    return first.to(torch.int32), second.to(torch.int32)


def philox_word(*words: Tensor) -> Tensor:
    """The word of a key (the first two), a stream and a number (the last two)."""
    wide = [word.to(torch.int64) & 0xFFFFFFFF for word in words]
    word: Tensor = philox_one((wide[0], wide[1]), wide[2], (wide[3], wide[4]))
    return word.to(torch.int32)


EVALUATE: Final[Mapping[Prim, Callable[..., Tensor]]] = {
    Prim.ADD: torch.add,
    Prim.SUB: torch.sub,
    Prim.MUL: torch.mul,
    Prim.NEG: torch.neg,
    Prim.ABS: torch.abs,
    Prim.DIV: divide,
    Prim.MOD: remainder,
    Prim.MIN: torch.minimum,
    Prim.MAX: torch.maximum,
    Prim.EQ: torch.eq,
    Prim.NE: torch.ne,
    Prim.LT: torch.lt,
    Prim.LE: torch.le,
    Prim.GT: torch.gt,
    Prim.GE: torch.ge,
    Prim.IS_NAN: torch.isnan,
    Prim.AND: torch.bitwise_and,
    Prim.OR: torch.bitwise_or,
    Prim.XOR: torch.bitwise_xor,
    Prim.NOT: torch.bitwise_not,
    Prim.SHL: torch.bitwise_left_shift,
    Prim.SHR: torch.bitwise_right_shift,
    Prim.WHERE: torch.where,
    Prim.SQRT: torch.sqrt,
    Prim.FLOOR: torch.floor,
    Prim.CEIL: torch.ceil,
    Prim.TRUNC: torch.trunc,
    Prim.ROUND: torch.round,
    Prim.COPYSIGN: torch.copysign,
    Prim.TO_F16: lambda x: x.half().to(x.dtype),
    Prim.TO_BF16: lambda x: x.bfloat16().to(x.dtype),
    Prim.FMA: fused_multiply_add,
    Prim.EXP: torch.exp,
    Prim.EXP2: torch.exp2,
    Prim.EXPM1: torch.expm1,
    Prim.LOG: torch.log,
    Prim.LOG2: torch.log2,
    Prim.LOG10: torch.log10,
    Prim.LOG1P: by_numpy(np.log1p),
    Prim.SIN: torch.sin,
    Prim.COS: torch.cos,
    Prim.TAN: torch.tan,
    Prim.ASIN: torch.asin,
    Prim.ACOS: torch.acos,
    Prim.ATAN: torch.atan,
    Prim.ATAN2: torch.atan2,
    Prim.SINH: torch.sinh,
    Prim.COSH: torch.cosh,
    Prim.TANH: torch.tanh,
    Prim.ASINH: torch.asinh,
    Prim.ACOSH: torch.acosh,
    Prim.ATANH: torch.atanh,
    Prim.ERF: torch.erf,
    Prim.ERFC: torch.erfc,
    Prim.NORMAL_CDF: lambda x: 0.5 * torch.erfc(x * -(0.5**0.5)),
    Prim.POW: torch.pow,
    Prim.HYPOT: torch.hypot,
    Prim.THREEFRY_0: lambda *words: random_words(*words)[0],
    Prim.THREEFRY_1: lambda *words: random_words(*words)[1],
    Prim.THREEFRY_ONE: lambda *words: threefry_one(*_pairs(words)).to(torch.int32),
    Prim.PHILOX_ONE: philox_word,
}


def number(value: int | float | bool, kind: torch.dtype) -> Tensor:
    """A number in a type; an integer beyond the type wraps, as eager's do."""
    wide = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return wide.to(kind)


def evaluate(expr: Expr, tensors: Mapping[Buffer, Tensor]) -> Tensor:
    """The value of `expr` where a load from a buffer stands for the buffer's whole tensor."""
    known: dict[Expr, Tensor] = {}

    def value(node: Expr) -> Tensor:
        if node not in known:
            known[node] = compute(node)
        return known[node]

    def compute(node: Expr) -> Tensor:
        kind = TO_TORCH[node.dtype]
        match node:
            case Const():
                return number(node.value, kind)
            case Load():
                return tensors[node.buffer].to(kind)
            case Cast():
                return value(node.value).to(kind)
            case Apply():
                args = [value(arg) for arg in node.args]
                result = EVALUATE[node.prim](*args)
                assert result.dtype is kind, f"{node.prim}: {result.dtype}, declared {node.dtype!r}"
                return result
        raise TypeError(f"{type(node).__name__} stands in no formula")

    return value(expr)


@dataclass(frozen=True)
class Formula:
    """What lowering makes of one call: an expression, and the tensors that it loads."""

    expr: Expr
    tensors: Mapping[Buffer, Tensor]
    like: Tensor  # has the dtype and size of the result

    def run(self) -> Tensor:
        """The result."""
        value = evaluate(self.expr, self.tensors)
        return value.to(self.like.dtype).expand(self.like.shape)


def lowered(
    entry: Pointwise, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor
) -> Formula:
    """Give the operator's formula its arguments in the types that its promotion says."""
    tensors: dict[Buffer, Tensor] = {}
    kind = computed_in(entry, args, like)

    def given(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            own = TORCH_DTYPES[arg.dtype]
            buffer = Buffer(f"arg{len(tensors)}", own, Index.of(arg.numel()))
            tensors[buffer] = arg
            loaded = Load(own.computed_in, buffer, Index.of(0))
            return loaded if kind is None else cast(loaded, kind.computed_in)
        if entry.promotion is Promotion.INPUTS and isinstance(arg, int | float):
            assert kind is not None, "INPUTS always names a type"
            return number(arg, TO_TORCH[kind]).item()  # compared in the type of the tensors
        if entry.promotion is Promotion.ROUNDED and isinstance(arg, float):
            return number(arg, like.dtype).item() if like.is_floating_point() else arg
        return arg

    expr = entry.body(Body(), *map(given, args), **{k: given(v) for k, v in kwargs.items()})
    return Formula(cast(expr, TORCH_DTYPES[like.dtype].computed_in), tensors, like)


def computed_in(entry: Pointwise, args: tuple[Any, ...], like: Tensor) -> DType | None:
    """The type that tensors arrive in; None where each keeps its own."""
    if entry.promotion in (Promotion.RESULT, Promotion.ROUNDED):
        return TORCH_DTYPES[like.dtype]
    if entry.promotion is Promotion.NONE:
        return None
    first, second = args if len(args) > 1 else (args[0], args[0])
    return TORCH_DTYPES[torch.result_type(first, second)]
