"""Which kernels run by columns: memory jumps along their rows and not across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.schedule.columns import LARGEST_SCRATCH, block_width, is_columnar, scratch_bytes
from tests.schedule.programs import gpu_kernels, scheduled

HEADER: Final = """
kernel k
  buffer x: f32[60]
  buffer y: f32[60]
  buffer n: i64[60]
  buffer out: f32[60]
  scratch e: f32[4]
"""


def kernel(body: str) -> Kernel:
    return parse(HEADER + body)


YES: Final = {
    "column sum": "outer i0: 5\n stage r: 4\n acc sum= x[i0 + 5*r]\n stage\n out[i0] = acc",
    "rows of columns": "outer i0: 3, i1: 5\n stage r: 4\n acc sum= x[20*i0 + i1 + 5*r]",
    "with a value of the row": "outer i0: 5\n stage r: 4\n acc sum= mul(x[i0 + 5*r], y[i0])",
    "with a value of the column": "outer i0: 5\n stage r: 4\n acc sum= x[i0 + 5*r]\n stage\n"
    " out[i0] = y[7*i0]",
    "softmax by columns": "outer i0: 5\n stage r: 4\n acc max= x[i0 + 5*r]\n stage r: 4\n"
    " e[r] = sub(x[i0 + 5*r], acc)\n total sum= e[r]\n stage r: 4\n"
    " out[i0 + 5*r] = div(e[r], total)",
}
NO: Final = {
    "row sum": "outer i0: 3\n stage r: 5\n acc sum= x[5*i0 + r]",
    "no outer axes": "stage r: 5\n acc sum= x[r]",
    "nothing accumulates": "outer i0: 5\n stage r: 4\n out[i0 + 5*r] = x[i0 + 5*r]",
    "no inner axes": "outer i0: 5\n stage\n out[i0] = x[i0]",
    "one load lies otherwise": "outer i0: 5\n stage r: 4\n acc sum= mul(x[i0 + 5*r], y[4*i0 + r])",
    "one store lies otherwise": "outer i0: 5\n stage r: 4\n acc sum= x[i0 + 5*r]\n stage r: 4\n"
    " out[4*i0 + r] = x[i0 + 5*r]",
    "every second column": "outer i0: 5\n stage r: 4\n acc sum= x[2*i0 + 10*r]",
    "gathered": "outer i0: 5\n stage r: 4\n acc sum= x[[n[i0 + 5*r]]]",
    "the row moves nothing": "outer i0: 5\n stage r: 4\n acc sum= x[i0]",
    "columns not last": "outer i0: 5, i1: 3\n stage r: 4\n acc sum= x[i0 + 5*r + 20*i1]",
}


@pytest.mark.parametrize("name", YES)
def test_rows_next_to_each_other_run_by_columns(name: str) -> None:
    assert is_columnar(kernel(YES[name]))


@pytest.mark.parametrize("name", NO)
def test_others_do_not(name: str) -> None:
    assert not is_columnar(kernel(NO[name]))


def softmax_of(length: int | str) -> Kernel:
    """Softmax over the first of two dimensions, each column keeping `length` elements."""
    total = 5 * length if isinstance(length, int) else f"5*{length}"
    return parse(f"""
kernel k
  buffer x: f32[{total}]
  buffer out: f32[{total}]
  scratch e: f32[{length}]
  outer i0: 5
  stage r: {length}
    e[r] = x[i0 + 5*r]
    acc sum= e[r]
  stage r: {length}
    out[i0 + 5*r] = div(e[r], acc)
""")


def test_a_block_keeps_its_scratch_for_every_column() -> None:
    assert scratch_bytes(softmax_of(10)) == 10 * 4 * block_width(softmax_of(10))


def test_too_much_scratch_for_a_block_is_left_to_rows() -> None:
    most = LARGEST_SCRATCH // block_width(softmax_of(10)) // 4

    assert is_columnar(softmax_of(most))
    assert not is_columnar(softmax_of(most + 1))


def test_scratch_of_unknown_size_counts_for_nothing() -> None:
    assert scratch_bytes(softmax_of("s0")) == 0
    assert is_columnar(softmax_of("s0"))


PROGRAMS: Final[dict[str, tuple[Callable[[Tensor], Any], bool]]] = {
    "sum over rows": (lambda x: x.sum(0), True),
    "sum over columns": (lambda x: x.sum(1), False),
    "softmax over rows": (lambda x: x.softmax(0), True),
    "softmax over columns": (lambda x: x.softmax(1), False),
    "transposed sum": (lambda x: x.t().sum(1), True),
    "running sum over rows": (lambda x: x.cumsum(0), True),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
def test_reductions_over_the_first_dimension_run_by_columns(name: str, symbolic: bool) -> None:
    fn, expected = PROGRAMS[name]

    assert is_columnar(scheduled(fn, torch.empty(24, 40), symbolic=symbolic).only) == expected


def _norm_backward(mask: Tensor, a: Tensor, b: Tensor, x: Tensor, mean: Tensor) -> Any:
    """What stands before a batch norm in the backward of a residual block: a relu and two sums."""
    grad = torch.where(mask, 0.0, a + b)
    centered = x - mean.view(1, -1, 1, 1)
    return grad, grad.sum((0, 2, 3)), (grad * centered).sum((0, 2, 3))


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        # A piece of the sums is an image, so the sum of gradients is stored in passing.
        ((128, 512, 28, 28), ["where", "_sum1", "_sum3"]),
        ((64, 1024, 14, 14), ["where", "_sum1", "_sum3"]),
        # Pieces of 64 positions, which are no whole rows, and of 66, the last of them shorter.
        ((8, 64, 28, 28), ["_sum1", "_sum3"]),
        ((8, 64, 14, 14), ["_sum1", "_sum3"]),
    ],
)
def test_sums_by_channels_that_lie_last_run_by_columns(
    size: tuple[int, ...], stored: list[str]
) -> None:
    def image(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, memory_format=torch.channels_last)

    given = image(torch.bool), image(), image(), image(), torch.empty(size[1])
    kernels = gpu_kernels(_norm_backward, *given)
    sums = [kernel for kernel in kernels if any(stage.inner for stage in kernel.stages)]
    text = "".join(map(to_text, kernels))

    assert [buffer.name for buffer in sums[0].written] == stored
    assert all(is_columnar(kernel) for kernel in sums)
    assert "//" not in text
    assert "%" not in text
