"""How a kernel is cut into blocks, by a model of the card.

flat    outer iterations alone, in one row of blocks
tiles   outer iterations in squares, where loads and stores lie along different axes
rows    each program takes some outer iterations and goes through their stages; along the inner axes
        in one block (whole), or block after block
product a matrix product in tiles, and what follows it: see product.py; never the model's choice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.shape import transposed
from stator.core.dtypes import DType
from stator.loops.access import indices, nodes
from stator.loops.index import Axis, Element, Index, Quotient, Remainder, upper_bound
from stator.loops.ir import Accumulate, Apply, Kernel, Load, Store
from stator.loops.prims import RANDOM, Prim
from stator.loops.values import product
from stator.schedule.columns import is_columnar

WARP: Final = 32
WIDEST: Final = 16  # bytes that a thread moves at once
LONGEST_WHOLE: Final = 1 << 14  # elements of a row that one program can hold in registers
SIDE: Final = 64  # of a tile, in elements
# Warps that share a longer row, where there are at least as many rows.  Measured on 8,192 rows: 4
# take 0.87 of the time of 16, which wait for each other at the end of each row.
LONG_WARPS: Final = ((1 << 11, 4), (1 << 10, 8), (0, 16))
TILE: Final = 1 << 13  # elements of several rows that one program takes
# Elements of a row that a thread holds, and the most warps that share one: loads enough under way,
# and registers for them.  Fewer where a program has a multiprocessor to itself, which else idles
# while few warps wait; and all that a thread holds is written out, and compiled one by one.
HELD: Final = (32, 16)
HELD_ALONE: Final = (8, 32)
ACROSS: Final = 64  # rows next to each other, where these lie closer than the elements of one
AT_A_TIME: Final = 32  # elements of each, there; half as many of half precision (measured)
SEVERAL_SUMS: Final = 8  # elements of each at a time, where they go to several sums in f64
FEWEST_PROGRAMS: Final = 1 << 7  # fewer leave most of a large card idle
SHORT: Final = 8  # elements of a column, those of all its loads together, that one thread takes
LEAST_ACROSS: Final = 32  # bytes side by side that memory gives at once
# What few rows are cut into instead.  Measured on 64 to 2,048 rows of sums of pieces in f64: 42 to
# 5, 15 to 4 and 7 to 4.5 microseconds.
SLENDER: Final = 64
SHARED: Final = 1 << 9  # elements of a row that eight warps share there
INT32: Final = (1 << 31) - (1 << 20)  # below it no block reaches over the end of the type
PROGRAMS: Final = 1 << 9  # enough to fill a large card


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of a kernel."""

    kind: str  # flat, tiles, rows or product
    outer: int  # iterations that a program takes; of tiles and products: along the last axis
    inner: int  # elements of each that are taken at once; of tiles: along the other axis
    warps: int
    side: Axis | None = None  # of tiles: the other axis
    stages: int = 1  # loads that a loop has under way
    height: int = 1  # of products: iterations along the first axis

    def grid(self, kernel: Kernel) -> Index:
        """How many programs run."""
        if self.kind == "product":
            rows, columns = kernel.outer
            return ceiling(rows.size, self.height) * ceiling(columns.size, self.outer)
        if self.kind != "tiles":
            return ceiling(product([axis.size for axis in kernel.outer]), self.outer)
        assert self.side is not None
        *others, last = kernel.outer
        rest = product([axis.size for axis in others if axis is not self.side])
        return rest * ceiling(last.size, self.outer) * ceiling(self.side.size, self.inner)

    def is_whole(self, inner: tuple[Axis, ...]) -> bool:
        """Whether one block takes all of the inner axes."""
        length = product([axis.size for axis in inner]).constant
        return length is not None and length <= self.inner


def ceiling(count: Index, by: int) -> Index:
    """Blocks that hold as many."""
    return (count + (by - 1)) // by if by > 1 else count


def power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def shape_of(kernel: Kernel) -> Shape:
    """What the model says."""
    lengths = [product([axis.size for axis in s.inner]) for s in kernel.stages if s.inner]
    if not lengths:
        return _tiles(kernel) or _flat(kernel)
    if is_columnar(kernel):
        return _columns(kernel, lengths)
    rows = product([axis.size for axis in kernel.outer]).constant or PROGRAMS
    known = [length.constant for length in lengths if length.constant is not None]
    longest = max(known, default=0)
    if len(known) < len(lengths) or longest > LONGEST_WHOLE // _weight(kernel):
        # The widest access for each thread.
        bytes_ = min((b.dtype.bytes for b in (*kernel.read, *kernel.written)), default=4)
        warps = next(warps for least, warps in LONG_WARPS if rows >= least)
        (stage, *others) = (stage for stage in kernel.stages if stage.inner)
        if not others and not any(isinstance(s, Store) for s in stage.body):
            warps = LONG_WARPS[-1][1]  # they wait for each other once, at the end of a sum
        return Shape("rows", 1, warps * WARP * WIDEST // max(bytes_, 2), warps)
    inner = power(longest)
    outer = max(1, min(TILE // inner, power(rows) // PROGRAMS, 64))
    each, most = HELD if -(-rows // outer) >= FEWEST_PROGRAMS or inner > TILE else HELD_ALONE
    warps = min(max(outer * inner // (each * WARP), 1), most)
    warps = max(warps, min(4, power(outer * inner // WARP)))
    if _has_vectors(kernel):
        # Enough of a vector for all threads: else Triton has rows lie as the vector does, through
        # shared memory and back.
        enough = inner // (_widest(kernel) * WARP)
        while outer > 1 and warps > enough >= 1:
            outer, warps = outer // 2, warps // 2
    return Shape("rows", outer, inner, warps)


def _flat(kernel: Kernel) -> Shape:
    """As many elements for each thread as fill its widest access."""
    total = product([axis.size for axis in kernel.outer]).constant
    bytes_ = [buffer.dtype.bytes for buffer in (*kernel.written, *kernel.read)]
    each = max(WIDEST // min(bytes_, default=4), 1) if bytes_ else 4
    if _has_threefry(kernel) or max(bytes_, default=4) >= 8:
        each = min(each, 4)
    warps = 4
    if _moving_loads(kernel) <= 2:
        each *= 2  # more under way, where registers are free
    block = each * warps * WARP
    if total is not None and total < block * PROGRAMS:
        block = max(min(block, power(-(-total // PROGRAMS))), 128)
    return Shape("flat", block, 1, warps)


def _tiles(kernel: Kernel) -> Shape | None:
    turned = transposed(kernel)
    if turned is None:
        return None
    side, _ = turned
    return Shape("tiles", SIDE, SIDE, 8, side)


def _columns(kernel: Kernel, lengths: list[Index]) -> Shape:
    """A program takes rows that lie next to each other, some elements of each at a time."""
    bytes_ = max((buffer.dtype.bytes for buffer in kernel.read), default=4)
    longest = max(length.constant or SLENDER for length in lengths)
    rows = product([axis.size for axis in kernel.outer]).constant
    loops = [statement for stage in kernel.stages if stage.inner for statement in stage.body]
    sums = [s.value.dtype for s in loops if isinstance(s, Accumulate)]
    if power(longest) * _moving_loads(kernel) <= SHORT and DType.F64 not in sums:
        # No two threads share a column: nothing goes through shared memory.
        wide = WIDEST // bytes_ * WARP
        for warps in (4, 2, 1):
            if rows and rows >= wide * warps * PROGRAMS:
                return Shape("rows", wide * warps, power(longest), warps)
    across = ACROSS
    while rows and rows < across * FEWEST_PROGRAMS and across * bytes_ > LEAST_ACROSS:
        across //= 2
    if across < ACROSS:
        return Shape("rows", across, min(power(longest), SLENDER), 8 if longest >= SHARED else 4)
    most = AT_A_TIME // 2 if bytes_ <= 2 else AT_A_TIME
    return Shape(
        "rows", across, min(power(longest), most if sums.count(DType.F64) < 2 else SEVERAL_SUMS), 4
    )


def _weight(kernel: Kernel) -> int:
    """How many values of a row are alive at once, roughly, beyond one or two."""
    count = _moving_loads(kernel)
    return 1 if count <= 2 else 2 if count <= 4 else 4


def _has_vectors(kernel: Kernel) -> bool:
    """Whether all rows read the same elements, as of a weight."""
    inner = {axis for stage in kernel.stages for axis in stage.inner}
    found = (n.index.axes for s in kernel.statements for n in nodes(s) if isinstance(n, Load))
    return any(axes & inner and not axes & set(kernel.outer) for axes in found)


def _widest(kernel: Kernel) -> int:
    """Elements that a thread moves at once, at most."""
    bytes_ = min((buffer.dtype.bytes for buffer in (*kernel.read, *kernel.written)), default=4)
    return min(WIDEST // bytes_, 8)


def _moving_loads(kernel: Kernel) -> int:
    """Loads that differ from one element to the next."""
    inner = {axis for stage in kernel.stages for axis in stage.inner} or set(kernel.outer)
    loads = {n for s in kernel.statements for n in nodes(s) if isinstance(n, Load)}
    return sum(bool(load.index.axes & inner) for load in loads)


def _has_threefry(kernel: Kernel) -> bool:
    """Whether random words are drawn element by element; neighbours share those of Philox."""
    parts = (node for s in kernel.statements for node in nodes(s))
    return any(isinstance(p, Apply) and p.prim in RANDOM - {Prim.PHILOX_ONE} for p in parts)


def side_by_side(kernel: Kernel, shape: Shape) -> int:
    """Elements that a thread moves at once, as Triton lays them out: 8, or 4 at least."""
    each = shape.outer * shape.inner // (WARP * shape.warps)
    return 8 if min(_widest(kernel), each) >= 8 else 4


def is_coarse(kernel: Kernel) -> bool:
    """Whether all floats that it moves, one by one, are of half precision."""
    places: list[tuple[DType, Index]] = [(s.buffer.dtype, s.index) for s in stores_of(kernel)]
    for s in kernel.statements:
        places += [(n.buffer.dtype, n.index) for n in nodes(s) if isinstance(n, Load)]
    inner = {axis for stage in kernel.stages for axis in stage.inner}
    moving = {dtype for dtype, index in places if index.axes & inner or not inner}
    floats = {dtype for dtype in moving if dtype.is_float}
    return bool(floats) and floats <= {DType.F16, DType.BF16}


def is_wide(kernel: Kernel) -> bool:
    """Whether some index needs 64 bits, or may need them."""
    axes = [*kernel.outer, *(a for stage in kernel.stages for a in stage.inner)]
    wholes = [product([axis.size for axis in kernel.outer]), *(axis.size for axis in axes)]
    if any(not _is_small(whole) for whole in wholes):
        return True
    places = [index for s in kernel.statements for index in indices(s)]
    return any(not _fits(index) for index in places)


def _fits(index: Index) -> bool:
    """Whether an index and its parts stay within 32 bits, numbers of the program left out."""
    if not index.axes:
        return True  # of numbers that are handed over alone: these come in 64
    own = Index(tuple(term for term in index.terms if not _is_computed(term[0])))
    bounds = (upper_bound(own), upper_bound(-own))
    if any(bound is None or not _is_small(bound) for bound in bounds):
        return False
    atoms = [atom for term, _ in own.terms for atom in term]
    inner = [atom.value for atom in atoms if isinstance(atom, Quotient | Remainder)]
    return all(map(_fits, inner))


def _is_computed(atoms: tuple[object, ...]) -> bool:
    return any(isinstance(atom, Element) for atom in atoms)


def _is_small(size: Index) -> bool:
    return size.constant is not None and size.constant < INT32


def stores_of(kernel: Kernel) -> list[Store]:
    """Its stores, in order."""
    return [s for s in kernel.statements if isinstance(s, Store)]
