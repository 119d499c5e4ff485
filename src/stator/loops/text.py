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
axis's size holds are declared (`size s1`), and all that may be negative (`number s2`).  A
computation that one statement uses several times, or that is nested very deep, stands above the
statement: `let t0 = …`.  That is notation alone: nodes are shared, so it changes nothing but the
length of the text, which is exponential without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from stator.core.dtypes import DType
from stator.loops.access import (
    buffers,
    header_sizes,
    indices,
    roots,
    symbols,
)
from stator.loops.index import Atom, Axis, Clamped, Element, Index, Quotient, Remainder, Symbol
from stator.loops.ir import (
    Accumulated,
    Apply,
    Cast,
    Const,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Statement,
    Store,
    Within,
    children,
    innermost_first,
    result_dtype,
)


def to_text(kernel: Kernel) -> str:
    """The kernel as text, one line for each statement."""
    return "\n".join(_Printer(kernel).lines()) + "\n"


def statement_text(kernel: Kernel, statement: Statement) -> str:
    """One statement of the kernel as text, without the lines of what it shares."""
    *_, line = _Printer(kernel).statement(statement)
    return line.strip()


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
        yield from self.declarations()
        if kernel.is_list:
            yield "  list"
        for written, read in kernel.shares:
            yield f"  shares {written.name}: {read.name}"
        if kernel.outer:
            yield f"  outer {self.axes(kernel.outer)}"
        for stage in kernel.stages:
            word = "scan" if stage.in_order else "stage"
            yield f"  {word} {self.axes(stage.inner)}".rstrip()
            for statement in stage.body:
                yield from self.statement(statement)

    def declarations(self) -> Iterator[str]:
        """Lines of symbols and buffers: what may be negative first, for buffers' sizes hold it."""
        for symbol in self.signed():
            yield f"  number {symbol}"
        for kind in ("buffer", "scratch"):
            for buffer in buffers(self.kernel):
                if buffer.is_scratch == (kind == "scratch"):
                    yield f"  {kind} {buffer.name}: {buffer.dtype!r}[{self.index(buffer.size)}]"
        for symbol in self.undeclared():
            yield f"  size {symbol}"

    def undeclared(self) -> list[Symbol]:
        """Symbols of the statements that no size before them holds."""
        found: dict[Symbol, None] = {}
        header = (b.size for b in buffers(self.kernel)), (a.size for a in self.kernel.outer)
        declared = {symbol for sizes in header for size in sizes for symbol in symbols(size)}
        for stage in self.kernel.stages:
            declared |= {symbol for axis in stage.inner for symbol in symbols(axis.size)}
            used = (s for s in self.used(stage.body) if not s.is_signed and s not in declared)
            found |= dict.fromkeys(used)
        return list(found)

    def used(self, statements: Iterable[Statement]) -> list[Symbol]:
        """Symbols of the statements."""
        found = [index for statement in statements for index in indices(statement)]
        return [symbol for index in found for symbol in symbols(index)]

    def signed(self) -> list[Symbol]:
        """Symbols that may be negative, in whatever place."""
        header = [symbol for size in header_sizes(self.kernel) for symbol in symbols(size)]
        return [
            s for s in dict.fromkeys((*header, *self.used(self.kernel.statements))) if s.is_signed
        ]

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
            how = "=" if statement.combine is None else f"{statement.combine.value}="
            yield f"    {statement.buffer.name}[{self.index(statement.index)}] {how} {value}"
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
            case Within():
                place = f"{self.index(expr.index)}, {self.index(expr.limit)}"
                sides = f"{self.expr(expr.inside)}, {self.expr(expr.outside)}"
                return f"within({place}, {sides})", expr.inside.dtype
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
            case Clamped():
                parts = (self.index(part) for part in (atom.value, atom.low, atom.high))
                return f"clamp({', '.join(parts)})"
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
        if isinstance(node, Apply | Cast | Within) and (uses[node] > 1 or depth[node] % DEPTH == 0)
    ]


def _innermost_first(exprs: tuple[Expr, ...]) -> list[Expr]:
    """Every expression once, behind all that are inside of it."""
    done: dict[Expr, None] = {}
    for expr in exprs:
        for part in innermost_first(expr, done.__contains__):
            done[part] = None
    return list(done)
