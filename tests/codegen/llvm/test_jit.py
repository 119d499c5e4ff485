"""What compiles is kept between modules, and no module shows in the next one's code."""

from __future__ import annotations

from collections import defaultdict

import pytest

from stator.codegen.llvm import jit
from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import load_object
from tests.fuzz.cases import case_of, decisions_of


@pytest.fixture(autouse=True)
def _no_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_idle", defaultdict(list))


def test_a_machine_that_was_used_makes_the_same_code() -> None:
    kernels = [case_of(decisions_of(number)).kernel for number in range(12)]

    fresh = []
    for kernel in kernels:
        jit._idle.clear()
        fresh.append(jit.load([kernel]).data)

    jit._idle.clear()
    assert [jit.load([kernel]).data for kernel in kernels] == fresh
    assert [len(machines) for machines in jit._idle.values()] == [1]


def test_modules_at_the_same_time_have_machines_of_their_own() -> None:
    with jit._machine() as one, jit._machine() as two:
        assert one is not two

    with jit._machine() as again:
        assert again in (one, two)


def test_machines_for_other_processors_and_other_care_are_others() -> None:
    with jit._machine() as usual:
        pass
    with jit._machine(opt=0) as quick, jit._machine(processor="x86-64") as older:
        assert len({usual, quick, older}) == 3


def test_a_module_that_is_wrong_leaves_its_machine_behind_for_the_next() -> None:
    with pytest.raises(ZeroDivisionError), jit._machine() as machine:
        _ = 1 // 0

    with jit._machine() as again:
        assert again is machine


def test_equal_texts_are_compiled_once_and_loaded_each() -> None:
    text = "@x = global i64 3\ndefine ptr @f() { ret ptr @x }"

    one, two = jit.compile_text(text), jit.compile_text(text)

    assert one is two
    loaded = [load_object(data, library_function) for data in (one, two)]
    assert loaded[0].address("f") != loaded[1].address("f")
