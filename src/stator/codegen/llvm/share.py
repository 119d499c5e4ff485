"""Loops that differ in a few numbers alone are compiled once, with the numbers as parameters.

A convolutional network has the same normalisation at many sizes: LLVM would do the same work for
each of them.  What a loop over vectors computes with stays a constant: its strides and lengths are
what LLVM makes good code of.  So do divisors, and numbers that are small.

before: define internal void @a_rows(ptr %a0, …) { … mul nsw i64 %i12, 64 … }
        define internal void @b_rows(ptr %a0, …) { … mul nsw i64 %i12, 128 … }
after:  define internal void @a_rows(ptr %a0, …, i64 %shared0) { … mul nsw i64 %i12, %shared0 … }
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.writer import LANES

LEAST: Final = 16  # a smaller number is a stride or a count that code depends on
_HOLE: Final = "\0"
_HEAD: Final = re.compile(r"define internal void @(\w+)\((.*)\) noinline #0 \{")
_LITERAL: Final = re.compile(r"(?<=i64 )\d+(?![\w.])|(?<=, )\d+$")
_COMPUTES: Final = re.compile(r"= (?:add|sub|mul|icmp|select|getelementptr)\b[^@]* i64 ")
_NAME: Final = re.compile(r"%[\w.]+")
_VECTORS: Final = re.compile(rf"label %([\w.]+), label %[\w.]+, !llvm\.loop !\{{{LANES}[1-9]")


@dataclass(frozen=True, slots=True)
class _Rows:
    """A function, its text with holes where numbers were, and the numbers."""

    name: str
    parameters: str
    body: str
    numbers: tuple[str, ...]


def share_rows(texts: Sequence[str]) -> list[str]:
    """Texts of kernels, each beginning with its loops, which several may have in common then."""
    found = [_parsed(text) for text in texts]
    groups: dict[tuple[str, str], list[int]] = {}
    for place, rows in enumerate(found):
        if rows is not None:
            groups.setdefault((rows.parameters, rows.body), []).append(place)
    shared = list(texts)
    for places in groups.values():
        members = [rows for place in places if (rows := found[place]) is not None]
        if len(members) > 1:
            for place, text in zip(
                places, _shared(members, [texts[p] for p in places]), strict=True
            ):
                shared[place] = text
    return shared


def _shared(members: Sequence[_Rows], texts: Sequence[str]) -> list[str]:
    """The first has the loops, all call them with the numbers that differ."""
    columns = list(zip(*(rows.numbers for rows in members), strict=True))
    given = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))
    names = {column: f"%shared{place}" for place, column in enumerate(given)}
    first, found = members[0], []
    rest = iter([names.get(column, column[0]) for column in columns])
    body = re.sub(_HOLE, lambda _: next(rest), first.body)
    parameters = ", ".join([first.parameters, *(f"i64 {names[column]}" for column in given)])
    rows = f"define internal void @{first.name}({parameters}) noinline #0 {{{body}"
    for place, (member, text) in enumerate(zip(members, texts, strict=True)):
        callers = text[text.index("\n}") + 2 :]
        numbers = "".join(f", i64 {column[place]}" for column in given)
        calls = re.sub(
            rf"call void @{member.name}\((.*)\)", rf"call void @{first.name}(\1{numbers})", callers
        )
        found.append(calls if place else rows + calls)
    return found


def _parsed(text: str) -> _Rows | None:
    head = _HEAD.match(text)
    if head is None or f"call void @{head[1]}(" not in text:
        return None
    body = text[head.end() : text.index("\n}") + 2]
    lanes = _in_vectors(body)
    numbers: list[str] = []
    lines = []
    for line in body.split("\n"):
        if _COMPUTES.search(line) and lanes.isdisjoint(_NAME.findall(line)):
            literals = [m for m in _LITERAL.finditer(line) if int(m[0]) >= LEAST]
            numbers += [m[0] for m in literals]
            for m in reversed(literals):
                line = line[: m.start()] + _HOLE + line[m.end() :]
        lines.append(line)
    return _Rows(head[1], head[2], "\n".join(lines), tuple(numbers))


def _in_vectors(body: str) -> set[str]:
    """What counters of loops over vectors are, and what is computed of them."""
    headers = set(_VECTORS.findall(body))
    found: set[str] = set()
    block = "entry"
    for line in body.split("\n"):
        name, _, rest = line.strip().partition(" = ")
        if line.endswith(":"):
            block = line[:-1]
        elif rest.startswith("phi "):
            if block in headers:
                found.add(name)
        elif rest and not found.isdisjoint(_NAME.findall(rest)):
            found.add(name)
    return found
