"""Instructions that Triton has no name for, as functions that kernels call.

Each stands in for the function of device.py that goes by its name, which Triton's interpreter runs.
Triton's own `exp2` is NVIDIA's library, which takes longer to link than many a kernel to compile;
its division guards against what a divisor of 1 and more never is, in eight instructions.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201
import triton.language as tl


def power_of_two(x):
    """In one instruction."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


def reciprocal(x):
    """In one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


FUNCTIONS = (power_of_two, reciprocal)
