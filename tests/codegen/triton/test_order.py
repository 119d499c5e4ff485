"""Threads wait where one might store over what another has yet to read, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from stator.codegen.triton import translate as translation
from stator.codegen.triton.candidates import candidates
from stator.codegen.triton.kernel import Written, write_kernel
from stator.codegen.triton.shape import WARP, shape_of
from stator.codegen.triton.translate import Request, translate
from stator.loops.parse import parse

triton = pytest.importorskip("triton")

BARRIER: Final = "tl.debug_barrier()"

# Kernels whose threads store what they read themselves.
FREE: Final = {
    "one element": """
kernel plain
  buffer n: f32[1000003]
  buffer x: f32[1000003]
  buffer g: f32[1000003]
  shares n: x
  outer i0: 1000003
  stage
    n[i0] = sub(x[i0], g[i0])
""",
    "a bias": """
kernel bias
  buffer n: bf16[768000]
  buffer x: bf16[768000]
  buffer b: bf16[768]
  shares n: x
  outer i0: 1000, i1: 768
  stage
    n[768*i0 + i1] = add(x[768*i0 + i1], b[i1])
""",
    "every other element, and nothing else": """
kernel every_other
  buffer n: f32[1048576]
  buffer x: f32[1048576]
  shares n: x
  outer i0: 524288
  stage
    n[2*i0] = neg(x[2*i0])
""",
    "wider elements beside, where a block is small": """
kernel wider
  buffer n: f32[4096]
  buffer x: f32[4096]
  buffer y: f64[4096]
  shares n: x
  outer i0: 4096
  stage
    y[i0] = x[i0]
    n[i0] = neg(x[i0])
""",
    "squares": """
kernel squares
  buffer n: f32[1048576]
  buffer x: f32[1048576]
  buffer g: f32[1048576]
  shares n: x
  outer i0: 1024, i1: 1024
  stage
    n[1024*i0 + i1] = add(x[1024*i0 + i1], g[i0 + 1024*i1])
""",
    "rows that are held": """
kernel held
  buffer n: f32[2097152]
  buffer x: f32[2097152]
  shares n: x
  outer i0: 2048
  stage i1: 1024
    acc0 max= x[1024*i0 + i1]
  stage i2: 1024
    n[1024*i0 + i2] = sub(x[1024*i0 + i2], acc0)
""",
    "long rows that begin anywhere": """
kernel long
  buffer n: bf16[100514000]
  buffer x: bf16[100514000]
  buffer y: f32[2000]
  shares n: x
  outer i0: 2000
  stage i1: 50257
    n[50257*i0 + i1] = mul(x[50257*i0 + i1], y[i0])
""",
}

# Kernels in which a thread stores over what others read.
WAITING: Final = {
    "elements of two widths": """
kernel widths
  buffer n: f32[1048576]
  buffer x: f32[1048576]
  buffer g: bf16[1048576]
  shares n: x
  outer i0: 1048576
  stage
    n[i0] = sub(x[i0], g[i0])
""",
    "every other element": """
kernel strides
  buffer n: f32[1048576]
  buffer x: f32[1048576]
  buffer g: f32[524288]
  buffer y: f32[524288]
  shares n: x
  outer i0: 524288
  stage
    y[i0] = add(x[2*i0], g[i0])
    n[2*i0] = 0.0:f32
""",
    "rows that begin anywhere": """
kernel gaps
  buffer n: f32[1001000]
  buffer x: f32[1001000]
  buffer y: f32[1000000]
  shares n: x
  outer i0: 1000, i1: 1000
  stage
    y[1000*i0 + i1] = x[1001*i0 + i1]
    n[1001*i0 + i1] = 0.0:f32
""",
    "rows that lie side by side": """
kernel columns
  buffer n: f32[524288]
  buffer x: f32[524288]
  buffer g: f32[524288]
  buffer y: f32[524288]
  shares n: x
  outer i0: 512
  stage i1: 1024
    acc0 sum= g[1024*i0 + i1]
  stage i2: 1024
    y[1024*i0 + i2] = sub(x[i0 + 512*i2], acc0)
    n[i0 + 512*i2] = 0.0:f32
""",
    "one element a row": """
kernel first
  buffer n: f32[512]
  buffer m: f32[512]
  buffer x: f32[524288]
  buffer y: f32[524288]
  shares n: m
  outer i0: 512
  stage i1: 1024
    y[1024*i0 + i1] = add(x[1024*i0 + i1], m[i0])
  stage
    n[i0] = 0.0:f32
""",
    "one element of all": """
kernel counter
  buffer n: f32[1]
  buffer x: f32[1]
  shares n: x
  stage
    n[0] = add(x[0], 1.0:f32)
""",
}

# Blocks of the two loops are counted from other borders: threads have other elements.
READ_BEFORE: Final = """
kernel again
  buffer n: bf16[100514000]
  buffer x: bf16[100514000]
  buffer y: bf16[100516000]
  buffer g: bf16[100516000]
  shares n: x
  outer i0: 2000
  stage i1: 50257
    y[50258*i0 + i1] = mul(x[50257*i0 + i1], g[50258*i0 + i1])
  stage i2: 50257
    n[50257*i0 + i2] = 0.0:bf16
"""


@dataclass(frozen=True)
class Access:
    """A load or store of a block, as Triton's compiler has laid it out."""

    kind: str
    memory: str  # the parameter of the kernel
    layout: str
    elements: int


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A function that compiles for a card; what its threads do is returned as text."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made: list[Any] = []

    def through_its_cache(source: Any, target: Any, options: Any) -> tuple[bytes, Any]:
        made.append(triton.compile(source, target=target, options=options))
        return made[-1].asm["cubin"], made[-1].metadata._asdict()

    monkeypatch.setattr(translation, "_through_stages", through_its_cache)

    def compile_(w: Written, capability: int, *, aligned: bool = True) -> str:
        shape = w.shape.warps, w.shape.stages
        translate(Request(w.name, w.source, w.signature, *shape, capability, aligned))
        return str(made[-1].asm["ttgir"])

    return compile_


def accesses(text: str) -> list[Access]:
    """All of a kernel's, in order; a barrier is one of nothing."""
    layouts = dict(re.findall(r"^(#blocked\d*) = (.*)$", text, re.MULTILINE))
    made = dict(
        re.findall(
            r"(%\w+) = (?:tt\.splat|tt\.addptr|tt\.broadcast|ttg\.convert_layout) (%\w+)", text
        )
    )
    found = []
    for line in text.splitlines():
        if match := re.search(r"tt\.(load|store) (%\w+).* : (.*)$", line):
            kind, place, types = match.groups()
            while place in made:
                place = made[place]
            block = re.match(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", types)
            sizes, layout = block.groups() if block else ("1", "")
            elements = 1
            for size in sizes.split("x"):
                elements *= int(size)
            found.append(Access(kind, place, layouts.get(layout, ""), elements))
        elif "barrier" in line:
            found.append(Access("barrier", "", "", 0))
    return found


def races(w: Written, text: str) -> list[tuple[Access, Access]]:
    """Loads, and stores behind them that other threads may do, with no barrier between."""
    found, all_ = [], accesses(text)
    assert {access.kind for access in all_} >= {"load", "store"}, text
    for number, load in enumerate(all_):
        for store in all_[number + 1 :] if load.kind == "load" else ():
            if store.kind == "barrier":
                break
            is_alike = load.layout == store.layout and load.elements >= WARP * w.shape.warps
            if store.kind == "store" and store.memory == load.memory and not is_alike:
                found.append((load, store))
    return found


@pytest.mark.parametrize("name", FREE)
def test_a_thread_that_stores_over_what_it_read_waits_for_nobody(name: str, compiled: Any) -> None:
    kernel = parse(FREE[name])
    written = write_kernel(kernel, shape_of(kernel))

    assert BARRIER not in written.source
    assert races(written, compiled(written, 90)) == []


@pytest.mark.parametrize("name", WAITING)
def test_threads_wait_before_they_store_over_what_others_read(name: str, compiled: Any) -> None:
    kernel = parse(WAITING[name])
    written = write_kernel(kernel, shape_of(kernel))
    without = replace(written, source=written.source.replace(BARRIER, "pass"))

    assert written.source.count(BARRIER) == 1
    assert races(written, compiled(written, 90)) == []
    assert races(without, compiled(without, 90))


@pytest.mark.parametrize("name", [*FREE, *WAITING])
def test_nobody_is_early_in_other_shapes_or_at_odd_addresses(name: str, compiled: Any) -> None:
    kernel = parse((FREE | WAITING)[name])
    shapes = candidates(kernel)
    for shape, capability, aligned in (
        (shapes[0], 80, False),
        *((s, 80, True) for s in shapes[-2:]),
    ):
        written = write_kernel(kernel, shape)
        assert races(written, compiled(written, capability, aligned=aligned)) == [], shape


def test_threads_wait_once_behind_a_loop_that_reads_what_the_next_one_stores_over() -> None:
    kernel = parse(READ_BEFORE)
    source = write_kernel(kernel, shape_of(kernel)).source

    first, second = source.split(f"\n    {BARRIER}\n")
    assert source.count(BARRIER) == 1
    assert "tl.load(n" in first
    assert "tl.store(n" not in first
    assert "tl.load(n" not in second


def test_threads_wait_once_for_what_a_scan_has_stored() -> None:
    """Its running sums are read from memory; what is read of them twice was waited for once."""
    kernel = parse(
        """
kernel scanned
  buffer x: f64[700]
  buffer y: f64[700]
  buffer z: f64[700]
  buffer w: f64[700]
  outer i0: 7
  scan i1: 100
    acc0 sum= x[100*i0 + i1]
    y[100*i0 + i1] = acc0
  stage i2: 100
    z[100*i0 + i2] = y[100*i0 + 99 - i2]
  stage i3: 100
    w[100*i0 + i3] = add(y[100*i0 + 99 - i3], z[100*i0 + i3])
"""
    )

    source = write_kernel(kernel, shape_of(kernel)).source

    assert source.count(BARRIER) == 2  # for y, and then for z
