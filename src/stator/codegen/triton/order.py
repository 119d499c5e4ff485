"""Where the threads of a program wait for each other, for the sake of memory that they share.

A thread sees in order what it reads and stores itself.  What another one stores it sees behind a
barrier alone, and where it reads what another one will store over, a barrier has to come first.

Triton spreads the elements of a block over threads anew for every access: at a store as many side
by side go to a thread as its own place allows, at a load as many as any access allows that goes
with it.  So a thread stores what it read itself, and nothing else, if

- load and store are at the same place, and in the same block: it is read there and held;
- the block has an element for each thread: of fewer, several threads read each, and one stores it;
- nothing goes with the load that would spread it wider than the store.

There threads need not wait.  Everywhere else they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from stator.codegen.triton.borders import row_of
from stator.codegen.triton.emitter import Emitter
from stator.codegen.triton.shape import WARP, WIDEST, Shape, power
from stator.loops.access import nodes
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Kernel, Load, Stage, Statement, Store
from stator.loops.values import product


def enter_stages(e: Emitter, shape: Shape, stages: Sequence[Stage]) -> None:
    """Begin with stages that go together; all threads arrive first, if others move the same."""
    statements = [s for stage in stages for s in stage.body]
    loaded = {e.memory(load.buffer) for s in statements for load in _loads(s)}
    stored = _stored(statements)
    if loaded & e.stored or stored & (e.read | e.stored):
        wait(e)
    e.own = frozenset(
        load for stage in stages for s in stage.body for load in _own(e.kernel, shape, stage, s)
    )


def read_ahead(e: Emitter, body: Sequence[Statement]) -> None:
    """Read what lies in memory that these statements store to, before they do."""
    stored = _stored(body)
    for load in dict.fromkeys(load for s in body for load in _loads(s)):
        if load.buffer not in stored and e.memory(load.buffer) in stored:
            e.value(load)
    if stored & e.read:
        wait(e)


def wait(e: Emitter) -> None:
    """Let all threads of the program arrive."""
    e.line("tl.debug_barrier()")
    e.read.clear()
    e.stored.clear()


def _loads(statement: Statement) -> list[Load]:
    return [node for node in nodes(statement) if isinstance(node, Load)]


def _stored(statements: Sequence[Statement]) -> set[Buffer]:
    return {s.buffer for s in statements if isinstance(s, Store)}


def _own(kernel: Kernel, shape: Shape, stage: Stage, statement: Statement) -> list[Load]:
    """Loads of what is stored over later, by the thread alone that has read it."""
    over = {old: new for new, old in kernel.shares}
    homes = {s.buffer: (h, s) for h in kernel.stages for s in h.body if isinstance(s, Store)}
    return [
        load
        for load in _loads(statement)
        if load.buffer in over and _is_own(kernel, shape, (stage, load), homes[over[load.buffer]])
    ]


def _is_own(
    kernel: Kernel, shape: Shape, read: tuple[Stage, Load], written: tuple[Stage, Store]
) -> bool:
    """Whether every thread stores the elements that it alone has read."""
    (stage, load), (home, store) = read, written
    is_held = not stage.inner or shape.is_whole(stage.inner)
    if stage is not home and not (is_held and stage.inner == home.inner):
        return False
    axes = {*kernel.outer, *stage.inner}
    if load.index is not store.index or not axes or not axes <= load.index.axes:
        return False
    each = _elements(shape, stage) // (WARP * shape.warps)
    return each >= 1 and _is_spread_alike(kernel, shape, stage, load, each)


def _elements(shape: Shape, stage: Stage) -> int:
    """Of a block; 0 where threads change what they hold on the way, as in a product."""
    return 0 if shape.kind == "product" else shape.outer * _along(shape, stage)


def _along(shape: Shape, stage: Stage) -> int:
    """Elements of a block along the other dimension than that of the last outer axis."""
    if shape.kind != "rows" or not shape.is_whole(stage.inner):
        return shape.inner
    return power(product([axis.size for axis in stage.inner]).constant or 1)


def _is_spread_alike(kernel: Kernel, shape: Shape, stage: Stage, load: Load, each: int) -> bool:
    """Whether the load and a store at its place give a thread the same elements of a block.

    They do where all that moves lies at this place, and where the place itself allows as much at
    once as anything else could have.
    """
    moved = [(n.buffer.dtype.bytes, n.index) for s in kernel.statements for n in _loads(s)]
    moved += [(s.buffer.dtype.bytes, s.index) for s in kernel.statements if isinstance(s, Store)]
    moved = [(bytes_, index) for bytes_, index in moved if index.axes]
    own = load.buffer.dtype.bytes
    if all(bytes_ == own and index is load.index for bytes_, index in moved):
        return True
    most = min(WIDEST // min(bytes_ for bytes_, _ in moved), each)
    return WIDEST // own >= most and _lies_in_line(kernel, shape, stage, load.index, most)


def _lies_in_line(kernel: Kernel, shape: Shape, stage: Stage, index: Index, count: int) -> bool:
    """Whether elements lie side by side, so many at least, and begin at a multiple of as many."""
    if shape.kind == "rows" and stage.inner and not shape.is_whole(stage.inner):
        row = row_of(stage.inner, stage.body, shape.inner)
        if row is not None:
            return index in row.places and row.width >= count
    lines = _lines(kernel, shape, stage)
    fastest = [axis for axis in lines if index.factor_of(axis) is Index.of(1)]
    if len(fastest) != 1:
        return False
    (fast,) = fastest
    block, length = lines[fast]
    fits = length is None or (length.constant is not None and length.constant % count == 0)
    in_steps = all(factor % count == 0 for _, factor in (index - fast).terms)
    return block >= count and fits and in_steps


def _lines(kernel: Kernel, shape: Shape, stage: Stage) -> dict[Axis, tuple[int, Index | None]]:
    """Axes along which a block runs, how far, and after how many elements another line begins.

    None: never, for nothing else lies along that dimension.
    """
    if shape.kind == "tiles":
        assert shape.side is not None, "tiles have two"
        return {shape.side: (shape.inner, None), kernel.outer[-1]: (shape.outer, None)}
    groups = ((kernel.outer, shape.outer), (stage.inner, _along(shape, stage)))
    return {
        axes[-1]: (block, axes[-1].size if len(axes) > 1 else None)
        for axes, block in groups
        if axes
    }
