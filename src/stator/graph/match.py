"""Patterns over graphs, and whether a node is the last one of such a pattern.

A pattern is a small tree (or a net: one object twice means one node twice) of the classes below.
They bear the names that they have in PyTorch's matcher, so that patterns carry over.  Matching by
meaning happens here: the arguments of an operator are put in the order of its schema with defaults
filled in, and operands that may be exchanged are tried both ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.torch_api import OpOverload, OpOverloadPacket, is_mutable_op

aten = torch.ops.aten

MULTIPLE: Final = -1  # any number of readers, outside of the pattern too

# The first two operands may be exchanged, if the rest of the arguments is as it is by default.
COMMUTATIVE: Final = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
    }
)


class Pattern:
    """What a value of a graph may be compared with; anything else stands for itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Arg(Pattern):
    """Any value; a positional argument of the match."""


@dataclass(frozen=True, slots=True, eq=False)
class Ignored(Pattern):
    """Any value, which nobody wants to know."""


@dataclass(frozen=True, slots=True, eq=False)
class KeywordArg(Pattern):
    """Any value, by name.  The same name twice is the same value twice."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class ExclusiveKeywordArg(KeywordArg):
    """As KeywordArg; two different exclusive names are never the same node."""


@dataclass(frozen=True, slots=True, eq=False)
class Exactly(Pattern):
    """A number that is this expression of symbolic sizes, wherever it comes from."""

    expression: Any


class Calls(Pattern):
    """A node that calls something."""

    __slots__ = ("args", "kwargs", "targets", "users")
    op = ""

    def __init__(self, target: Any, /, *args: Any, _users: int = 1, **kwargs: Any) -> None:
        several = target if isinstance(target, list | tuple) else [target]
        self.targets = frozenset(one for given in several for one in _overloads(given))
        self.args = args
        self.kwargs = kwargs
        self.users = _users

    def fits(self, node: fx.Node) -> bool:
        """Whether the node calls it, whatever its arguments."""
        return node.op == self.op and node.target in self.targets


class CallFunction(Calls):
    """A call of a function or an operator; a packet stands for any of its overloads."""

    __slots__ = ()
    op = "call_function"


class CallFunctionVarArgs(CallFunction):
    """A call with any arguments, which are those of the match."""

    __slots__ = ()


class CallMethod(Calls):
    """A call of a method, by its name."""

    __slots__ = ()
    op = "call_method"


class CallModule(Calls):
    """A call of a submodule, by its class."""

    __slots__ = ()
    op = "call_module"

    def fits(self, node: fx.Node) -> bool:
        """Whether the submodule is of one of the classes."""
        owner = node.graph.owning_module
        if node.op != self.op or owner is None:
            return False
        return type(owner.get_submodule(str(node.target))) in self.targets


@dataclass(frozen=True, slots=True, eq=False)
class ListOf(Pattern):
    """A list whose elements all match; with `partial`, at least one does."""

    pattern: Pattern
    partial: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedExpr(Pattern):
    """What stands several times over the same values: all calls like it belong to the match."""

    pattern: Calls


class MultiOutputPattern(Pattern):
    """Several results of one pattern.  The first is found, the others from what it bound."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = tuple(outputs)


@dataclass(frozen=True, slots=True)
class Match:
    """A place of the graph that a pattern describes."""

    pattern: Pattern
    args: list[Any]
    kwargs: dict[str, Any]
    nodes: list[fx.Node]  # in the order of the graph
    outputs: list[fx.Node | None]

    def output_node(self) -> fx.Node:
        """The only result."""
        (found,) = (node for node in self.outputs if node is not None)
        return found


def last_call(pattern: Pattern) -> Calls:
    """What a pattern is found by: its (first) result."""
    first = pattern.outputs[0] if isinstance(pattern, MultiOutputPattern) else pattern
    assert isinstance(first, Calls), f"a pattern that ends in {first!r} would be found everywhere"
    return first


def find_match(pattern: Pattern, node: fx.Node) -> Match | None:
    """How `node` is the (first) result of `pattern`; None if it is not."""
    several = isinstance(pattern, MultiOutputPattern)
    outputs = pattern.outputs if isinstance(pattern, MultiOutputPattern) else (pattern,)
    search = _Search(outputs)
    for _ in search.several(outputs, node) if several else search.one(pattern, node):
        if search.is_closed():
            nodes = sorted(search.nodes)
            results = [search.bound.get(output) for output in outputs]
            return Match(pattern, list(search.args), dict(search.names), nodes, results)
    return None


@dataclass(slots=True)
class _Search:
    """What is bound so far.  Each generator leaves it as it was when it is done."""

    outputs: Sequence[Any]
    bound: dict[Pattern, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    owners: dict[fx.Node, str] = field(default_factory=dict)  # of exclusive names
    args: list[Any] = field(default_factory=list)
    nodes: dict[fx.Node, int] = field(default_factory=dict)  # with their wanted numbers of readers

    def one(self, pattern: Any, value: Any) -> Iterator[None]:
        """Every way in which `value` is what the pattern says."""
        match pattern:
            case KeywordArg():
                yield from self._named(pattern, value)
            case ListOf():
                yield from self._list(pattern, value)
            case RepeatedExpr():
                yield from self._repeated(pattern, value)
            case Calls():
                yield from self._call(pattern, value)
            case Arg():
                self.args.append(value)
                yield
                self.args.pop()
            case list() | tuple():
                if isinstance(value, list | tuple) and len(value) == len(pattern):
                    yield from self.all(list(zip(pattern, value, strict=True)))
            case _ if is_described(pattern, value):
                yield

    def all(self, pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Every way in which all pairs match."""
        if not pairs:
            yield
            return
        (pattern, value), *rest = pairs
        for _ in self.one(pattern, value):
            yield from self.all(rest)

    def several(self, outputs: Sequence[Any], node: fx.Node) -> Iterator[None]:
        """Every way in which `node` is the first of the outputs, and the others are found."""
        for _ in self.one(outputs[0], node):
            yield from self._others(outputs[1:])

    def _others(self, outputs: Sequence[Any]) -> Iterator[None]:
        if not outputs:
            yield
            return
        first, *rest = outputs
        if not isinstance(first, Calls):  # an argument of the pattern that it returns
            yield from self._others(rest)
            return
        for candidate in list(self._candidates(first)):
            for _ in self.one(first, candidate):
                yield from self._others(rest)

    def _candidates(self, pattern: Calls) -> Iterator[fx.Node]:
        """Nodes that may be an output: so many steps behind a bound node as the pattern says."""
        for inner, steps in _inside(pattern, 0):
            value = self.names.get(inner.name) if isinstance(inner, KeywordArg) else None
            value = self.bound.get(inner, value)
            if isinstance(value, fx.Node):
                behind = [value]
                for _ in range(steps):
                    behind = list(dict.fromkeys(user for node in behind for user in node.users))
                yield from (node for node in behind if pattern.fits(node))
                return

    def _named(self, pattern: KeywordArg, value: Any) -> Iterator[None]:
        name = pattern.name
        if name in self.names:
            if self.names[name] is value or is_same(self.names[name], value):
                yield
            return
        exclusive = isinstance(pattern, ExclusiveKeywordArg) and isinstance(value, fx.Node)
        if exclusive and value in self.owners:
            return
        self.names[name] = value
        if exclusive:
            self.owners[value] = name
        yield
        del self.names[name]
        if exclusive:
            del self.owners[value]

    def _list(self, pattern: ListOf, value: Any) -> Iterator[None]:
        if not isinstance(value, list | tuple) or not value:
            return
        if not pattern.partial:
            yield from self.all([(pattern.pattern, item) for item in value])
            return
        fitting = [item for item in value if any(True for _ in self.one(pattern.pattern, item))]
        if fitting:
            yield from self.all([(pattern.pattern, item) for item in fitting])

    def _repeated(self, pattern: RepeatedExpr, value: Any) -> Iterator[None]:
        if not isinstance(value, fx.Node):
            return
        for _ in self.one(pattern.pattern, value):
            del self.bound[pattern.pattern]  # it may stand for each of its likes
            alike = [node for node in self._candidates(pattern.pattern) if node is not value]
            added = [node for node in alike if self._alone(pattern.pattern, node)]
            self.bound[pattern.pattern] = value
            self.nodes |= dict.fromkeys(added, pattern.pattern.users)
            yield
            for node in added:
                del self.nodes[node]

    def _alone(self, pattern: Pattern, node: fx.Node) -> bool:
        found = any(True for _ in self.one(pattern, node))
        return found and node not in self.nodes

    def _call(self, pattern: Calls, value: Any) -> Iterator[None]:
        if pattern in self.bound:
            if self.bound[pattern] is value:
                yield
            return
        if not isinstance(value, fx.Node) or not pattern.fits(value) or value in self.nodes:
            return
        self.bound[pattern] = value
        self.nodes[value] = MULTIPLE if pattern in self.outputs else pattern.users
        if isinstance(pattern, CallFunctionVarArgs):
            self.args += value.args
            yield
            del self.args[len(self.args) - len(value.args) :]
        else:
            for pairs in _pairings(pattern, value):
                yield from self.all(pairs)
        del self.bound[pattern], self.nodes[value]

    def is_closed(self) -> bool:
        """Whether nobody else reads inner values, or writes while the match computes."""
        for node, users in self.nodes.items():
            if users != MULTIPLE and len(node.users) != users:
                return False
        return not self._is_written_meanwhile()

    def _is_written_meanwhile(self) -> bool:
        first, last = min(self.nodes), max(self.nodes)
        node = first
        while node is not last:
            node = node.next
            if node not in self.nodes and is_mutation(node):
                return True
        return False


def is_mutation(node: fx.Node) -> bool:
    """Whether a node writes to memory that others see."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and is_mutable_op(node.target)


def is_described(pattern: Any, value: Any) -> bool:
    """Whether a value is what a pattern says that binds nothing."""
    if isinstance(pattern, Exactly):
        return is_same_size(pattern.expression, value)
    return isinstance(pattern, Ignored) or is_same(pattern, value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two constants are the same: 1 is not 1.0, and NaN is NaN."""
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        equal = one == other and math.copysign(1, one) == math.copysign(1, other)
        return equal or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def is_same_size(expression: Any, value: Any) -> bool:
    """Whether a number, or a node that computes one, is an expression of symbolic sizes."""
    known = value.meta.get("val") if isinstance(value, fx.Node) else value
    found = known.node.expr if isinstance(known, torch.SymInt) else known
    return found is not None and not isinstance(found, torch.Tensor) and bool(expression == found)


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target]


def _inside(pattern: Any, steps: int) -> Iterator[tuple[Any, int]]:
    """All patterns in a pattern, and how many calls lie between."""
    if isinstance(pattern, Pattern) and steps:
        yield pattern, steps
    parts: Sequence[Any] = ()
    if isinstance(pattern, Calls):
        parts = [*pattern.args, *pattern.kwargs.values()]
    elif isinstance(pattern, list | tuple):
        for item in pattern:
            yield from _inside(item, steps)
    for part in parts:
        yield from _inside(part, steps + 1)


def _pairings(pattern: Calls, node: fx.Node) -> Iterator[list[tuple[Any, Any]]]:
    """The pattern's arguments beside the node's, in each order that means the same."""
    if isinstance(node.target, OpOverload):
        wanted = in_schema_order(node.target, pattern.args, pattern.kwargs)
        given = in_schema_order(node.target, node.args, node.kwargs)
        if wanted is None or given is None:
            return
        yield list(zip(wanted, given, strict=True))
        if node.target in COMMUTATIVE and all(map(_is_number_one, given[2:])):
            yield list(zip(wanted, [given[1], given[0], *given[2:]], strict=True))
        return
    if len(pattern.args) != len(node.args) or pattern.kwargs.keys() != node.kwargs.keys():
        return
    pairs = list(zip(pattern.args, node.args, strict=True))
    yield [*pairs, *((pattern.kwargs[name], node.kwargs[name]) for name in pattern.kwargs)]


def _is_number_one(value: Any) -> bool:
    return not isinstance(value, fx.Node) and bool(value == 1)  # alpha


def in_schema_order(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """All arguments of a call, defaults too; None where one is missing or too many."""
    arguments = target._schema.arguments
    if len(args) > sum(not argument.kwarg_only for argument in arguments):
        return None
    values = list(args)
    used = 0
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            values.append(kwargs[argument.name])
            used += 1
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            return None
    return values if used == len(kwargs) else None
