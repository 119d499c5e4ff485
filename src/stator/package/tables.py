"""The LLVM text of a library: what all have in common, and tables of what one holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import torch

from stator.codegen.triton.driver import STEP, WORDS, Asked
from stator.core.dtypes import scalar_names, scalar_type
from stator.runtime.native.prelude import memory_text
from stator.runtime.native.values import DEVICE_TYPES

# x86-64's levels: what the kernels of each are compiled for, by LLVM's names.
LEVELS: Final[Mapping[int, str]] = {1: "x86-64", 3: "x86-64-v3", 4: "x86-64-v4"}
REGISTERS: Final[Mapping[int, int]] = {1: 4, 3: 2, 4: 1}  # that a vector of 512 bits takes there
# The last words of a library whose weights stand behind its code: this, and where they begin.
MARK: Final = int.from_bytes(b"STATORWT", "little")
_TEXT: Final = re.compile(r'^@(\w+) = text "(.*)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Held:
    """A constant, and where it lies in the blob."""

    name: str
    dtype: torch.dtype
    kind: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int
    device: str = "cpu"  # the kind that it lies on when it is loaded

    @property
    def is_folded(self) -> bool:
        """Whether it was made of others when the library was built."""
        return self.kind == FOLDED


FOLDED: Final = 4


@dataclass(frozen=True, slots=True)
class Names:
    """What a library tells of itself."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    in_spec: str
    out_spec: str


def runtime_text(device: str = "cpu") -> str:
    """LLVM text that all libraries for a kind of device share."""
    here = files(__package__)
    own = "\n".join(here.joinpath(f"{name}.ll").read_text() for name in (*_PARTS, device))
    parts = {"{MARK}": MARK, "{TYPES}": len(scalar_names()), "{STEP}": STEP}
    for mark, part in parts.items():
        own = own.replace(mark, str(part))
    return memory_text() + _TEXT.sub(_constant, own)


_PARTS: Final = ("library", "constants", "maps", "interface")


def card_text(capability: int) -> str:
    """LLVM text of what a library for a GPU knows beside: its cards, and words for errors."""
    words = _names("launch", [WORDS[asked] for asked in Asked])
    return "\n".join([*words, f"@capability = internal constant i32 {capability}", ""])


def _constant(found: re.Match[str]) -> str:
    return _string(found[1], found[2])


def _string(name: str, text: str) -> str:
    raw = text.encode() + b"\0"
    escaped = "".join(f"\\{byte:02X}" for byte in raw)
    return f'@{name} = internal constant [{len(raw)} x i8] c"{escaped}"'


def tables_text(
    constants: tuple[Sequence[Held], int],
    blob: int,
    names: Names,
    kernels: int,
    levels: Sequence[int],
) -> str:
    """LLVM text of the tables of one library; `constants`: and how many more are made of them."""
    held, packed = constants
    lines = [
        *_names("input", names.inputs),
        *_names("output", names.outputs),
        *_names("type", scalar_names()),
        _string("in_spec", names.in_spec),
        _string("out_spec", names.out_spec),
        f"@constant_count = internal constant i64 {len(held)}",
        f"@packed_count = internal constant i64 {packed}",
        f"@blob_bytes = internal constant i64 {blob}",
        *_constants(held),
        *_kernels(kernels, levels),
    ]
    return "\n".join(lines) + "\n"


def _names(kind: str, names: Sequence[str]) -> list[str]:
    lines = [_string(f"{kind}_{number}", name) for number, name in enumerate(names)]
    row = ", ".join(f"ptr @{kind}_{number}" for number in range(len(names)))
    return [
        *lines,
        f"@{kind}_names = internal constant [{len(names)} x ptr] [{row}]",
        f"@{kind}_count = internal constant i64 {len(names)}",
    ]


def _constants(held: Sequence[Held]) -> list[str]:
    lines, rows = [], []
    for number, one in enumerate(held):
        parts = {"name": _string(f"held_{number}", one.name)}
        for kind, numbers in (("size", one.size), ("stride", one.stride)):
            row = ", ".join(f"i64 {value}" for value in numbers)
            lines.append(
                f"@held_{number}_{kind} = internal constant [{len(numbers)} x i64] [{row}]"
            )
        lines.append(parts["name"])
        rows.append(
            f"%constant {{ ptr @held_{number}, i64 {one.offset}, i64 {one.bytes}, "
            f"i32 {scalar_type(one.dtype)}, i32 {one.kind}, i32 {len(one.size)}, "
            f"i32 {int(one.is_folded)}, ptr @held_{number}_size, ptr @held_{number}_stride, "
            f"i32 {DEVICE_TYPES[one.device]} }}"
        )
    lines.append(f"@constants = internal constant [{len(rows)} x %constant] [{', '.join(rows)}]")
    return lines


def _kernels(count: int, levels: Sequence[int]) -> list[str]:
    """Tables of kernels, and the choice of one: the highest level that is not above the asked.

    Null where all are above; what has no kernels runs anywhere.
    """
    lines = [f"@lowest_level = internal constant i32 {min(levels) if count else 0}"]
    for level in levels:
        symbols = [kernel_symbol(level, number) for number in range(count)]
        lines += [f"declare void @{symbol}()" for symbol in symbols]
        row = ", ".join(f"ptr @{symbol}" for symbol in symbols)
        lines.append(f"@kernels_{level} = internal constant [{count} x ptr] [{row}]")
    lines += ["define internal ptr @kernels_of(i32 %level) {", "start:"]
    found = "null" if count else f"@kernels_{min(levels)}"
    for level in sorted(levels):
        lines.append(f"  %fits{level} = icmp sge i32 %level, {level}")
        lines.append(f"  %best{level} = select i1 %fits{level}, ptr @kernels_{level}, ptr {found}")
        found = f"%best{level}"
    return [*lines, f"  ret ptr {found}", "}"]


def kernel_symbol(level: int, number: int) -> str:
    """What a kernel of a library is called."""
    return f"stator_kernel_{level}_{number}"
