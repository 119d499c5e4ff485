"""What is computed into memory, rather than again where it is read."""

from __future__ import annotations

from typing import Final

from stator.loops.index import Index, Quotient, Remainder
from stator.loops.ir import Apply, Expr, loads_of, walk
from stator.loops.prims import Prim

MOST_LOADS: Final = 12  # of one expression; beyond, a value is computed into memory
MOST_OPERATIONS: Final = 60
CHEAP: Final = 2  # operations that are rather done again than stored and read
# Python has a thousand calls inside of each other.  Values that wait for each other take some each,
# and so does whoever writes code for expressions that stand inside of each other.  Of views that
# copy nothing the first few are not asked.
MOST_LINKS: Final = 64
DEEPEST: Final = 96
FEW_LINKS: Final = 8
# Of an index: a view that divides what another one divided writes that twice, for the quotient and
# for the rest, so that ten of them write it a thousand times.
MOST_DIVISIONS: Final = 64
# Tensors that one expression reads.  Of a cat of 48, 200 and 600 the kernel for a GPU took 1.4, 12
# and 92 seconds to compile, and each of its threads asks for every part.
MOST_READ: Final = 64

_DEAR: Final = frozenset(prim for prim in Prim if prim.value > Prim.FMA.value) | {
    Prim.DIV,
    Prim.SQRT,
}


def is_large(expr: Expr) -> bool:
    """Whether it is enough for a loop of its own."""
    return len(loads_of(expr)) > MOST_LOADS or expr.size > MOST_OPERATIONS


def is_worth_keeping(expr: Expr) -> bool:
    """Whether it is not computed twice."""
    return expr.size - len(loads_of(expr)) > CHEAP or is_dear(expr)


def is_dear(expr: Expr) -> bool:
    """Whether some operation takes as long as several others."""
    return any(isinstance(part, Apply) and part.prim in _DEAR for part in walk(expr))


def is_tangled(expr: Expr) -> bool:
    """Whether it is deep, or some index that it reads at is long."""
    return expr.depth > DEEPEST or any(
        _divisions(load.index) > MOST_DIVISIONS for load in loads_of(expr)
    )


def _divisions(index: Index) -> int:
    atoms = (atom for product, _ in index.terms for atom in product)
    divided = [atom for atom in atoms if isinstance(atom, Quotient | Remainder)]
    return sum(1 + _divisions(atom.value) + _divisions(atom.by) for atom in divided)
