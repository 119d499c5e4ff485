"""Our own loader of object files: code runs, damage raises, loads share nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import torch

from stator.codegen.llvm.jit import compile_text
from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import Code, can_load, load_object
from stator.errors import CompileError
from stator.runtime.native import image as images
from stator.runtime.native.image import Image
from stator.runtime.native.prelude import prelude_text

pytestmark = pytest.mark.skipif(not can_load(), reason="for ELF on x86-64")

# Constants nearby, a counter, a table of addresses, calls inside, calls outside.
TEXT: Final = """
@count = internal global i64 40
@room = internal global [64 x i64] zeroinitializer, align 64
@numbers = internal constant [4 x double] [double 1.5, double -2.0, double 0.25, double 8.0]
@handlers = internal constant [2 x ptr] [ptr @add_one, ptr @add_ten]

declare i64 @labs(i64) nonlazybind

define internal i64 @add_one(i64 %x) noinline {
  %y = add i64 %x, 1
  ret i64 %y
}

define internal i64 @add_ten(i64 %x) noinline {
  %y = add i64 %x, 10
  ret i64 %y
}

define i64 @counted() {
  %old = load i64, ptr @count
  %new = call i64 @add_one(i64 %old)
  store i64 %new, ptr @count
  ret i64 %new
}

define double @number(i64 %i) {
  %at = getelementptr [4 x double], ptr @numbers, i64 0, i64 %i
  %x = load double, ptr %at
  %y = fmul double %x, 3.0
  ret double %y
}

define i64 @handled(i64 %i, i64 %x) {
  %at = getelementptr [2 x ptr], ptr @handlers, i64 0, i64 %i
  %handler = load ptr, ptr %at
  %y = call i64 %handler(i64 %x)
  ret i64 %y
}

define i64 @absolute(i64 %x) {
  %y = call i64 @labs(i64 %x)
  ret i64 %y
}

define i64 @twice(i64 %x) {
  %y = call i64 @absolute(i64 %x)
  %z = add i64 %y, %y
  ret i64 %z
}

define ptr @where_room() {
  ret ptr @room
}
"""

I64: Final = ctypes.c_int64


@cache
def object_file() -> bytes:
    return compile_text(TEXT)


def loaded(data: bytes | None = None) -> Code:
    return load_object(object_file() if data is None else data, library_function)


def function(code: Code, name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))


def call(code: Code, name: str, *values: int) -> int:
    return int(function(code, name, I64, *[I64] * len(values))(*values))


# The file, as much of it as the tests change


@dataclass(frozen=True)
class Row:
    """A row of the table of sections: where it stands, and what it says."""

    at: int
    kind: int
    flags: int
    offset: int
    size: int


def rows(data: bytes) -> list[Row]:
    where, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    found = []
    for at in range(where, where + 64 * count, 64):
        fields = struct.unpack_from("<IIQQQQIIQQ", data, at)
        found.append(Row(at, fields[1], fields[2], fields[4], fields[5]))
    return found


def relocations(data: bytes) -> Iterator[int]:
    """Where each of them stands."""
    for row in rows(data):
        if row.kind == 4:
            yield from range(row.offset, row.offset + row.size, 24)


def changed(at: int, form: str, value: Any) -> bytes:
    """The object file with one number replaced."""
    data = bytearray(object_file())
    struct.pack_into(form, data, at, value)
    return bytes(data)


# It works


def test_code_runs_with_its_constants_its_calls_and_its_tables() -> None:
    code = loaded()

    assert [function(code, "number", ctypes.c_double, I64)(i) for i in range(4)] == [
        4.5,
        -6.0,
        0.75,
        24.0,
    ]
    assert [call(code, "handled", i, 5) for i in range(2)] == [6, 15]
    assert (call(code, "absolute", -7), call(code, "twice", -7)) == (7, 14)


def test_symbols_are_the_functions_that_the_file_offers() -> None:
    names = {"counted", "number", "handled", "absolute", "twice", "where_room"}

    assert loaded().symbols.keys() == names
    with pytest.raises(KeyError):
        loaded().address("add_one")


def test_two_loads_share_no_state() -> None:
    one, other = loaded(), loaded()

    assert [call(one, "counted") for _ in range(3)] == [41, 42, 43]
    assert call(other, "counted") == 41
    assert {*one.symbols.values()}.isdisjoint(other.symbols.values())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_state_of_its_own() -> None:
    code = loaded()
    call(code, "counted")
    child = os.fork()
    if child == 0:
        told = [call(code, "counted") for _ in range(5)]
        os._exit(0 if told == [42, 43, 44, 45, 46] else 1)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert call(code, "counted") == 42


def protection(address: int) -> str:
    """What the system allows at an address, as `r-xp`; empty if nothing is there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, allowed = line.split()[:2]
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            return allowed
    return ""


def test_code_can_run_and_not_be_written_data_the_other_way_round() -> None:
    code = loaded()
    room = call(code, "where_room")

    assert {protection(address) for address in code.symbols.values()} == {"r-xp"}
    assert protection(room) == "rw-p"
    assert room % 64 == 0
    assert ctypes.string_at(room, 512) == bytes(512)


def test_memory_goes_with_the_code() -> None:
    code = loaded()
    address = code.address("counted")
    del code
    gc.collect()

    assert "x" not in protection(address)


def test_a_file_without_functions_loads() -> None:
    assert loaded(compile_text("@x = global i64 3")).symbols.keys() == {"x"}


# What programs are made of


@pytest.fixture(scope="module")
def image() -> Image:
    """A program with kernels, some of which call functions of libraries."""
    found: list[Image] = []
    bind = images.bind_host
    with pytest.MonkeyPatch.context() as patch:

        def noting(image: Image, *rest: Any) -> Any:
            found.append(image)
            return bind(image, *rest)

        patch.setattr("stator.runtime.native.executor.bind_host", noting)

        def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x.sin() + x.erf(), -1)[i].cumsum(0)

        torch._dynamo.reset()
        options = {"strict": True, "cache": False}
        torch.compile(program, backend="stator", options=options)(
            torch.randn(300, 70), torch.tensor([1, 2])
        )
    return found[0]


def test_kernels_load_and_offer_what_the_program_calls(image: Image) -> None:
    codes = [loaded(data) for data in image.modules]

    assert codes
    for module, name in image.kernels:
        assert protection(codes[module].address(name)) == "r-xp"


def test_the_prelude_and_the_host_load_again(image: Image) -> None:
    prelude = loaded(image.prelude)
    assert image.prelude == compile_text(prelude_text())
    asked: list[str] = []

    def resolve(name: str) -> int:
        asked.append(name)
        return prelude.symbols.get(name, 0) or prelude.address("stator_memory")

    host = load_object(image.host, resolve)

    assert protection(host.address("run")) == "r-xp"
    assert {f"kernel_{i}" for i in range(len(image.kernels))} <= set(asked)


# Damage


def test_a_function_that_no_library_has_is_named() -> None:
    text = "declare void @no_such_function()\ndefine void @f() {\n  call void @no_such_function()\n"
    data = compile_text(f"{text}  ret void\n}}\n")

    with pytest.raises(CompileError, match="no_such_function"):
        loaded(data)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, "4s", b"\x7fELG"),
        (4, "B", 1),  # 32 bits
        (5, "B", 2),  # big-endian
        (18, "<H", 183),  # for ARM
        (18, "<H", 3),  # for the older x86
    ],
)
def test_a_file_for_another_machine_is_refused(at: int, form: str, value: Any) -> None:
    with pytest.raises(CompileError, match="not for this kind of machine"):
        loaded(changed(at, form, value))


@pytest.mark.parametrize("kind", [0, 3, 5, 6, 7, 8, 10, 11, 24, 26, 37, 43, 1 << 20])
def test_an_unknown_relocation_is_refused(kind: int) -> None:
    at = next(relocations(object_file()))

    with pytest.raises(CompileError, match=f"relocation of kind {kind}"):
        loaded(changed(at + 8, "<I", kind))


def test_every_relocation_is_checked() -> None:
    places = list(relocations(object_file()))
    refused = 0
    for at in places:
        try:
            loaded(changed(at + 8, "<I", 99))
        except CompileError:
            refused += 1

    assert refused >= len(places) // 2  # the rest tell how to unwind the stack, which nobody asks


@pytest.mark.parametrize("place", [1 << 12, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 8])
def test_a_relocation_outside_of_its_section_is_refused(place: int) -> None:
    at = next(relocations(object_file()))

    with pytest.raises(CompileError):
        loaded(changed(at, "<Q", place))


@pytest.mark.parametrize("number", [1 << 16, (1 << 32) - 1])
def test_a_relocation_to_a_symbol_that_is_not_there_is_refused(number: int) -> None:
    at = next(relocations(object_file()))

    with pytest.raises(CompileError):
        loaded(changed(at + 12, "<I", number))


def test_a_section_whose_bytes_are_missing_is_refused() -> None:
    data = object_file()
    code = next(row for row in rows(data) if row.flags & 4 and row.size)

    for offset in (len(data), len(data) - code.size + 1, 1 << 40):
        with pytest.raises(CompileError):
            loaded(changed(code.at + 24, "<Q", offset))


def test_a_file_cut_short_anywhere_is_refused() -> None:
    data = object_file()
    for length in [*range(0, 80), *range(80, len(data), 41), len(data) - 1]:
        with pytest.raises(CompileError):
            loaded(data[:length])


def forbidden(name: str) -> NoReturn:
    raise LookupError(f"{name} is not asked for")


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\x7fELF", b"MZ" * 500, os.urandom(4096)])
def test_what_is_no_object_file_is_refused(data: bytes) -> None:
    with pytest.raises(CompileError):
        load_object(data, forbidden)


def tables(data: bytes) -> list[int]:
    """Every byte of the headers, the symbols, the names and the relocations."""
    found = list(range(64))
    for row in rows(data):
        found += range(row.at, row.at + 64)
        if row.kind in (2, 3, 4):
            found += range(row.offset, row.offset + row.size)
    return found


@pytest.fixture
def _little_room() -> Iterator[None]:
    """Sizes that an accident made huge find no memory, instead of taking all of it."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_little_room")
def test_two_thousand_accidents_to_the_tables_load_or_raise(image: Image) -> None:
    chance, raised = random.Random(0), 0
    for data in (object_file(), image.modules[0]):
        places = tables(data)
        for _ in range(1000):
            bad = bytearray(data)
            for _ in range(chance.randint(1, 3)):
                bad[chance.choice(places)] = chance.choice(
                    (0, 1, 0x7F, 0xFF, chance.randrange(256))
                )
            try:
                loaded(bytes(bad))
            except CompileError:
                raised += 1

    assert 200 < raised < 2000
    assert call(loaded(), "counted") == 41
