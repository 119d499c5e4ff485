"""Shapes that tuning chooses from: all compute the same, and compile."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from stator.codegen.triton.candidates import MOST, candidates
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import Shape, shape_of
from stator.loops import interp
from stator.loops.parse import parse
from stator.loops.text import to_text
from tests.codegen.triton.kernels import COLUMNS, OF_ANY_SIZE, TURNED, scan, softmax
from tests.codegen.triton.test_interpreted import is_for_a_gpu
from tests.codegen.triton.test_kernel import arrays
from tests.fuzz.arguments import overrun, with_margins
from tests.fuzz.cases import case_of, decisions_of
from tests.fuzz.compare import difference

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted

FLAT: Final = """
kernel flat
  buffer x: bf16[5003]
  buffer y: bf16[5003]
  outer i0: 5003
  stage
    y[i0] = mul(x[i0], normal_cdf(x[i0]))
"""

LONG: Final = """
kernel long
  buffer x: f32[20001]
  buffer y: f32[3]
  outer i0: 3
  stage i1: 6667
    acc0 sum= x[6667*i0 + i1]
  stage
    y[i0] = acc0
"""

TEXTS: Final = {
    "flat": FLAT,
    "tiles": TURNED,
    "short rows": softmax(70, 40),
    "rows": softmax(3, 1500),
    "long rows": LONG,
    "columns": COLUMNS,
    "scan": scan(2100),
    "of any size": OF_ANY_SIZE,
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_candidate_computes_the_same(name: str) -> None:
    kernel, sizes = parse(TEXTS[name]), {"s0": 70} if name == "of any size" else {}
    given = arrays(kernel, sizes)
    expected = {buffer: array.copy() for buffer, array in given.items()}
    interp.run(kernel, expected, sizes)

    for shape in candidates(kernel):
        actual, memory = with_margins({key: array.copy() for key, array in given.items()})
        places = [actual[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]
        interpreted(kernel, shape)(*places, *sizes.values(), 1)

        wrong = overrun(memory) or difference(kernel, actual, expected)
        assert wrong is None, f"{wrong}\n{shape}\n{to_text(kernel)}"


@pytest.mark.parametrize("shard", range(2))
def test_so_do_those_of_random_kernels(shard: int) -> None:
    from tests.fuzz.cases import Run

    tried = 0
    for number in range(shard, 60, 2):
        case = case_of(decisions_of(number))
        if not is_for_a_gpu(case.kernel):
            continue
        for shape in candidates(case.kernel):
            run = Run.of(case.kernel, case.seeds[0])
            interpreted(case.kernel, shape)(*run.line(case.kernel), 1)
            tried += 1

            assert run.failure(case.kernel) is None, f"{number}, {shape}\n{to_text(case.kernel)}"
    assert tried > 30


@pytest.mark.parametrize("name", TEXTS)
def test_the_first_is_the_model_s_and_there_are_others(name: str) -> None:
    kernel = parse(TEXTS[name])
    found = candidates(kernel)

    assert found[0] == shape_of(kernel)
    assert 3 <= len(set(found)) == len(found) <= MOST
    assert all(is_power(n) for s in found for n in (s.outer, s.inner, s.warps))


def is_power(number: int) -> bool:
    """Of two: Triton's blocks and warps are."""
    return number > 0 and number & (number - 1) == 0


def test_a_row_that_is_held_whole_is_tried_in_a_loop_and_the_other_way_round() -> None:
    short, long = (parse(softmax(300, columns)) for columns in (4096, 20000))

    def is_whole(shape: Shape, columns: int) -> bool:
        return shape.inner >= columns

    assert {is_whole(shape, 4096) for shape in candidates(short)} == {True, False}
    assert {is_whole(shape, 20000) for shape in candidates(long)} == {True, False}


def test_columns_are_tried_in_slender_blocks_too() -> None:
    assert min(shape.outer for shape in candidates(parse(COLUMNS))) < 16


def test_they_compile_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [parse(TEXTS[name]) for name in ("flat", "tiles", "rows", "columns")]
    written = [write_kernel(k, shape) for k in kernels for shape in candidates(k)]

    for cubin in compile_all(written, 90):
        assert cubin.code.startswith(b"\x7fELF")
        assert cubin.shared < 200 << 10
