"""Kernels as text, and back: `parse(to_text(kernel)) is kernel` for every kernel that verifies.

    kernel softmax
      buffer x: f32[4096*s0]
      buffer out: f32[4096*s0]
      scratch e: f32[4096]
      outer i0: s0
      stage i1: 4096
        acc0 max= x[4096*i0 + i1]
      stage i1: 4096
        e[i1] = exp(sub(x[4096*i0 + i1], acc0))
        acc1 sum= e[i1]
      stage i1: 4096
        out[4096*i0 + i1] = div(e[i1], acc1)

Types follow from the buffers; only constants say theirs (`2.5:f32`).  Symbols that no buffer's or
axis's size holds are declared (`size s1`).  A computation that one statement uses several times,
or that is nested very deep, stands above the statement: `let t0 = …`.  That is notation alone:
nodes are shared, so it changes nothing but the length of the text, which is exponential without.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

from stator.core.dtypes import DType
from stator.errors import CompileError
from stator.loops.index import Atom, Axis, Element, Index, Product, Quotient, Remainder, Symbol
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
    result_dtype,
)
from stator.loops.prims import Prim

Item = TypeVar("Item")


def to_text(kernel: Kernel) -> str:
    """The kernel as text, one line for each statement."""
    return "\n".join(_Printer(kernel).lines()) + "\n"


def statement_text(kernel: Kernel, statement: Statement) -> str:
    """One statement of the kernel as text, without the lines of what it shares."""
    *_, line = _Printer(kernel).statement(statement)
    return line.strip()


def parse(text: str) -> Kernel:
    """The kernel that a text stands for; CompileError names the line and what it lacks."""
    return _KernelParser(text).kernel()


# --- parts of a kernel, in the order in which they are written ---


def index_parts(index: Index) -> Iterator[Atom]:
    """Atoms of an index, those inside of quotients included."""
    for product, _ in index.terms:
        for atom in product:
            yield atom
            if isinstance(atom, Quotient | Remainder):
                yield from index_parts(atom.value)
                yield from index_parts(atom.by)


def expressions_in(index: Index) -> list[Expr]:
    """Expressions that an index holds directly."""
    return [atom.expr for atom in index_parts(index) if isinstance(atom, Element)]


def children(expr: Expr) -> tuple[Expr, ...]:
    """Expressions directly inside of `expr`, those of its index included."""
    if isinstance(expr, Load | IndexValue):
        return tuple(expressions_in(expr.index))
    return expr.operands


def roots(statement: Statement) -> tuple[Expr, ...]:
    """Expressions that a statement computes: those of its index, then its value."""
    if isinstance(statement, Store):
        return (*expressions_in(statement.index), statement.value)
    return (statement.value,)


def nodes(statement: Statement) -> list[Expr]:
    """Every expression of a statement once, in the order in which the text names them."""
    found: dict[Expr, None] = {}
    stack = list(reversed(roots(statement)))
    while stack:
        current = stack.pop()
        if current not in found:
            found[current] = None
            stack += reversed(children(current))
    return list(found)


def indices(statement: Statement) -> list[Index]:
    """Every index that a statement uses, those inside of others left out."""
    own = [statement.index] if isinstance(statement, Store) else []
    return own + [n.index for n in nodes(statement) if isinstance(n, Load | IndexValue)]


def buffers(kernel: Kernel) -> tuple[Buffer, ...]:
    """Every buffer that the kernel touches, in order of first use: loads first, then the store."""
    found: list[Buffer] = []
    for statement in kernel.statements:
        found += [node.buffer for node in nodes(statement) if isinstance(node, Load)]
        if isinstance(statement, Store):
            found.append(statement.buffer)
    return tuple(dict.fromkeys(found))


def symbols(index: Index) -> list[Symbol]:
    """Symbols that an index holds."""
    return [atom for atom in index_parts(index) if isinstance(atom, Symbol)]


def header_sizes(kernel: Kernel) -> list[Index]:
    """Sizes of the kernel's buffers and axes."""
    axes = [*kernel.outer, *(axis for stage in kernel.stages for axis in stage.inner)]
    return [buffer.size for buffer in buffers(kernel)] + [axis.size for axis in axes]


# --- printing ---

DEPTH: Final = 50  # calls inside of calls on one line: the printer and the parser recur this deep


@dataclass
class _Printer:
    kernel: Kernel
    accumulators: dict[str, DType] = field(default_factory=dict)
    lets: dict[Expr, str] = field(default_factory=dict)
    count: int = 0

    def lines(self) -> Iterator[str]:
        kernel = self.kernel
        yield f"kernel {kernel.name}"
        for kind in ("buffer", "scratch"):
            for buffer in buffers(kernel):
                if buffer.is_scratch == (kind == "scratch"):
                    yield f"  {kind} {buffer.name}: {buffer.dtype!r}[{self.index(buffer.size)}]"
        for symbol in self.undeclared():
            yield f"  size {symbol}"
        if kernel.outer:
            yield f"  outer {self.axes(kernel.outer)}"
        for stage in kernel.stages:
            yield f"  stage {self.axes(stage.inner)}".rstrip()
            for statement in stage.body:
                yield from self.statement(statement)

    def undeclared(self) -> list[Symbol]:
        """Symbols of the statements that no size of the header holds."""
        declared = {symbol for size in header_sizes(self.kernel) for symbol in symbols(size)}
        used = [
            symbol
            for statement in self.kernel.statements
            for index in indices(statement)
            for symbol in symbols(index)
        ]
        return [symbol for symbol in dict.fromkeys(used) if symbol not in declared]

    def axes(self, axes: tuple[Axis, ...]) -> str:
        return ", ".join(f"{axis.name}: {self.index(axis.size)}" for axis in axes)

    def statement(self, statement: Statement) -> Iterator[str]:
        self.lets.clear()
        for expr in _shared(statement):
            name, text = f"t{self.count}", self.computed(expr)
            self.lets[expr] = name
            self.count += 1
            yield f"    let {name} = {text}"
        value = self.expr(statement.value)
        if isinstance(statement, Store):
            yield f"    {statement.buffer.name}[{self.index(statement.index)}] = {value}"
        else:
            yield f"    {statement.name} {statement.combine.value}= {value}"
            self.accumulators.setdefault(statement.name, statement.value.dtype)

    def expr(self, expr: Expr) -> str:
        return self.lets.get(expr) or self.computed(expr)

    def computed(self, expr: Expr) -> str:
        text, implied = self.untyped(expr)
        return text if implied is expr.dtype else f"{text}:{expr.dtype!r}"

    def untyped(self, expr: Expr) -> tuple[str, DType | None]:
        """The text, and the type that it has unless it says another."""
        match expr:
            case Const():
                return repr(expr.value), None
            case Load():
                text = f"{expr.buffer.name}[{self.index(expr.index)}]"
                return text, expr.buffer.dtype.computed_in
            case IndexValue():
                return f"value({self.index(expr.index)})", DType.I64
            case Accumulated():
                return expr.name, self.accumulators.get(expr.name)
            case Cast():
                return f"{expr.dtype!r}({self.expr(expr.value)})", expr.dtype
            case Apply():
                args = ", ".join(self.expr(arg) for arg in expr.args)
                return f"{expr.prim.name.lower()}({args})", result_dtype(expr.prim, expr.args)
        return f"<{type(expr).__name__}>", None  # for the verifier's message: it has no meaning

    def index(self, index: Index) -> str:
        text = ""
        for product, factor in index.terms:
            names = [self.atom(atom) for atom in product]
            number = [str(abs(factor))] if abs(factor) != 1 or not names else []
            term = "*".join(number + names)
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {term}" if text else ("-" + term if factor < 0 else term)
        return text or "0"

    def atom(self, atom: Atom) -> str:
        match atom:
            case Axis() | Symbol():
                return atom.name
            case Quotient():
                return f"({self.operand(atom.value)} // {self.operand(atom.by)})"
            case Remainder():
                return f"({self.operand(atom.value)} % {self.operand(atom.by)})"
            case Element():
                return f"[{self.expr(atom.expr)}]"

    def operand(self, index: Index) -> str:
        is_name = len(index.terms) == 1 and index.terms[0][1] == 1 and len(index.terms[0][0]) == 1
        is_number = index.constant is not None and index.constant >= 0
        return self.index(index) if is_name or is_number else f"({self.index(index)})"


def _shared(statement: Statement) -> list[Expr]:
    """Computations that stand on a line of their own, innermost first."""
    ordered = _innermost_first(roots(statement))
    uses = Counter(roots(statement))
    depth: dict[Expr, int] = {}
    for node in ordered:
        uses.update(children(node))
        depth[node] = 1 + max((depth[child] for child in children(node)), default=0)
    return [
        node
        for node in ordered
        if isinstance(node, Apply | Cast) and (uses[node] > 1 or depth[node] % DEPTH == 0)
    ]


def _innermost_first(exprs: tuple[Expr, ...]) -> list[Expr]:
    """Every expression once, behind all that are inside of it."""
    done: dict[Expr, None] = {}
    stack = [(expr, False) for expr in reversed(exprs)]
    while stack:
        expr, is_ready = stack.pop()
        if is_ready:
            done[expr] = None
        elif expr not in done:
            stack.append((expr, True))
            stack += [(child, False) for child in reversed(children(expr))]
    return list(done)


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
        return self.known(self.scope.axes | self.scope.symbols, "an axis in scope or a size")

    def division(self) -> Quotient | Remainder:
        """A quotient or a remainder, behind its bracket."""
        value = self.operand()
        kind = Quotient if self.take("//", "%") == "//" else Remainder
        by = self.operand()
        self.take(")")
        return kind(value, by)

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
        prim = self.known(_PRIMS, "a primitive or a type")
        self.take("(")
        args = [self.expr()]
        while self.take(",", ")") == ",":
            args.append(self.expr())
        given = tuple(args)
        return result_dtype(prim, given), lambda dtype: Apply(dtype, prim, given)

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
    stages: list[tuple[tuple[Axis, ...], list[Statement]]] = field(default_factory=list)

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
        stages = tuple(Stage(inner, tuple(body)) for inner, body in self.stages)
        return Kernel(name, self.outer, stages)

    def line(self, line: _Line) -> None:
        word = line.peek()
        # Not `stage[i0] = …` nor `stage sum= …`: a buffer or accumulator may have that name.
        if word == "stage" and line.peek(1) != "[" and line.peek(2) != "=":
            line.take("stage")
            self.scope.axes = {axis.name: axis for axis in self.outer}
            self.stages.append((self.axes(line), []))
        elif self.stages:
            self.statement(line)
        elif word == "outer":
            line.take("outer")
            self.outer = self.axes(line)
        elif word == "size":
            line.take("size")
            self.declare(line.name("the name of a size"))
        elif word in ("buffer", "scratch"):
            self.buffer(line)
        else:
            line.fail("'buffer', 'scratch', 'size', 'outer' or 'stage'")

    def declare(self, name: str) -> None:
        self.scope.symbols.setdefault(name, Symbol(name))

    def size(self, line: _Line) -> Index:
        """A size: names in it are symbols, and thereby declared."""
        for token in line.tokens[line.at :]:
            if token in ("]", ","):
                break
            if _NAME.fullmatch(token):
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
            line.take("=")
            body.append(Store(buffer, index, line.expr()))
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
