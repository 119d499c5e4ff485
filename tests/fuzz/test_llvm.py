"""Random kernels: what LLVM makes of them against the interpreter."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stator.codegen.llvm import jit
from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.loops import interp
from stator.loops.ir import Kernel
from tests.fuzz.kernels import difference, inputs, kernels

EXAMPLES = 200


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(kernel=kernels(), seed=st.integers(0, 1 << 30), threads=st.sampled_from([1, 2]))
def test_machine_code_agrees_with_the_interpreter(kernel: Kernel, seed: int, threads: int) -> None:
    arguments, sizes = inputs(kernel, seed)
    expected = {name: array.copy() for name, array in arguments.items()}
    interp.run(kernel, expected, sizes)

    module = jit.load([kernel])
    given_buffers = [arguments[buffer.name].ctypes.data for buffer in arguments_of(kernel)]
    given_sizes = [sizes[symbol.name] for symbol in symbols_of(kernel)]
    module.entries[kernel.name](*given_buffers, *given_sizes, threads)

    assert difference(kernel, arguments, expected) is None
