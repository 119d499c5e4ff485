"""From a graph to loops: one rule an operator; what has no rule stays with torch.

Values are lazy: an operator gives a function from a point to an expression, and its reader inlines
it.  A value is computed into memory where somebody needs the tensor itself, or where several
readers would compute something dear again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from stator.core import faults
from stator.core.dtypes import DType, from_torch
from stator.core.fuel import Fuel
from stator.graph.edit import KEPT
from stator.loops.build import Body, apply, cast, const
from stator.loops.half import TO_HALF, rounded
from stator.loops.index import Axis, Index, Symbol
from stator.loops.ir import Buffer, Combine, Expr, IndexValue, Load, loads_of
from stator.loops.prims import Prim
from stator.loops.values import Point, Result, Updates, Value, broadcast, product
from stator.lower.eager_bits import has_eager_bits
from stator.lower.items import Check, Compute, Extern, Item, Scatter, Size, place_of, without_unread
from stator.lower.numbers import Number, number_of
from stator.lower.realize import (
    FEW_LINKS,
    MOST_LINKS,
    MOST_LOADS,
    MOST_READ,
    is_dear,
    is_large,
    is_tangled,
    is_worth_keeping,
)
from stator.lower.sizes import Shown, Sizes
from stator.lower.split import in_pieces, in_pieces_on_a_gpu
from stator.lower.target import ON_THE_CPU, Target
from stator.lower.tensors import (
    axes_of,
    contiguous,
    extent,
    from_memory,
    layout_of,
    like_sources,
    point_of,
    result_of,
    stored,
    why_unsupported,
)
from stator.ops import table
from stator.ops.table import Pointwise, Promotion
from stator.torch_api import is_mutable_op


class NoKernelError(Exception):
    """What a rule makes of its arguments cannot run on the target; the text says why."""


@dataclass(frozen=True, slots=True)
class _Loops:
    """The axes of one computation."""

    name: str
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...] = ()
    combine: Combine | None = None
    scan: Axis | None = None


@dataclass(slots=True)
class Lowering:
    """Walks one graph; also the builder that operators are written with."""

    module: fx.GraphModule
    items: list[Item] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    links: dict[fx.Node, int] = field(default_factory=dict)
    real: set[fx.Node] = field(default_factory=set)  # nodes whose tensor exists at run time
    reasons: dict[str, str] = field(default_factory=dict)  # node -> why torch executes it
    sizes: Sizes = field(default_factory=Sizes)
    fuel: Fuel = field(default_factory=Fuel)  # for operators that become loops
    as_eager: bool = False  # eager's own bits, or no kernel
    target: Target = ON_THE_CPU
    count: int = 0
    current: fx.Node | None = None  # the one that is being lowered
    makers: dict[str, fx.Node] = field(default_factory=dict)  # of buffers that no node is called as

    def run(self) -> list[Item]:
        """Lower every node, in order."""
        for node in self.module.graph.find_nodes(op="placeholder"):
            self.sizes.learn(node)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._take(node)
                if node.op == "get_attr":
                    self.items.append(Extern(node))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                for source in node.all_input_nodes:
                    self.realize(source)
                self.items = without_unread(self.items, {n.name for n in node.all_input_nodes})
        return self.items

    # --- what operators use ---

    def reduce(
        self,
        combine: Combine,
        size: Sequence[Index],
        inner: Sequence[Index],
        body: Callable[[Point, Point], Expr],
    ) -> Value:
        """A reduction, computed into a buffer of its own; to few results in two steps."""
        if self.target.uses_triton:
            across = _lies_across(size, inner, body)
            pieces = in_pieces_on_a_gpu(combine, size, inner, body, across=across)
        else:
            across, pieces = False, in_pieces(combine, size, inner, body)
        if pieces is not None:
            count = Index.of(pieces.count)
            # Results that lie next to each other stay so: the pieces come first there.
            cut = -1 if not across else 0
            rest = slice(None, -1) if not across else slice(1, None)
            parts = self._reduced(
                combine,
                [count, *size] if across else [*size, count],
                [Index.of(pieces.length)],
                lambda kept, place: pieces.body(kept[rest], kept[cut], place[0]),
            )

            def part(kept: Point, piece: Point) -> Expr:
                return parts.load((*piece, *kept) if across else (*kept, *piece))

            inner, body = [count], part
        return self._reduced(combine, size, inner, body)

    def _reduced(
        self,
        combine: Combine,
        size: Sequence[Index],
        inner: Sequence[Index],
        body: Callable[[Point, Point], Expr],
    ) -> Value:
        name = self._name("sum" if combine is Combine.SUM else combine.value)
        axes = axes_of(name, "r", inner)
        single = all(axis.size.constant == 1 for axis in axes)  # of one element: that element
        outer = axes_of(name, "o", size)
        loops = _Loops(name, outer) if single else _Loops(name, outer, axes, combine)
        value = body(point_of(outer), point_of(axes))
        return self._compute(loops, value, value.dtype)

    def keep(self, value: Value) -> Value:
        """A value, computed once into a buffer of its own."""
        name = self._name("kept")
        loops = _Loops(name, axes_of(name, "o", value.size))
        expr = value.load(point_of(loops.outer))
        return self._compute(loops, expr, value.dtype, like_sources(expr, loops.outer))

    def scan(self, combine: Combine, value: Value, dim: int) -> Value:
        """Running totals along `dim`, in the type of `value`."""
        if value.size[dim].constant == 1:
            return self.keep(value)
        name = self._name(f"running_{combine.value}")
        outer = axes_of(name, "o", value.size)
        loops = _Loops(name, outer, combine=combine, scan=outer[dim])
        return self._compute(loops, value.load(point_of(outer)), value.dtype)

    def scatter(self, into: Value, updates: Updates) -> Value:
        """A copy of `into` that took in `updates`."""
        if self.target.uses_triton:
            _refuse_scatter(into.dtype, updates.combine)
        name = self._name("scattered")
        loops = _Loops(name, axes_of(name, "o", into.size))
        result = self._compute(loops, into.load(point_of(loops.outer)), into.dtype)
        axes = axes_of(name, "u", updates.size)
        point = point_of(axes)
        place = place_of(updates.place(point), contiguous(into.size))
        buffer = Buffer(name, into.dtype, extent(into.size, contiguous(into.size)))
        value = cast(updates.value(point), into.dtype.computed_in)
        self.items.append(Scatter(buffer, axes, place, value, updates.combine))
        return result

    def require(self, holds: Value, error: type[Exception], message: str) -> None:
        """Raise `error` at run time unless every element of `holds` is true."""

        def broken(_: Point, point: Point) -> Expr:
            return apply(Prim.WHERE, holds.load(point), const(0, DType.I32), const(1, DType.I32))

        flag = self.reduce(Combine.MAX, [], holds.size, broken).load(())
        assert isinstance(flag, Load), "a reduction lies in memory"
        self.items.append(Check(flag.buffer.name, error, message))

    def handed(self, number: int) -> Index:
        """A number as a symbol, like a size."""
        symbol = Symbol(f"number_{number}")
        self.sizes.sources[symbol] = Shown(None, start=number)
        self.sizes.hints[symbol] = number
        return Index.of(symbol)

    def _name(self, hint: str) -> str:
        self.count += 1
        name = f"_{hint}{self.count}"
        if self.current is not None:
            self.makers[name] = self.current
        return name

    def _compute(
        self, loops: _Loops, value: Expr, dtype: DType, stride: tuple[Index, ...] | None = None
    ) -> Value:
        """Loops that store `value`; the tensor that they leave in memory."""
        size = tuple(axis.size for axis in loops.outer)
        stride = contiguous(size) if stride is None else stride
        buffer = Buffer(loops.name, dtype, extent(size, stride))
        value = cast(value, dtype.computed_in)
        if self.as_eager:  # whoever shares the loop reads what was stored before it is rounded
            value = _half_of_eager(value, dtype)
        self.items.append(
            Compute(
                buffer, size, stride, loops.outer, loops.inner, loops.combine, value, loops.scan
            )
        )
        return stored(buffer, size, stride)

    # --- nodes ---

    def _take(self, node: fx.Node) -> None:
        self.real.add(node)
        self._remember(node)

    def _remember(self, node: fx.Node) -> None:
        """What is known of a node that exists at run time: its tensor in memory, or its size."""
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt):
            index = self.sizes.index(meta)
            if index is not None:
                self.values[node] = index
        elif why_unsupported(meta, self.sizes, self.target.device) is None:
            self.values[node] = from_memory(node, self.sizes)

    def _call(self, node: fx.Node) -> None:
        self.current = node
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            part = self.values[node.args[0]][node.args[1]]
            if part is not None:
                self.values[node] = part
                self._keep_if_dear(node)
                return
        if isinstance(node.meta.get("val"), torch.SymInt):
            index = self.sizes.index(node.meta["val"])
            if index is not None:
                self.values[node] = index
                return
        number = number_of(node, self.values, self._require_one)
        if number is not None:
            self.values[node] = self._computed_once(number)
            return
        reason = self._why_extern(node)
        value, count = None, len(self.items)
        if reason is None:
            value, reason = self._lowered(node)
            if faults.SET:
                value = faults.strike("lower", value, node)
        if value is None:
            self._extern(node, reason)
        else:
            self.values[node] = _rounded_to_half(value) if self.as_eager else value
            self._adopt(node, self.items[count:])
            self._keep_if_dear(node)
            if self._frees_a_call(node):
                self.realize(node)

    def _frees_a_call(self, node: fx.Node) -> bool:
        """Whether it copies what a library made, for the caller alone: at once, so that that dies.

        Gradients of convolutions lie otherwise than parameters do; until the end of the backward
        they would be there beside all that it still reads.
        """
        if node.target is not torch.ops.aten.clone.default or any(
            user.op != "output" for user in node.users
        ):
            return False
        source = node.all_input_nodes[0]
        return source in self.real and source.op == "call_function" and len(source.users) == 1

    def _lowered(self, node: fx.Node) -> tuple[Any, str | None]:
        """What the node's rule makes of it; or None and the reason."""
        count = len(self.items)
        try:
            value = self._rule(node)
        except NoKernelError as error:
            del self.items[count:]
            return None, str(error)
        if value is None:
            return None, "its rule does not take these arguments"
        reason = self._why_too_wide(node, value)
        if reason is not None:
            del self.items[count:]
        return (None, reason) if reason is not None else (value, None)

    def _require_one(self, holds: Expr, error: type[Exception], message: str) -> None:
        self.require(Value((), DType.BOOL, lambda _: holds), error, message)

    def _computed_once(self, number: Number) -> Number:
        """The number, in memory if to compute it for each element would be dear."""
        return self._kept_number(number) if is_dear(number.expr) else number

    def _kept_number(self, number: Number) -> Number:
        return Number(self.keep(Value((), DType.F64, lambda _: number.expr)).load(()))

    def _adopt(self, node: fx.Node, made: list[Item]) -> None:
        """Let the tensor that its rule scattered into be the node's own: that saves a copy."""
        value = self.values[node]
        if not isinstance(value, Value) or len(made) < 2:
            return
        before, scatter = made[-2:]
        if not isinstance(before, Compute) or not isinstance(scatter, Scatter):
            return
        size, stride = layout_of(node.meta["val"], self.sizes)
        point = point_of(axes_of("probe", "o", size))
        own = Load(scatter.value.dtype, scatter.buffer, place_of(point, stride))
        if value.load(point) is not own or value.dtype is not scatter.buffer.dtype:
            return
        if stride == contiguous(size):
            buffer = replace(scatter.buffer, name=node.name)
            self.items[-2:] = [replace(before, buffer=buffer), replace(scatter, buffer=buffer)]
            self.values[node] = stored(buffer, size, stride)
            self.real.add(node)

    def _why_extern(self, node: fx.Node) -> str | None:
        """None if there is a rule and all values are of kinds that loops know."""
        target = node.target
        known = (table.POINTWISE, table.RULES, table.VIEW_RULES)
        if not any(target in rules for rules in known):
            return "no rule"
        if self.as_eager and not has_eager_bits(node):
            return "Options.numerics: its kernel does not give eager's bits"
        results = node.meta.get("val")
        several = isinstance(results, tuple | list)
        read = _parts_read(node) if several else {0}
        for position, result in enumerate(results if several else (results,)):
            reason = why_unsupported(result, self.sizes, self.target.device)
            absent = several and (result is None or reason == "no elements")
            if reason is not None and not (absent and position not in read):
                return reason
        for source in node.all_input_nodes:
            taken = Value | Index | Number if target in table.POINTWISE else Value | Index
            if not isinstance(self.values.get(source), taken):
                return f"{source.name} is not a tensor that loops can read"
        return None if self.fuel.spend(f"{target}: {node.name}") else "Options.kernel_fuel"

    def _rule(self, node: fx.Node) -> Any:
        args = fx.map_arg(node.args, self._current)
        kwargs = fx.map_arg(dict(node.kwargs), self._current)
        meta = node.meta["val"]
        if node.target in table.POINTWISE:
            return self._pointwise(table.POINTWISE[node.target], node, args, kwargs)
        rules = table.RULES if node.target in table.RULES else table.VIEW_RULES
        if isinstance(meta, tuple | list):
            read = _parts_read(node)
            result: Any = tuple(
                m if m is None else replace(result_of(m, self.sizes), is_read=number in read)
                for number, m in enumerate(meta)
            )
        else:
            result = result_of(meta, self.sizes)
        return rules[node.target](self, result, *args, **kwargs)

    def _current(self, node: fx.Node) -> Value | Index | Number:
        """A value that follows the node: once it is in memory, it is read from there."""
        value: Value | Index | Number = self.values[node]
        if not isinstance(value, Value):
            return value
        return Value(value.size, value.dtype, lambda point: self.values[node].load(point))

    def _pointwise(self, op: Pointwise, node: fx.Node, args: Any, kwargs: Any) -> Value | None:
        result = result_of(node.meta["val"], self.sizes)
        kind = _kind(op, node, result)
        if kind is None:
            return None
        body = Body()
        half = _half_of(op, node)
        leaves_half = result.dtype not in TO_HALF  # compared, say: as memory would hold it

        def load(point: Point) -> Expr:
            def at(value: Any) -> Any:
                if isinstance(value, Index):
                    return cast(IndexValue(DType.I64, value), kind)
                if isinstance(value, Number):
                    if half is not None:
                        raise NotImplementedError("loops do not round numbers to half precision")
                    return cast(value.expr, kind)
                if not isinstance(value, Value):
                    return _rounded(value, half) if half is not None else value
                loaded = broadcast(value, result.size).load(point)
                if leaves_half:
                    loaded = rounded(loaded, value.dtype)
                wanted = value.dtype.computed_in if op.promotion is Promotion.NONE else kind
                return cast(loaded, wanted)

            given = [at(arg) for arg in args]
            named = {name: at(arg) for name, arg in kwargs.items()}
            return cast(op.body(body, *given, **named), result.dtype.computed_in)

        try:
            load(tuple(Index.of(0) for _ in result.size))
        except (TypeError, NotImplementedError, OverflowError, ValueError):
            return None  # arguments that the formula has no place for
        return Value(result.size, result.dtype, load)

    # --- memory ---

    def _keep_if_dear(self, node: fx.Node) -> None:
        value = self.values[node]
        if not isinstance(value, Value):
            return
        self.links[node] = 1 + max((self._links(s) for s in node.all_input_nodes), default=0)
        is_view = node.target in table.VIEW_RULES
        if is_view and self.links[node] <= FEW_LINKS:
            return  # a view computes nothing: its source was asked
        expr = value.load(point_of(axes_of("probe", "o", value.size)))
        if self.links[node] > MOST_LINKS or is_tangled(expr):
            self.realize(node)
            if is_view:
                self._remember(node)
        elif not is_view and not isinstance(expr, Load):
            # A single dear number is computed once, not for each element of what reads it.
            again = product(value.size).constant == 1 or _readers(node) > 1
            if is_large(expr) or (again and is_worth_keeping(expr)) or _is_kept(node):
                self.realize(node)

    def _why_too_wide(self, node: fx.Node, value: Any) -> str | None:
        """Why one kernel should not read all that a value is made of; None where it may."""
        if not isinstance(value, Value) or len(node.all_input_nodes) * MOST_LOADS <= MOST_READ:
            return None
        expr = value.load(point_of(axes_of("probe", "o", value.size)))
        count = len({load.buffer for load in loads_of(expr)})
        return f"it reads {count} tensors: {MOST_READ} are enough" if count > MOST_READ else None

    def _links(self, node: fx.Node) -> int:
        """How many values are computed one inside of the other, from memory to this one."""
        return 0 if node in self.real else self.links.get(node, 0)

    def realize(self, node: fx.Node) -> None:
        """See to it that the node's tensor exists at run time."""
        if node in self.real:
            return
        value = self.values[node]
        if isinstance(value, tuple) and node.target not in table.VIEW_RULES:
            for user in node.users:
                self.realize(user)
            return
        self.real.add(node)
        if isinstance(value, Index):
            self.items.append(Size(node.name, value))
            return
        if isinstance(value, Number) or _is_view(node):
            for source in node.all_input_nodes:
                self.realize(source)
            self.items.append(Extern(node))
            return
        loops = _Loops(node.name, axes_of(node.name, "o", value.size))
        expr, tensor = value.load(point_of(loops.outer)), node.meta["val"]
        stride = layout_of(tensor, self.sizes)[1]
        dtype = result_of(tensor, self.sizes).dtype
        if faults.SET:
            stride, dtype = faults.strike("layout", (stride, dtype), node)
        self.values[node] = self._compute(loops, expr, dtype, stride)

    def _extern(self, node: fx.Node, reason: str | None) -> None:
        if is_mutable_op(node.target):
            self._realize_pending(node)
        for source in node.all_input_nodes:
            self.realize(source)
        self.items.append(Extern(node, reason))
        self.real.add(node)
        if reason is not None:
            self.reasons[node.name] = reason
        self._remember(node)

    def _realize_pending(self, writer: fx.Node) -> None:
        """Compute what is still to be computed: `writer` may overwrite what it is made from."""
        for node, value in list(self.values.items()):
            number = isinstance(value, Number)
            if not number and (node in self.real or not isinstance(value, Value)):
                continue  # in memory: asked first, since every call that writes looks at all
            if not any(user not in self.values and user not in self.real for user in node.users):
                continue
            if number and loads_of(value.expr):
                self.values[node] = self._kept_number(value)
            self.realize(node)


def _lies_across(
    size: Sequence[Index], inner: Sequence[Index], body: Callable[[Point, Point], Expr]
) -> bool:
    """Whether results of a reduction lie closer in memory than the elements of one."""
    outer, axes = axes_of("probe", "o", size), axes_of("probe", "r", inner)
    results = [axis for axis in outer if axis.size.constant != 1]
    loads = loads_of(body(point_of(outer), point_of(axes)))
    moving = [load.index for load in loads if load.index.axes & set(axes)]
    steps = {index.factor_of(results[-1]) for index in moving} if results else set()
    return Index.of(1) in steps and steps <= {Index.of(0), Index.of(1)}


def _refuse_scatter(dtype: DType, combine: Combine | None) -> None:
    """Threads meet at an element in any order: the hardware must combine, and without error."""
    if combine is None:
        return
    if torch.are_deterministic_algorithms_enabled():
        raise NoKernelError("atomic additions come in any order")
    wide = dtype in (DType.F32, DType.F64, DType.I32, DType.I64)
    exact = combine is Combine.SUM or (combine in (Combine.MAX, Combine.MIN) and not dtype.is_float)
    if not wide or not exact:
        raise NoKernelError(f"no atomic {combine.value} of {dtype!r}")


def _rounded_to_half(value: Any) -> Any:
    """Values of half precision as they would be in memory: eager rounds after every operator."""
    if isinstance(value, tuple):
        return tuple(_rounded_to_half(part) for part in value)
    if not isinstance(value, Value) or value.dtype not in TO_HALF:
        return value
    return Value(value.size, value.dtype, lambda p: _half_of_eager(value.load(p), value.dtype))


def _half_of_eager(expr: Expr, dtype: DType) -> Expr:
    """`expr` rounded to half precision, if that is the type."""
    is_stored = isinstance(expr, Load) and expr.buffer.dtype is dtype  # rounded, as all is
    return expr if is_stored else rounded(expr, dtype)


def _kind(op: Pointwise, node: fx.Node, result: Result) -> DType | None:
    """The type that the operator computes in."""
    if op.promotion is not Promotion.INPUTS:
        return result.dtype.computed_in
    tensors: list[Any] = [
        arg.meta["val"] if isinstance(arg, fx.Node) else arg
        for arg in node.args
        if isinstance(arg, fx.Node | int | float | bool)
    ]
    # Of a number its kind is asked, not its value, which would become a guard.
    tensors = [1.0 if isinstance(value, torch.SymFloat) else value for value in tensors]
    promoted = tensors[0].dtype if len(tensors) == 1 else torch.result_type(*tensors[:2])
    found = from_torch(promoted)
    return None if found is None else found.computed_in


def _half_of(op: Pointwise, node: fx.Node) -> torch.dtype | None:
    """The half-precision type that the operator rounds its numbers to; None if it does not."""
    if op.promotion not in (Promotion.INPUTS, Promotion.ROUNDED):
        return None
    values = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    found = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return next((d for d in found if d in (torch.bfloat16, torch.float16)), None)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype).item() if isinstance(value, float) else value


def _is_view(node: fx.Node) -> bool:
    """Whether torch's own result costs nothing: a view, or a part of a tensor that was split."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target in table.VIEW_RULES


def _parts_read(node: fx.Node) -> set[int]:
    """The positions of those of a node's several results that somebody reads."""
    if any(user.target is not operator.getitem for user in node.users):
        return set(range(len(node.meta["val"])))
    return {user.args[1] for user in node.users}


def _readers(node: fx.Node) -> int:
    """How many nodes read the value, seen through views."""
    count, stack = 0, list(node.users)
    while stack:
        user = stack.pop()
        if user.target in table.VIEW_RULES:
            stack += user.users
        else:
            count += 1
    return count


def _is_kept(node: fx.Node) -> bool:
    """Whether the value is in memory for others in any case, so that its readers had best load it.

    It is if it is returned and read here too, or if a backward computes it to keep it for a while.
    """
    returned = any(user.op == "output" for user in node.users)
    return bool(node.meta.get(KEPT)) or (returned and len(node.users) > 1)
