"""Machine code from an object file into memory: sections placed, addresses filled in.

It is what a linker does, for the little that our code asks of one: a few sections, calls through a
table of addresses, constants nearby.  So a program that was compiled before runs in a process that
never loads LLVM.  For ELF on x86-64; elsewhere LLVM's own loader does it (jit.py).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from stator.errors import CompileError

PAGE: Final = mmap.PAGESIZE
_ALLOCATED, _WRITABLE, _EXECUTABLE = 0x2, 0x1, 0x4  # flags of sections
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # types of sections
_ABSOLUTE, _RELATIVE, _CALL, _TABLE = 1, 2, 4, frozenset({9, 41, 42})  # kinds of relocations
# What reading comes to where a number in the file is wrong, or a library lacks a function.
_DAMAGE: Final = (struct.error, LookupError, ValueError, OverflowError, MemoryError, OSError)


def can_load() -> bool:
    """Whether object files for this machine are of the kind that is understood here."""
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code in memory; lives as long as this object."""

    memory: mmap.mmap
    symbols: dict[str, int]

    def address(self, name: str) -> int:
        """Where a function begins."""
        return self.symbols[name]


@dataclass(slots=True)
class _Section:
    name: str
    kind: int
    flags: int
    data: bytes
    size: int
    link: int
    info: int
    align: int
    place: int = -1  # in memory; -1: it is not loaded

    @property
    def is_loaded(self) -> bool:
        """Whether the program needs it; how to unwind its stack nobody asks."""
        return bool(self.flags & _ALLOCATED) and self.name != ".eh_frame"


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int  # 0: it is elsewhere
    value: int
    is_global: bool
    is_weak: bool = False  # its address is 0 where nobody has it


def load_object(data: bytes, resolve: Callable[[str], int]) -> Code:
    """Put an object file into memory; `resolve` finds the functions that it does not have."""
    try:
        return _Loader(data, resolve).load()
    except _DAMAGE as error:
        raise CompileError(
            "executor", f"an object file cannot be loaded: {type(error).__name__}: {error}"
        ) from error


@dataclass(slots=True)
class _Loader:
    data: bytes
    resolve: Callable[[str], int]
    sections: list[_Section] = field(default_factory=list)
    symbols: list[_Symbol] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)  # places of addresses, by symbol
    jumps: dict[str, int] = field(default_factory=dict)  # places of jumps through the table

    def load(self) -> Code:
        self._read()
        code_end = self._place(_EXECUTABLE, 0)
        wanted = {
            self.symbols[number].name
            for _, _, kind, number, _ in self._relocations()
            if kind in _TABLE or self._is_elsewhere(kind, number)
        }
        for name in sorted(wanted):
            self.jumps[name] = code_end
            code_end += 8  # a jump of 6 bytes
        end = self._place(0, -(-code_end // PAGE) * PAGE)
        for name in sorted(wanted):
            end = -(-end // 8) * 8
            self.table[name] = end
            end += 8
        # Private: a child that is forked changes its own copy, not its parent's.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(-(-end // PAGE) * PAGE, PAGE), private)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._fill(memory, start)
        _make_executable(start, -(-code_end // PAGE) * PAGE)
        found = {
            symbol.name: start + self._address(symbol)
            for symbol in self.symbols
            if symbol.is_global and symbol.section and self.sections[symbol.section].is_loaded
        }
        return Code(memory, found)

    # --- reading ---

    def _read(self) -> None:
        head = struct.unpack_from("<16sHHIQQQIHHHHHH", self.data)
        if head[0][:6] != b"\x7fELF\x02\x01" or head[2] != 62:
            raise CompileError("executor", "an object file is not for this kind of machine")
        where, count, names_at = head[6], head[12], head[13]
        rows = [struct.unpack_from("<IIQQQQIIQQ", self.data, where + 64 * i) for i in range(count)]
        names = rows[names_at]
        for row in rows:
            name = _text(self.data, names[4] + row[0])
            held = b"" if row[1] == _NO_BITS else self.data[row[4] : row[4] + row[5]]
            if row[1] != _NO_BITS and len(held) != row[5]:
                raise CompileError("executor", "an object file is cut short")
            self.sections.append(
                _Section(name, row[1], row[2], held, row[5], row[6], row[7], max(row[8], 1))
            )
        for section in self.sections:
            if section.kind == _SYMBOLS:
                strings = self.sections[section.link].data
                for at in range(0, len(section.data), 24):
                    name, info, _, index, value, _ = struct.unpack_from("<IBBHQQ", section.data, at)
                    bound = info >> 4
                    symbol = _Symbol(_text(strings, name), index, value, bound != 0, bound == 2)
                    self.symbols.append(symbol)

    def _relocations(self) -> Iterator[tuple[_Section, int, int, int, int]]:
        """Section, place in it, kind, number of the symbol, and what is added."""
        for section in self.sections:
            if section.kind == _RELOCATIONS and self.sections[section.info].is_loaded:
                for at in range(0, len(section.data), 24):
                    place, info, added = struct.unpack_from("<QQq", section.data, at)
                    target = self.sections[section.info]
                    yield target, place, info & 0xFFFFFFFF, info >> 32, added

    def _is_elsewhere(self, kind: int, number: int) -> bool:
        return kind in (_CALL, _RELATIVE) and not self.symbols[number].section

    # --- placing ---

    def _place(self, executable: int, end: int) -> int:
        """Place the sections that are code, or those that are not, from `end` on."""
        for section in self.sections:
            if section.is_loaded and section.flags & _EXECUTABLE == executable:
                end = -(-end // section.align) * section.align
                section.place = end
                end += section.size
        return end

    def _address(self, symbol: _Symbol) -> int:
        section = self.sections[symbol.section]
        if not section.is_loaded or symbol.value > section.size:
            raise CompileError("executor", f"{symbol.name or 'a symbol'} is nowhere in memory")
        return section.place + symbol.value

    def _fill(self, memory: mmap.mmap, start: int) -> None:
        for section in self.sections:
            if section.is_loaded and section.data:
                memory[section.place : section.place + len(section.data)] = section.data
        for name, place in self.table.items():
            struct.pack_into("<Q", memory, place, self._found(name, start))
        for name, place in self.jumps.items():
            struct.pack_into("<BBi", memory, place, 0xFF, 0x25, self.table[name] - place - 6)
        for section, offset, kind, number, added in self._relocations():
            if offset + (8 if kind == _ABSOLUTE else 4) > section.size:
                raise CompileError("executor", "an object file fills in what it does not have")
            self._relocate(memory, start, section.place + offset, kind, (number, added))

    def _found(self, name: str, start: int) -> int:
        """Where a symbol is, here or elsewhere."""
        own = [symbol for symbol in self.symbols if symbol.name == name]
        for symbol in own:
            if symbol.section:
                return start + self._address(symbol)
        try:
            return self.resolve(name)
        except LookupError:
            if any(symbol.is_weak for symbol in own):
                return 0
            raise

    def _relocate(
        self, memory: mmap.mmap, start: int, place: int, kind: int, what: tuple[int, int]
    ) -> None:
        symbol, added = self.symbols[what[0]], what[1]
        if kind in _TABLE:
            struct.pack_into("<i", memory, place, self.table[symbol.name] + added - place)
        elif kind in (_CALL, _RELATIVE):
            target = self._address(symbol) if symbol.section else self.jumps[symbol.name]
            struct.pack_into("<i", memory, place, target + added - place)
        elif kind == _ABSOLUTE:
            here = start + self._address(symbol) if symbol.section else self.resolve(symbol.name)
            struct.pack_into("<Q", memory, place, here + added)
        else:
            raise CompileError("executor", f"an object file has a relocation of kind {kind}")


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _make_executable(start: int, size: int) -> None:
    if not size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    allowed = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), allowed) != 0:
        raise CompileError(
            "executor",
            f"memory cannot be made executable (error {ctypes.get_errno()})",
            hint="the system forbids code made at run time; Options.kernels=False runs without",
        )
