"""Kernels in Triton's interpreter: on CPU tensors, without a GPU, slowly.

It runs the same source that is compiled elsewhere, program by program, on NumPy's arrays.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import Shape, shape_of
from stator.codegen.triton.source import function_of
from stator.core.dtypes import TORCH_DTYPES
from stator.loops.index import Symbol
from stator.loops.ir import Kernel
from stator.lower.sizes import evaluate

_TORCH: Final = {ours: dtype for dtype, ours in TORCH_DTYPES.items()}


def interpreted(kernel: Kernel, shape: Shape | None = None) -> Callable[..., None]:
    """A function of addresses, sizes and threads that runs the kernel; `shape`: not the model's."""
    written = write_kernel(kernel, shape or shape_of(kernel))
    run = _triton().InterpretedFunction(function_of(written.name, written.source, _names()))
    buffers, symbols = arguments_of(kernel), symbols_of(kernel)

    def call(*given: int) -> None:
        sizes = given[len(buffers) : len(buffers) + len(symbols)]
        known: dict[Symbol, int] = dict(zip(symbols, sizes, strict=True))
        programs = evaluate(written.grid, known)
        if programs == 0:
            return
        memory = [_at(a, _TORCH[b.dtype]) for a, b in zip(given, buffers, strict=False)]
        with np.errstate(all="ignore"):
            run[(programs,)](*memory, *sizes)

    return call


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor at an address; how long it is nobody asks."""
    kind = torch.int8 if dtype is torch.bool else dtype
    return torch.frombuffer((ctypes.c_char * kind.itemsize).from_address(address), dtype=kind)


@cache
def _triton() -> Any:
    from triton.runtime import interpreter

    interpreter._convert_float = _converted(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_atomic_rmw = _dense(builder.create_atomic_rmw)
    builder.create_splat = _alike(builder.create_splat)
    # Each sum and product would be computed again in 64 bits, for an assertion that is switched
    # off: half of the time.  And 32 bits overflow on purpose, in random numbers.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    return interpreter


def _dense(own: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's atomic operation, which reads blocks as if each element had its place."""

    def combine(builder: Any, operation: Any, *blocks: Any) -> Any:
        for block in blocks[:3]:
            block.data = np.ascontiguousarray(block.data)
        return own(builder, operation, *blocks)

    return combine


def _alike(own: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's spreading of a number, which takes a comparison of floats for a float."""

    def spread(builder: Any, kind: Any, number: Any) -> Any:
        made = own(builder, kind, number)
        made.data = made.data.astype(number.data.dtype)
        return made

    return spread


def _converted(own: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion, which cuts f32 off where the hardware rounds to bf16.

    And what bf16 has below its normal numbers, it gives other values.
    """

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        match str(source), str(target):
            case "fp32", "bf16":
                rounded = torch.from_numpy(np.array(value, np.float32)).to(torch.bfloat16)
                return rounded.view(torch.uint16).numpy()
            case "bf16", "fp32":
                return value.astype(np.uint32) << 16
            case _:
                return own(value, source, target, rounding)

    return convert


@cache
def _names() -> Mapping[str, Any]:
    """What a kernel's source refers to."""
    import triton.language as tl

    from stator.codegen.triton import device

    own = {f.__name__: _triton().InterpretedFunction(f) for f in device.FUNCTIONS}
    own |= {"reduced": _reduced, "scanned": _scanned, "dotted": _dotted, "range": _range}
    return {"tl": tl, "libdevice": _Libdevice(), **own}


def _reduced(block: Any, axis: int, combine: Any, keep_dims: bool) -> Any:
    """Triton's reduction, of which the interpreter's own takes a Python call for each element."""
    found = _UFUNCS[combine.__name__].reduce(block.handle.data, axis=axis, keepdims=keep_dims)
    return _tensor(found.astype(block.handle.data.dtype), block.type.scalar)


def _scanned(block: Any, axis: int, combine: Any) -> Any:
    found = _UFUNCS[combine.__name__].accumulate(block.handle.data, axis=axis)
    return _tensor(found.astype(block.handle.data.dtype), block.type.scalar)


def _dotted(left: Any, right: Any, total: Any) -> Any:
    """Triton's product, of which the interpreter's own takes the bits of bf16 for integers."""
    import triton.language as tl

    one, other = (block.to(tl.float32).handle.data for block in (left, right))
    return _tensor(np.matmul(one, other) + total.handle.data, total.type.scalar)


def _tensor(data: Any, kind: Any) -> Any:
    import triton.language as tl

    shape = [tl.constexpr(n) for n in data.shape]
    made = tl.block_type(kind, shape) if shape else kind
    return tl.tensor(_triton().TensorHandle(data, kind), made)


def _range(*bounds: Any) -> range:
    """Numbers of a kernel are arrays of one element, which NumPy does not take for a number."""
    return range(*(b.handle.data.item() if hasattr(b, "handle") else int(b) for b in bounds))


class _Libdevice:
    """NVIDIA's mathematical functions, by NumPy's and Python's."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _NUMPY.get(name) or np.vectorize(getattr(math, name))

        def apply(*args: Any) -> Any:
            arrays = np.broadcast_arrays(*(arg.handle.data for arg in args))
            found = np.asarray(function(*arrays)).astype(arrays[0].dtype)
            return _tensor(found, args[0].type.scalar)

        return apply


_UFUNCS: Final[Mapping[str, np.ufunc]] = {
    "add": np.add,
    "multiply": np.multiply,
    "larger": np.maximum,
    "larger_or_nan": np.maximum,
    "smaller": np.minimum,
    "smaller_or_nan": np.minimum,
}
_NUMPY: Final[Mapping[str, Callable[..., Any]]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "normcdf": lambda x: np.vectorize(math.erfc)(-x.astype(np.float64) / math.sqrt(2)) / 2,
    "pow": lambda x, y: np.power(x, y),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
