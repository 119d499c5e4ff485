"""From text to kernels; `text.py` has the notation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

from stator.core.dtypes import DType
from stator.errors import CompileError
from stator.loops.index import (
    Atom,
    Axis,
    Clamped,
    Element,
    Index,
    Product,
    Quotient,
    Remainder,
    Symbol,
)
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
    Buffer,
    Cast,
    Combine,
    Const,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    Within,
    result_dtype,
)
from stator.loops.prims import Prim

Item = TypeVar("Item")


def parse(text: str) -> Kernel:
    """The kernel that a text stands for; CompileError names the line and what it lacks."""
    return _KernelParser(text).kernel()


# --- parsing ---

_TOKEN: Final = re.compile(
    r"\s*(?P<token>[A-Za-z_]\w*|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|//|[-+*%()\[\],:=]|\S)"
)
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_PRIMS: Final = {prim.name.lower(): prim for prim in Prim}
_DTYPES: Final = {dtype.value: dtype for dtype in DType}
_COMBINES: Final = {combine.value: combine for combine in Combine}
_LITERALS: Final[dict[str, float | bool]] = {
    "nan": math.nan,
    "inf": math.inf,
    "True": True,
    "False": False,
}


@dataclass
class _Scope:
    """What names stand for at a line."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    accumulators: dict[str, DType] = field(default_factory=dict)
    lets: dict[str, Expr] = field(default_factory=dict)


@dataclass
class _Line:
    """One line: a cursor over its tokens."""

    number: int
    text: str
    scope: _Scope
    at: int = 0

    def __post_init__(self) -> None:
        self.tokens = [found["token"] for found in _TOKEN.finditer(self.text)]

    def peek(self, ahead: int = 0) -> str:
        """The next token; empty at the end of the line."""
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def fail(self, expected: str) -> NoReturn:
        found = repr(self.peek()) if self.peek() else "the end of the line"
        what = f"line {self.number}: expected {expected}, found {found}"
        raise CompileError("parse loops", what, where=self.text.strip())

    def take(self, *tokens: str) -> str:
        """The next token, which must be one of `tokens`."""
        if self.peek() not in tokens:
            self.fail(" or ".join(repr(token) for token in tokens))
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, token: str) -> bool:
        """Whether the next token is `token`, which is then taken."""
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def name(self, what: str) -> str:
        if not _NAME.fullmatch(self.peek()):
            self.fail(what)
        self.at += 1
        return self.tokens[self.at - 1]

    def known(self, names: dict[str, Item], what: str) -> Item:
        """What the next token stands for."""
        if self.peek() not in names:
            self.fail(what)
        self.at += 1
        return names[self.tokens[self.at - 1]]

    def end(self) -> None:
        if self.peek():
            self.fail("the end of the line")

    # Indices are put together as they stand, without the algebra: the text holds what it prints.

    def index(self) -> Index:
        """A sum of products."""
        terms = [self.term(-1 if self.accept("-") else 1)]
        while self.peek() in ("+", "-"):
            terms.append(self.term(-1 if self.take("+", "-") == "-" else 1))
        return Index(tuple(term for term in terms if term != ((), 0)))

    def term(self, sign: int) -> tuple[Product, int]:
        factor, atoms = sign, []
        if self.peek().isdigit():
            factor = sign * int(self.take(self.peek()))
        else:
            atoms.append(self.atom())
        while self.accept("*"):
            atoms.append(self.atom())
        return tuple(atoms), factor

    def atom(self) -> Atom:
        if self.accept("["):
            expr = self.expr()
            self.take("]")
            return Element(expr)
        if self.accept("("):
            return self.division()
        if self.peek() == "clamp" and self.peek(1) == "(":
            return self.clamp()
        return self.known(self.scope.axes | self.scope.symbols, "an axis in scope or a size")

    def division(self) -> Quotient | Remainder:
        """A quotient or a remainder, behind its bracket."""
        value = self.operand()
        kind = Quotient if self.take("//", "%") == "//" else Remainder
        by = self.operand()
        self.take(")")
        return kind(value, by)

    def clamp(self) -> Clamped:
        """`clamp(value, low, high)`"""
        self.take("clamp")
        self.take("(")
        value = self.index()
        self.take(",")
        low = self.index()
        self.take(",")
        high = self.index()
        self.take(")")
        return Clamped(value, low, high)

    def operand(self) -> Index:
        """A sum in brackets, or one atom or number."""
        if self.peek() != "(" or self.is_division():
            return Index(tuple(term for term in [self.term(1)] if term != ((), 0)))
        self.take("(")
        inside = self.index()
        self.take(")")
        return inside

    def is_division(self) -> bool:
        """Whether the bracket that opens here holds a quotient or remainder, not a sum."""
        depth = 0
        for token in self.tokens[self.at :]:
            depth += (token in ("(", "[")) - (token in (")", "]"))
            if depth == 0 or (depth == 1 and token in ("//", "%")):
                return depth == 1
        return False

    def expr(self) -> Expr:
        """An expression, with its type where that does not follow."""
        implied, build = self.untyped()
        if self.accept(":"):
            return build(self.known(_DTYPES, "a type"))
        if implied is None:
            self.fail("':' and a type")
        return build(implied)

    def untyped(self) -> tuple[DType | None, Callable[[DType], Expr]]:
        """The type that follows, and what makes the expression of a type."""
        token, following = self.peek(), self.peek(1)
        if token == "-" or token in _LITERALS or token[:1].isdigit():
            number = self.number_literal()
            return None, lambda dtype: Const(dtype, number)
        if following == "[":
            buffer, place = self.element()
            return buffer.dtype.computed_in, lambda dtype: Load(dtype, buffer, place)
        if following == "(":
            return self.call()
        if token in self.scope.lets:
            shared = self.known(self.scope.lets, "a let")
            return shared.dtype, lambda _: shared
        name, names = token, self.scope.accumulators
        kind = self.known(names, "an accumulator of an earlier line, a constant or an expression")
        return kind, lambda dtype: Accumulated(dtype, name)

    def call(self) -> tuple[DType | None, Callable[[DType], Expr]]:
        """A cast, a primitive, or `value(…)`."""
        if self.accept("value"):
            self.take("(")
            index = self.index()
            self.take(")")
            return DType.I64, lambda dtype: IndexValue(dtype, index)
        if self.peek() in _DTYPES:
            target = self.known(_DTYPES, "a type")
            self.take("(")
            value = self.expr()
            self.take(")")
            return target, lambda dtype: Cast(dtype, value)
        if self.accept("within"):
            return self.choice()
        prim = self.known(_PRIMS, "a primitive or a type")
        self.take("(")
        args = [self.expr()]
        while self.take(",", ")") == ",":
            args.append(self.expr())
        given = tuple(args)
        return result_dtype(prim, given), lambda dtype: Apply(dtype, prim, given)

    def choice(self) -> tuple[DType | None, Callable[[DType], Expr]]:
        """A choice by an index, behind its name."""
        self.take("(")
        index = self.index()
        self.take(",")
        limit = self.index()
        self.take(",")
        inside = self.expr()
        self.take(",")
        outside = self.expr()
        self.take(")")
        return inside.dtype, lambda dtype: Within(dtype, index, limit, inside, outside)

    def number_literal(self) -> int | float | bool:
        is_negative = self.accept("-")
        token = self.peek()
        self.at += 1
        if token in _LITERALS:
            value: int | float | bool = _LITERALS[token]
        elif token.isdigit():
            value = int(token)
        elif token[:1].isdigit():
            value = float(token)
        else:
            self.at -= 1
            self.fail("a number")
        return -value if is_negative else value

    def element(self) -> tuple[Buffer, Index]:
        buffer = self.known(self.scope.buffers, "a buffer")
        self.take("[")
        index = self.index()
        self.take("]")
        return buffer, index


@dataclass
class _KernelParser:
    text: str
    scope: _Scope = field(default_factory=_Scope)
    outer: tuple[Axis, ...] = ()
    shares: list[tuple[Buffer, Buffer]] = field(default_factory=list)
    is_list: bool = False
    stages: list[tuple[tuple[Axis, ...], list[Statement], bool]] = field(default_factory=list)

    def kernel(self) -> Kernel:
        numbered = enumerate(self.text.splitlines(), 1)
        lines = [_Line(number, line, self.scope) for number, line in numbered if line.strip()]
        if not lines:
            _Line(1, "", self.scope).fail("'kernel'")
        first, *rest = lines
        first.take("kernel")
        name = first.name("the kernel's name")
        first.end()
        for line in rest:
            self.line(line)
            line.end()
        stages = tuple(Stage(inner, tuple(body), scan) for inner, body, scan in self.stages)
        return Kernel(name, self.outer, stages, tuple(self.shares), self.is_list)

    def line(self, line: _Line) -> None:
        word = line.peek()
        # Not `stage[i0] = …` nor `stage sum= …`: a buffer or accumulator may have that name.
        if word in ("stage", "scan") and line.peek(1) != "[" and line.peek(2) != "=":
            line.take("stage", "scan")
            self.scope.axes = {axis.name: axis for axis in self.outer}
            self.stages.append((self.axes(line), [], word == "scan"))
        elif self.stages:
            self.statement(line)
        elif word == "list":
            line.take("list")
            self.is_list = True
        elif word == "shares":
            line.take("shares")
            written = line.known(self.scope.buffers, "a buffer")
            line.take(":")
            self.shares.append((written, line.known(self.scope.buffers, "a buffer")))
        elif word == "outer":
            line.take("outer")
            self.outer = self.axes(line)
        elif word == "size":
            line.take("size")
            self.declare(line.name("the name of a size"))
        elif word == "number":
            line.take("number")
            name = line.name("the name of a number")
            self.scope.symbols[name] = Symbol(name, is_signed=True)
        elif word in ("buffer", "scratch"):
            self.buffer(line)
        else:
            line.fail("'buffer', 'scratch', 'size', 'number', 'shares', 'list', 'outer' or 'stage'")

    def declare(self, name: str) -> None:
        self.scope.symbols.setdefault(name, Symbol(name))

    def size(self, line: _Line) -> Index:
        """A size: names in it are symbols, and thereby declared."""
        depth = 0
        for token in line.tokens[line.at :]:
            depth += (token == "(") - (token == ")")
            if depth == 0 and token in ("]", ","):
                break
            if _NAME.fullmatch(token) and token != "clamp":
                self.declare(token)
        return line.index()

    def buffer(self, line: _Line) -> None:
        is_scratch = line.take("buffer", "scratch") == "scratch"
        name = line.name("a buffer's name")
        line.take(":")
        dtype = line.known(_DTYPES, "a type")
        line.take("[")
        size = self.size(line)
        line.take("]")
        self.scope.buffers[name] = Buffer(name, dtype, size, is_scratch)

    def axes(self, line: _Line) -> tuple[Axis, ...]:
        found: list[Axis] = []
        while line.peek():
            if found:
                line.take(",")
            name = line.name("an axis's name")
            line.take(":")
            found.append(Axis(name, self.size(line)))
        self.scope.axes |= {axis.name: axis for axis in found}
        return tuple(found)

    def statement(self, line: _Line) -> None:
        body = self.stages[-1][1]
        if line.peek() == "let" and line.peek(1) not in ("[", *_COMBINES):
            line.take("let")
            name = line.name("a name")
            line.take("=")
            self.scope.lets[name] = line.expr()
            return
        if line.peek(1) == "[":
            buffer, index = line.element()
            combine = None if line.peek() == "=" else line.known(_COMBINES, "'='")
            line.take("=")
            body.append(Store(buffer, index, line.expr(), combine))
        else:
            body.append(self.accumulation(line))
        self.scope.lets.clear()

    def accumulation(self, line: _Line) -> Accumulate:
        name = line.name("a statement")
        combine = line.known(_COMBINES, "'[' or one of " + ", ".join(_COMBINES))
        line.take("=")
        value = line.expr()
        self.scope.accumulators.setdefault(name, value.dtype)
        return Accumulate(name, combine, value)
