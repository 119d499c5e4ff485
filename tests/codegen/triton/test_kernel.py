"""Kernels of every shape: right in the interpreter, and compiled for cards that are not here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stator.codegen.triton.kernel import source_of, write_kernel
from stator.codegen.triton.shape import shape_of
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from tests.codegen.llvm.execute import contents
from tests.codegen.triton.kernels import TEXTS
from tests.fuzz.arguments import Array, evaluate, overrun, with_margins
from tests.fuzz.compare import difference

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.loops import interp
from stator.loops.access import buffers


def arrays(kernel: Kernel, sizes: dict[str, int]) -> dict[str, Array]:
    """Random contents of every buffer."""
    random = np.random.default_rng(0)
    return {b.name: contents(b.dtype, evaluate(b.size, sizes), random) for b in buffers(kernel)}


@pytest.mark.parametrize("name", TEXTS)
def test_the_interpreter_agrees(name: str) -> None:
    if name in ("rows in several blocks", "scan in several blocks", "pointwise"):
        pytest.skip("too long for our own interpreter: whole programs check them")
    kernel, sizes = parse(TEXTS[name]), {"s0": 70} if name == "of any size" else {}
    given = arrays(kernel, sizes)
    expected = {buffer: array.copy() for buffer, array in given.items()}
    interp.run(kernel, expected, sizes)
    actual, memory = with_margins(given)

    places = [actual[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]
    interpreted(kernel)(*places, *sizes.values(), 1)

    wrong = overrun(memory) or difference(kernel, actual, expected)
    assert wrong is None, f"{wrong}\n{to_text(kernel)}"


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_cards(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [parse(text) for text in TEXTS.values()]

    made = compile_all([write_kernel(kernel, shape_of(kernel)) for kernel in kernels], capability)

    for cubin in made:
        assert cubin.code.startswith(b"\x7fELF")
        assert cubin.shared < 100 << 10


@pytest.mark.parametrize("capability", [75, 86, 89, 100, 120])
def test_they_compile_for_older_and_newer_cards(capability: int) -> None:
    kernels = [parse(TEXTS[name]) for name in ("pointwise", "rows", "columns")]

    made = compile_all([write_kernel(kernel, shape_of(kernel)) for kernel in kernels], capability)

    assert all(cubin.code.startswith(b"\x7fELF") for cubin in made)


def test_threads_move_as_much_as_they_can_at_once() -> None:
    kernel = parse(TEXTS["pointwise"].replace("100003", "1048576"))
    shape = shape_of(kernel)

    each = shape.outer // (32 * shape.warps)

    assert each * 2 % 16 == 0  # bf16, in accesses of 16 bytes


def test_a_long_row_is_read_once_for_softmax() -> None:
    short, long = (
        write_kernel(k, shape_of(k))
        for k in map(parse, (TEXTS["rows"], TEXTS["rows in several blocks"]))
    )

    assert short.source.count("tl.load") == 1  # held in registers
    assert "tops_" in long.source
    assert long.source.count("for r_") == 2  # the pass over the row, and that which stores


def test_a_long_row_is_read_once_where_its_largest_is_stored_too() -> None:
    """A loss keeps both totals for its backward; the first store stands between the stages."""
    kernel = parse(
        """
kernel totals
  buffer x: f32[60000]
  buffer largest: f32[2]
  buffer total: f32[2]
  outer i0: 2
  stage i1: 30000
    acc0 max= x[30000*i0 + i1]
  stage
    largest[i0] = acc0
  stage i2: 30000
    acc1 sum= exp(sub(x[30000*i0 + i2], acc0))
  stage
    total[i0] = acc1
"""
    )
    written = write_kernel(kernel, shape_of(kernel))
    x = np.random.default_rng(0).normal(size=60000).astype(np.float32)
    largest, total = np.zeros(2, np.float32), np.zeros(2, np.float32)
    memory = {"x": x, "largest": largest, "total": total}

    places = [memory[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]
    interpreted(kernel)(*places, 1)

    assert written.source.count("for r_") == 1
    rows = x.reshape(2, -1).astype(np.float64)
    np.testing.assert_array_equal(largest, rows.max(1).astype(np.float32))
    np.testing.assert_allclose(total, np.exp(rows - rows.max(1)[:, None]).sum(1), rtol=1e-5)


def test_what_is_stored_over_is_read_before_behind_choices_too() -> None:
    """As relu(y) in the memory of y, beside cat([y[:2], x[2:]])."""
    kernel = parse(
        """
kernel over
  buffer new: f32[8]
  buffer old: f32[8]
  buffer x: f32[8]
  buffer joined: f32[8]
  shares new: old
  outer i0: 8
  stage
    new[i0] = neg(old[i0])
    joined[i0] = within(i0, 2, old[i0], x[i0])
"""
    )
    place, x, joined = np.arange(8.0, dtype=np.float32), np.ones(8, np.float32), np.empty(8, "f4")
    memory = {"new": place, "x": x, "joined": joined}

    interpreted(kernel)(*(memory[b.name].ctypes.data for b in (*kernel.written, *kernel.read)), 1)

    np.testing.assert_array_equal(place, -np.arange(8))
    np.testing.assert_array_equal(joined, [0, 1, 1, 1, 1, 1, 1, 1])


REVERSED = """
kernel k
  buffer old: f32[512]
  buffer new: f32[512]
  shares new: old
  outer i0: 4
  stage i1: 128
    acc sum= mul(old[128*i0 - i1 + 127], old[128*i0 + i1])
  stage i2: 128
    new[128*i0 + i2] = sub(old[128*i0 + i2], acc)
"""


def test_threads_wait_for_those_that_read_elsewhere_what_they_store_over() -> None:
    plain = REVERSED.replace("128*i0 - i1 + 127", "128*i0 + i1")

    assert "debug_barrier" in source_of(parse(REVERSED))
    assert "debug_barrier" not in source_of(parse(plain)), "each stores where it read"
    assert "debug_barrier" not in source_of(parse(REVERSED.replace("  shares new: old\n", "")))


def test_what_is_compiled_is_named_after_its_content() -> None:
    one, other = (parse(TEXTS[name]) for name in ("columns", "turned"))

    names = [write_kernel(k, shape_of(k)).name for k in (one, one, other)]

    assert names[0] == names[1] != names[2]
