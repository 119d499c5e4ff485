"""A whole kernel in Triton: its programs, its stages, its signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.codegen.triton.borders import Part, Row, row_of
from stator.codegen.triton.emitter import QUARTER, Dim, Emitter, Run
from stator.codegen.triton.online import (
    AT_ONCE,
    close_totals,
    is_online,
    open_totals,
    stores_along,
    take_in,
    together,
)
from stator.codegen.triton.order import enter_stages, read_ahead
from stator.codegen.triton.prims import TYPES, number_text
from stator.codegen.triton.product import product_lines
from stator.codegen.triton.shape import Shape, is_coarse, is_wide, power, shape_of, side_by_side
from stator.core.dtypes import DType
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import (
    Accumulate,
    Combine,
    Const,
    Expr,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    Within,
)
from stator.loops.values import flat, product
from stator.lower.split import neutral
from stator.schedule.coalesce import moved

POINTERS: Final = {
    DType.F64: "*fp64",
    DType.F32: "*fp32",
    DType.F16: "*fp16",
    DType.BF16: "*bf16",
    DType.I64: "*i64",
    DType.I32: "*i32",
    DType.I16: "*i16",
    DType.I8: "*i8",
    DType.U8: "*u8",
    DType.BOOL: "*i8",  # a byte each
}


@dataclass(frozen=True, slots=True)
class Written:
    """A kernel's source, and what its compiler and its launcher must know."""

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]  # parameters and their types
    shape: Shape
    grid: Index


def write_kernel(kernel: Kernel, shape: Shape) -> Written:
    """The kernel, cut into blocks of that shape."""
    kernel = _with_common_axes(kernel)
    match shape.kind:
        case "flat":
            body = _flat(kernel, shape)
        case "tiles":
            body = _tiles(kernel, shape)
        case "product":
            body = _product(kernel, shape)
        case _:
            body = _rows(kernel, shape)
    buffers = [(buffer.name, POINTERS[buffer.dtype]) for buffer in arguments_of(kernel)]
    sizes = [(symbol.name, "i64") for symbol in symbols_of(kernel)]
    parameters = ", ".join(name for name, _ in (*buffers, *sizes))
    # Profilers show the name: the same kernel goes by the same one everywhere.
    name = f"{shape.kind}_{sha256(chr(10).join(body).encode()).hexdigest()[:8]}"
    source = "\n".join((f"def {name}({parameters}):", *body, ""))
    return Written(name, source, (*buffers, *sizes), shape, shape.grid(kernel))


def source_of(kernel: Kernel, shape: Shape | None = None) -> str:
    """The kernel in a shape; without one, in that which the model gives it."""
    return write_kernel(kernel, shape or shape_of(kernel)).source


def _with_common_axes(kernel: Kernel) -> Kernel:
    """Stages over the same lengths go by the same axes: what one loaded, the next one has."""
    known: dict[tuple[Index, ...], tuple[Axis, ...]] = {}
    stages = []
    for stage in kernel.stages:
        axes = known.setdefault(tuple(axis.size for axis in stage.inner), stage.inner)
        place: dict[Leaf, Index] = {
            old: Index.of(new) for old, new in zip(stage.inner, axes, strict=True) if old is not new
        }
        body = tuple(moved(s, place) for s in stage.body) if place else stage.body
        stages.append(Stage(axes, body, stage.in_order))
    return Kernel(kernel.name, kernel.outer, tuple(stages), kernel.shares, kernel.is_list)


def _program(kernel: Kernel) -> str:
    return "tl.program_id(0).to(tl.int64)" if is_wide(kernel) else "tl.program_id(0)"


def _mask(e: Emitter, counter: str, count: Index, block: int) -> str | None:
    """Where a counter is within its bounds; None where it always is."""
    if block == 1 or (count.constant is not None and count.constant % block == 0):
        return None
    return e.let(f"{counter} < {e.index(count)}", "m")


def _flat(kernel: Kernel, shape: Shape) -> list[str]:
    e = Emitter(kernel, (Dim("x", str(shape.outer), None),), is_coarse=is_coarse(kernel))
    e.together = side_by_side(kernel, shape)
    e.line(f"x_ = {_program(kernel)} * {shape.outer} + tl.arange(0, {shape.outer})")
    total = product([axis.size for axis in kernel.outer])
    e.dims = (Dim("x", str(shape.outer), _mask(e, "x_", total, shape.outer)),)
    e.decode(kernel.outer, "x_", "x")
    first = f"{_program(kernel)} * {shape.outer // QUARTER} + "
    _note_run(e, _flat_count(kernel.outer), shape.outer, first)
    for stage in kernel.stages:
        enter_stages(e, shape, [stage])
        _statements(e, stage.body)
    return e.lines


def _note_run(e: Emitter, count: Index, block: int, first: str, at: str = "") -> None:
    """Tell which numbers lie side by side in a block; `first` is where its quarters begin."""
    if block >= QUARTER:
        width = min(e.together, block)
        threads = f"tl.arange(0, {block // width}){at}"
        e.runs[count] = Run(width, f"{first}{threads} * {width // QUARTER}")


def _flat_count(axes: Sequence[Axis]) -> Index:
    """The number of an iteration, the last axis fastest."""
    return flat([Index.of(axis) for axis in axes], [axis.size for axis in axes])


def _tiles(kernel: Kernel, shape: Shape) -> list[str]:
    """Squares of the last axis and another one; the rest of them count the programs."""
    side = shape.side
    assert side is not None, "tiles have two"
    *others, last = kernel.outer
    dims = [Dim("y", str(shape.inner), None), Dim("x", str(shape.outer), None)]
    e = Emitter(kernel, tuple(dims), is_coarse=is_coarse(kernel))
    e.line(f"number_ = {_program(kernel)}")
    dims = []
    for name, axis, block, at in (
        ("y", side, shape.inner, "[:, None]"),
        ("x", last, shape.outer, "[None, :]"),
    ):
        blocks = e.index((axis.size + (block - 1)) // block)
        e.line(f"{name}_ = (number_ % {blocks}) * {block} + tl.arange(0, {block}){at}")
        e.line(f"number_ = number_ // {blocks}")
        dims.append(Dim(name, str(block), _mask(e, f"{name}_", axis.size, block)))
        e.enter(axis, f"{name}_", name)
    e.dims = tuple(dims)
    e.decode([axis for axis in others if axis is not side], "number_", None)
    for stage in kernel.stages:
        enter_stages(e, shape, [stage])
        _statements(e, stage.body)
    return e.lines


def _product(kernel: Kernel, shape: Shape) -> list[str]:
    """The product, then all else at the points of its tile."""
    e = product_lines(kernel, shape)
    for stage in kernel.stages[1:]:
        enter_stages(e, shape, [stage])
        _statements(e, stage.body)
    return e.lines


def _statements(e: Emitter, body: Sequence[Statement]) -> None:
    """One after the other; an accumulator takes in one value: it is that."""
    read_ahead(e, body)
    for statement in body:
        value = e.value(statement.value)
        if isinstance(statement, Store):
            e.store(statement, value)
        else:
            e.accumulated(statement.name, value)


# --- rows ---


def _rows(kernel: Kernel, shape: Shape) -> list[str]:
    row = Dim("r", "1", None)
    e = Emitter(kernel, (Dim("x", str(shape.outer), None), row), is_coarse=is_coarse(kernel))
    e.together = side_by_side(kernel, shape)
    e.line(f"x_ = {_program(kernel)} * {shape.outer} + tl.arange(0, {shape.outer})[:, None]")
    count = product([axis.size for axis in kernel.outer])
    e.dims = (Dim("x", str(shape.outer), _mask(e, "x_", count, shape.outer)), row)
    e.decode(kernel.outer, "x_", "x")
    done: set[int] = set()
    stages = together(kernel.stages)
    for number, stage in enumerate(stages):
        if number in done:
            continue
        following = stages[number + 1] if number + 1 < len(stages) else None
        if following and not shape.is_whole(stage.inner) and is_online(stage, following):
            along = stores_along(kernel, stages, number)
            stores = [s for n in along for s in stages[n].body if isinstance(s, Store)]
            enter_stages(e, shape, [stage, following, *(stages[n] for n in along)])
            _online(e, stage, following, shape.inner, stores)
            done |= {number + 1, *along}
        else:
            enter_stages(e, shape, [stage])
            _stage(e, stage, shape)
        e.dims = (e.dims[0], row)
    return e.lines


def _online(e: Emitter, first: Stage, second: Stage, block: int, stores: Sequence[Store]) -> None:
    """Two stages in one loop: see online.py; `stores` go along, of what the loop has read."""
    largest = first.body[0]
    assert isinstance(largest, Accumulate), "it was looked at"
    e.dims = (e.dims[0], Dim("r", str(block), None))
    open_totals(e, largest.value.dtype)
    _read_outside(e, first)
    stage = Stage(first.inner, (largest, *stores))
    for blocks, enter in _loops(e, stage, block, AT_ONCE):
        taken, scopes = [], []
        for number in range(blocks):
            with e.scope() as scope:  # the axes move on
                e.dims = (e.dims[0], enter(number))
                taken.append(_filled(e, largest, e.value(largest.value)))
                scopes.append(scope)
        for scope in scopes if stores else ():  # behind the loads: a thread waits where it stores
            with e.scope(scope):
                for store in stores:
                    e.store(store, e.value(store.value))
        take_in(e, largest.value.dtype, taken)
    close_totals(e, first, second)


def _loops(
    e: Emitter, stage: Stage, block: int, at_once: int = 1
) -> Iterator[tuple[int, Callable[[int], Dim]]]:
    """The loops along a row, one after the other, each while its lines are written.

    Of each: how many blocks a turn takes, and what enters one of them.
    """
    row = None if stage.in_order else row_of(stage.inner, stage.body, block)
    if row is not None:
        row.begin(e)
        for part in row.parts(block, at_once):
            with e.inside(part.head(block)):
                yield part.blocks, partial(_enter_row, e, row, part, block)
        return
    length = product([axis.size for axis in stage.inner])
    with e.inside(f"for r_ in range(0, {e.index(length)}, {at_once * block}):"):
        yield at_once, partial(_enter_block, e, stage, block, at_once)


def _enter_row(e: Emitter, row: Row, part: Part, block: int, number: int) -> Dim:
    """One of the blocks that a turn takes, counted from a border."""
    count = e.let(f"r_ + {number * block} + tl.arange(0, {block})[None, :]", "q")
    return Dim("r", str(block), row.mask(e, row.enter(e, count), part))


def _enter_block(e: Emitter, stage: Stage, block: int, at_once: int, number: int) -> Dim:
    """One of the blocks that a turn takes, counted from the row's first element."""
    length = product([axis.size for axis in stage.inner])
    start = f"r_ + {number * block} + " if at_once > 1 else "r_ + "
    return _enter_inner(e, stage, length, block, start, at_once)


def _stage(e: Emitter, stage: Stage, shape: Shape) -> None:
    length = product([axis.size for axis in stage.inner])
    if not stage.inner:
        _statements(e, stage.body)
    elif shape.is_whole(stage.inner):
        _whole(e, stage, length, power(length.constant or 1))
    else:
        _looped(e, stage, shape.inner)


def _enter_inner(
    e: Emitter, stage: Stage, length: Index, block: int, start: str = "", blocks: int = 1
) -> Dim:
    """The inner axes of a block, or of one of some that are taken together."""
    name = e.let(f"{start}tl.arange(0, {block})[None, :]", "r")
    e.decode(stage.inner, name, "r")
    first = f"({start}0) // {QUARTER} + " if start else ""
    _note_run(e, _flat_count(stage.inner), block, first, "[None, :]")
    return Dim("r", str(block), _mask(e, name, length, blocks * block))


def _whole(e: Emitter, stage: Stage, length: Index, block: int) -> None:
    """One block: accumulators are there at once."""
    if stage.inner not in e.rows:  # no earlier stage went over the same axes
        e.rows[stage.inner] = _enter_inner(e, stage, length, block)
    e.dims = (e.dims[0], e.rows[stage.inner])
    read_ahead(e, stage.body)
    totals = {}
    for statement in stage.body:
        value = e.value(statement.value)
        if isinstance(statement, Store):
            e.store(statement, value)
            continue
        taken, name = _filled(e, statement, value), combiner(statement)
        total = f"reduced({taken}, 1, {name}, keep_dims=True)"
        if stage.in_order:
            totals[statement] = total
            total = f"scanned({taken}, 1, {name})"
        e.accumulated(statement.name, _narrowed(e, statement, e.let(total, "acc")))
    for statement, total in totals.items():  # what later stages read of a scan
        e.accumulated(statement.name, _narrowed(e, statement, e.let(total, "acc")))


def _looped(e: Emitter, stage: Stage, block: int) -> None:
    """Block after block: totals of each element of a block, combined behind the loop."""
    sums = [s for s in stage.body if isinstance(s, Accumulate)]
    e.dims = (e.dims[0], Dim("r", str(block), None))
    shape = e.shape(("x",) if stage.in_order else ("x", "r"))
    names = {s.name: f"{s.name}_total" for s in sums}
    for own in sums:
        e.line(f"{names[own.name]} = {_full(shape, own)}")
    _read_outside(e, stage)
    for blocks, enter in _loops(e, stage, block, _at_once(stage)):
        scopes = []
        for number in range(blocks):
            with e.scope() as scope:
                e.dims = (e.dims[0], enter(number))
                if blocks > 1:  # all are under way before the first is waited for
                    _read_early(e, stage)
                scopes.append(scope)
        for scope in scopes:
            with e.scope(scope):
                _looped_body(e, stage, names)
    for own in sums:
        total = names[own.name]
        if not stage.in_order:
            total = e.let(f"reduced({total}, 1, {combiner(own)}, keep_dims=True)", "acc")
        e.accumulated(own.name, _narrowed(e, own, total))


def _looped_body(e: Emitter, stage: Stage, names: Mapping[str, str]) -> None:
    """One block of the row; `names` are those of the totals."""
    read_ahead(e, stage.body)
    for s in stage.body:
        value = e.value(s.value)
        if isinstance(s, Store):
            e.store(s, value)
            continue
        taken, total, name = _filled(e, s, value), names[s.name], combiner(s)
        if stage.in_order:
            running = e.let(f"scanned({taken}, 1, {name})")
            e.accumulated(s.name, _narrowed(e, s, e.let(f"{name}({total}, {running})")))
            e.line(f"{total} = {name}({total}, reduced({taken}, 1, {name}, keep_dims=True))")
        else:
            e.line(f"{total} = {name}({total}, {taken})")


def _at_once(stage: Stage) -> int:
    """Blocks that a turn takes: several where it only moves, and holds little."""
    moving = [load for load in _met(stage) if load.index.axes & set(stage.inner)]
    is_move = all(isinstance(s, Store) for s in stage.body)
    return AT_ONCE if is_move and len(moving) <= 1 else 1


def _read_outside(e: Emitter, stage: Stage) -> None:
    """Read what stays the same along the inner axes, once."""
    stored = {s.buffer for s in stage.body if isinstance(s, Store)}
    stored |= {read for written, read in e.kernel.shares if written in stored}
    for load in _met(stage):
        if not load.index.axes & set(stage.inner) and load.buffer not in stored:
            e.value(load)


def _read_early(e: Emitter, stage: Stage) -> None:
    """Read what the stage does not make itself; what it stores over, it stores later."""
    made = {s.buffer for s in stage.body if isinstance(s, Store)}
    for load in _met(stage):
        if load.buffer not in made:
            e.value(load)


def _met(stage: Stage) -> list[Load]:
    """Loads of a stage that come to pass at every point: not those behind a choice."""
    found: dict[Expr, None] = {}
    stack = [s.value for s in stage.body]
    while stack:
        part = stack.pop()
        if part not in found and not isinstance(part, Within):
            found[part] = None
            stack += part.operands
    return [part for part in found if isinstance(part, Load)]


def _full(shape: str, statement: Accumulate) -> str:
    """A block of the number that changes nothing."""
    start = neutral(statement.combine, statement.value.dtype)
    assert isinstance(start, Const), "a number"
    dtype = _total_type(statement)
    return f"tl.full({shape}, {number_text(start.value, dtype)}, {TYPES[dtype]})"


def _total_type(statement: Accumulate) -> DType:
    """Few bits are combined in more: the hardware has no less."""
    dtype = statement.value.dtype
    return dtype if dtype.is_float or dtype is DType.I64 else DType.I32


def _filled(e: Emitter, statement: Accumulate, value: str) -> str:
    """A full block of what is accumulated: the neutral number beyond the end."""
    dtype = _total_type(statement)
    if statement.value.dtype is not dtype:
        value = e.let(f"{value}.to({TYPES[dtype]})")
    value = f"tl.broadcast_to({value}, {e.shape(('x', 'r'))})"
    _, dim = e.dims
    if dim.mask is None:
        return e.let(value)
    return e.let(f"tl.where({dim.mask}, {value}, {_full(e.shape(()), statement)})")


def _narrowed(e: Emitter, statement: Accumulate, total: str) -> str:
    dtype = statement.value.dtype
    if dtype is DType.BOOL:
        return e.let(f"{total} != 0")
    return total if dtype is _total_type(statement) else e.let(f"{total}.to({TYPES[dtype]})")


def combiner(statement: Accumulate) -> str:
    """The function of device.py that combines two of its values."""
    match statement.combine:
        case Combine.SUM:
            return "add"
        case Combine.PROD:
            return "multiply"
        case Combine.ANY:
            return "larger"
        case Combine.ALL:
            return "smaller"
    nan = "_or_nan" if statement.value.dtype.is_float else ""
    return ("larger" if statement.combine is Combine.MAX else "smaller") + nan
