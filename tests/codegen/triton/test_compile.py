"""Kernels become machine code: by Triton's stages, here or in processes beside this one."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import shape_of
from stator.codegen.triton.translate import FIRST, Request, translate
from stator.errors import CompileError
from stator.loops.parse import parse
from tests.codegen.triton.kernels import TEXTS

pytest.importorskip("triton")


def named(name: str) -> Request:
    """The first kernel under another name."""
    return replace(FIRST, name=name, source=FIRST.source.replace("first", name), capability=90)


def test_the_stages_give_what_tritons_own_compile_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import triton

    from stator.codegen.triton import translate as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ours = translate(named("kernel"))

    def through_its_cache(source: Any, target: Any, options: Any) -> tuple[bytes, Any]:
        made = triton.compile(source, target=target, options=options)
        return made.asm["cubin"], made.metadata._asdict()

    monkeypatch.setattr(module, "_through_stages", through_its_cache)

    assert translate(named("kernel")) == ours
    assert ours.code.startswith(b"\x7fELF")


def test_nothing_is_left_in_tritons_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    translate(named("kernel"))

    assert not any(tmp_path.iterdir())


def test_workers_compile_what_this_process_would_without_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stator.codegen.triton.compile import workers

    requests = [named(f"kernel_{number}") for number in range(3)]
    made = workers().compile(requests)
    assert all(b".debug_line" in translate(request).code for request in requests)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")

    assert made == [translate(request) for request in requests]
    assert not any(b".debug_line" in cubin.code for cubin in made)


def test_a_worker_that_cannot_compile_a_kernel_goes_on() -> None:
    from stator.codegen.triton.compile import workers

    wrong = replace(named("wrong"), source="def wrong(a0, a1):\n    nonsense(a0)\n")

    assert workers().try_each([wrong, named("right")])[0] is None
    assert workers().try_each([named("right")])[0] is not None


def test_a_worker_that_dies_gets_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    from stator.codegen.triton import compile as module

    own = module.Workers(1)
    (first,) = own.processes
    own.compile([named("before")])
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(module, "translate", lambda request: translate(named("here")))

    collect = own.begin([named("lost"), named("next")])
    first.kill()  # while it has the first of them
    found = collect()
    (second,) = own.processes
    own.close()

    assert [cubin.name for cubin in found] == ["here", "next"]  # only what it died of is done here
    assert second is not first


def test_a_worker_that_nobody_asks_ends_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stator.codegen.triton import compile as module

    own = module.Workers(1, patience=0.0)
    (first,) = own.processes
    first.wait(timeout=60)
    own.patience = 60.0
    monkeypatch.setattr(module, "translate", lambda request: pytest.fail("done here"))

    (found,) = own.compile([named("late")])
    own.close()

    assert found.name == "late"
    assert first.returncode == 0


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from stator.codegen.triton import compile as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    kernel = parse(TEXTS["columns"])

    with pytest.raises(CompileError, match="Triton, which is not installed"):
        module.compile_all([write_kernel(kernel, shape_of(kernel))], 90)


def test_an_answer_that_nobody_understood_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stator.codegen.triton import compile as module

    own, load = module.Workers(1), pickle.load
    failures = [MemoryError()]

    def once_without_memory(stream: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(stream)

    monkeypatch.setattr(pickle, "load", once_without_memory)
    monkeypatch.setattr(module, "translate", lambda request: translate(named("here")))

    found = own.compile([named("lost"), named("next")])
    own.close()

    assert [cubin.name for cubin in found] == ["here", "next"]


def test_without_processes_kernels_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from stator.codegen.triton import compile as module

    def refuse(patience: float) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(module, "_started", refuse)
    own = module.Workers(2)
    monkeypatch.setattr(module, "translate", lambda request: translate(named("here")))

    found = own.compile([named("one"), named("other")])
    own.close()

    assert [cubin.name for cubin in found] == ["here", "here"]


def test_a_worker_outlives_an_interrupt() -> None:
    from stator.codegen.triton import compile as module

    own = module.Workers(1)
    (process,) = own.processes
    own.compile([named("before")])
    process.send_signal(signal.SIGINT)

    (found,) = own.compile([named("after")])
    own.close()

    assert found.name == "after"
    assert own.processes == [process]


FORKED = """
import os, sys
os.sched_getaffinity = lambda _: {0}
from stator.codegen.triton.compile import workers
from stator.codegen.triton.translate import FIRST
mine = workers()
child = os.fork()
if child == 0:
    sys.exit(7 if workers() is not mine and mine.processes != workers().processes else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
(process,) = mine.processes
assert mine.compile([FIRST])[0].name == "first"
assert mine.processes == [process] and process.poll() is None
"""


def test_a_forked_child_leaves_its_parents_workers_alone() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)
