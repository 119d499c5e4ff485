"""From a graph to loops: one rule an operator; what has no rule stays with torch.

Values are lazy: an operator gives a function from a point to an expression, and its reader inlines
it.  A value is computed into memory where somebody needs the tensor itself, or where several
readers would compute something dear again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import DType, from_torch
from stator.loops.build import Body, cast
from stator.loops.index import Axis, Index
from stator.loops.ir import Apply, Buffer, Combine, Expr, Load, loads_of, walk
from stator.loops.prims import Prim
from stator.loops.values import Point, Result, Value, broadcast
from stator.lower.items import Compute, Extern
from stator.ops import table
from stator.ops.table import Pointwise, Promotion
from stator.torch_api import is_fake, is_mutable_op

MOST_LOADS: Final = 12  # of one expression; beyond, a value is computed into memory
MOST_OPERATIONS: Final = 60
CHEAP: Final = 2  # operations that are rather done again than stored and read

_DEAR: Final = frozenset(prim for prim in Prim if prim.value > Prim.FMA.value) | {
    Prim.DIV,
    Prim.SQRT,
}


@dataclass(frozen=True, slots=True)
class _Loops:
    """The axes of one computation."""

    name: str
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...] = ()
    combine: Combine | None = None


@dataclass(slots=True)
class Lowering:
    """Walks one graph; also the builder that operators are written with."""

    module: fx.GraphModule
    items: list[Compute | Extern] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    real: set[fx.Node] = field(default_factory=set)  # nodes whose tensor exists at run time
    reasons: dict[str, str] = field(default_factory=dict)  # node -> why torch executes it
    count: int = 0

    def run(self) -> list[Compute | Extern]:
        """Lower every node, in order."""
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
        return self.items

    # --- what operators use ---

    def reduce(
        self,
        combine: Combine,
        size: Sequence[Index],
        inner: Sequence[Index],
        body: Callable[[Point, Point], Expr],
    ) -> Value:
        """A reduction, computed into a buffer of its own."""
        name = self._name("sum" if combine is Combine.SUM else combine.value)
        axes = _axes(name, "r", inner)
        single = all(axis.size.constant == 1 for axis in axes)  # of one element: that element
        outer = _axes(name, "o", size)
        loops = _Loops(name, outer) if single else _Loops(name, outer, axes, combine)
        value = body(_points(outer), _points(axes))
        return self._compute(loops, value, value.dtype)

    def keep(self, value: Value) -> Value:
        """A value, computed once into a buffer of its own."""
        name = self._name("kept")
        loops = _Loops(name, _axes(name, "o", value.size))
        return self._compute(loops, value.load(_points(loops.outer)), value.dtype)

    def _name(self, hint: str) -> str:
        self.count += 1
        return f"_{hint}{self.count}"

    def _compute(
        self, loops: _Loops, value: Expr, dtype: DType, stride: tuple[int, ...] | None = None
    ) -> Value:
        """Loops that store `value`; the tensor that they leave in memory."""
        size = tuple(_number(axis.size) for axis in loops.outer)
        stride = _contiguous(size) if stride is None else stride
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        buffer = Buffer(loops.name, dtype, Index.of(max(extent, 0)))
        value = cast(value, dtype.computed_in)
        self.items.append(
            Compute(buffer, size, stride, loops.outer, loops.inner, loops.combine, value)
        )
        return _stored(buffer, [axis.size for axis in loops.outer], stride)

    # --- nodes ---

    def _take(self, node: fx.Node) -> None:
        self.real.add(node)
        if _why_unsupported(node.meta.get("val")) is None:
            self.values[node] = _from_memory(node)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            part = self.values[node.args[0]][node.args[1]]
            if part is not None:
                self.values[node] = part
                self._keep_if_dear(node)
                return
        reason = self._why_extern(node)
        value = None
        if reason is None:
            value = self._rule(node)
            reason = None if value is not None else "its rule does not take these arguments"
        if value is None:
            self._extern(node, reason)
        else:
            self.values[node] = value
            self._keep_if_dear(node)

    def _why_extern(self, node: fx.Node) -> str | None:
        """None if there is a rule and all values are of kinds that loops know."""
        target = node.target
        known = (table.POINTWISE, table.RULES, table.VIEW_RULES)
        if not any(target in rules for rules in known):
            return "no rule"
        results = node.meta.get("val")
        for result in results if isinstance(results, tuple | list) else (results,):
            if reason := _why_unsupported(result):
                return reason
        for source in node.all_input_nodes:
            if not isinstance(self.values.get(source), Value):
                return f"{source.name} is not a tensor that loops can read"
        return None

    def _rule(self, node: fx.Node) -> Any:
        args = fx.map_arg(node.args, self._current)
        kwargs = fx.map_arg(dict(node.kwargs), self._current)
        meta = node.meta["val"]
        if node.target in table.POINTWISE:
            return self._pointwise(table.POINTWISE[node.target], node, args, kwargs)
        rules = table.RULES if node.target in table.RULES else table.VIEW_RULES
        if isinstance(meta, tuple | list):
            return rules[node.target](self, tuple(_result(m) for m in meta), *args, **kwargs)
        return rules[node.target](self, _result(meta), *args, **kwargs)

    def _current(self, node: fx.Node) -> Value:
        """A value that follows the node: once it is in memory, it is read from there."""
        value: Value = self.values[node]
        return Value(value.size, value.dtype, lambda point: self.values[node].load(point))

    def _pointwise(self, op: Pointwise, node: fx.Node, args: Any, kwargs: Any) -> Value | None:
        result = _result(node.meta["val"])
        kind = _kind(op, node, result)
        if kind is None:
            return None
        body = Body()
        half = _half_of(op, node)

        def load(point: Point) -> Expr:
            def at(value: Any) -> Any:
                if not isinstance(value, Value):
                    return _rounded(value, half) if half is not None else value
                loaded = broadcast(value, result.size).load(point)
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
        point = _points(tuple(Axis(f"probe{d}", n) for d, n in enumerate(value.size)))
        expr = value.load(point)
        if isinstance(expr, Load):
            return
        loads = len(loads_of(expr))
        large = loads > MOST_LOADS or expr.size > MOST_OPERATIONS
        dear = expr.size - loads > CHEAP or _is_dear(expr)
        if large or (dear and _readers(node) > 1):
            self.realize(node)

    def realize(self, node: fx.Node) -> None:
        """See to it that the node's tensor exists at run time."""
        if node in self.real:
            return
        value = self.values[node]
        if isinstance(value, tuple):
            for user in node.users:
                self.realize(user)
            return
        self.real.add(node)
        if node.target in table.VIEW_RULES:
            for source in node.all_input_nodes:
                self.realize(source)
            self.items.append(Extern(node))
            return
        loops = _Loops(node.name, _axes(node.name, "o", value.size))
        tensor = node.meta["val"]
        expr, dtype = value.load(_points(loops.outer)), _result(tensor).dtype
        self.values[node] = self._compute(loops, expr, dtype, tuple(tensor.stride()))

    def _extern(self, node: fx.Node, reason: str | None) -> None:
        if is_mutable_op(node.target):
            self._realize_pending(node)
        for source in node.all_input_nodes:
            self.realize(source)
        self.items.append(Extern(node, reason))
        self.real.add(node)
        if reason is not None:
            self.reasons[node.name] = reason
        if _why_unsupported(node.meta.get("val")) is None:
            self.values[node] = _from_memory(node)

    def _realize_pending(self, writer: fx.Node) -> None:
        """Compute what is still to be computed: `writer` may overwrite what it is made from."""
        for node, value in list(self.values.items()):
            if node in self.real or not isinstance(value, Value):
                continue
            if any(user not in self.values and user not in self.real for user in node.users):
                self.realize(node)


def _axes(name: str, hint: str, size: Sequence[Index]) -> tuple[Axis, ...]:
    return tuple(Axis(f"{name}_{hint}{d}", n) for d, n in enumerate(size))


def _points(axes: tuple[Axis, ...]) -> Point:
    return tuple(Index.of(axis) if axis.size.constant != 1 else Index.of(0) for axis in axes)


def _number(index: Index) -> int:
    number = index.constant
    assert number is not None, "sizes are static here"
    return number


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def _stored(buffer: Buffer, size: Sequence[Index], stride: Sequence[int]) -> Value:
    def load(point: Point) -> Expr:
        place = Index.of(0)
        for index, step in zip(point, stride, strict=True):
            place = place + index * step
        return Load(buffer.dtype.computed_in, buffer, place)

    return Value(tuple(size), buffer.dtype, load)


def _from_memory(node: fx.Node) -> Value:
    tensor = node.meta["val"]
    dtype = from_torch(tensor.dtype)
    assert dtype is not None, "checked before"
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    buffer = Buffer(node.name, dtype, Index.of(max(extent, 0)))
    return _stored(buffer, [Index.of(n) for n in size], stride)


def _result(tensor: torch.Tensor) -> Result:
    dtype = from_torch(tensor.dtype)
    assert dtype is not None, "checked before"
    return Result(tuple(Index.of(int(n)) for n in tensor.size()), dtype)


def _why_unsupported(value: Any) -> str | None:
    """None for a tensor that loops can read and write."""
    if not isinstance(value, torch.Tensor) or not is_fake(value):
        return "not a plain tensor"
    if value.device.type != "cpu":
        return f"on {value.device}"
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return "not a strided tensor"
    if from_torch(value.dtype) is None:
        return f"elements of type {value.dtype}"
    if any(isinstance(n, torch.SymInt) for n in (*value.size(), *value.stride())):
        return "symbolic sizes"
    if 0 in value.size():
        return "no elements"
    return None


def _kind(op: Pointwise, node: fx.Node, result: Result) -> DType | None:
    """The type that the operator computes in."""
    if op.promotion is not Promotion.INPUTS:
        return result.dtype.computed_in
    tensors: list[Any] = [
        arg.meta["val"] if isinstance(arg, fx.Node) else arg
        for arg in node.args
        if isinstance(arg, fx.Node | int | float | bool)
    ]
    promoted = tensors[0].dtype if len(tensors) == 1 else torch.result_type(*tensors[:2])
    found = from_torch(promoted)
    return None if found is None else found.computed_in


def _half_of(op: Pointwise, node: fx.Node) -> torch.dtype | None:
    """The half-precision type that a comparison rounds its numbers to; None elsewhere."""
    if op.promotion is not Promotion.INPUTS:
        return None
    found = {arg.meta["val"].dtype for arg in node.args if isinstance(arg, fx.Node)}
    return next((d for d in found if d in (torch.bfloat16, torch.float16)), None)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype).item() if isinstance(value, float) else value


def _readers(node: fx.Node) -> int:
    """How many nodes read the value, seen through views."""
    return sum(_readers(user) if user.target in table.VIEW_RULES else 1 for user in node.users)


def _is_dear(expr: Expr) -> bool:
    return any(isinstance(part, Apply) and part.prim in _DEAR for part in walk(expr))
