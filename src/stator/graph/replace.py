"""Replacements: a graph that a function traces to, wherever it stands, for that of another.

A pattern is traced from an example once, with sizes and numbers left open; each match is then
proven: the function is traced again on the very shapes, strides, constants and symbolic sizes that
were found, and has to match without anything left open.  A pattern that was stored is no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from stator.core.fuel import Fuel
from stator.graph.match import (
    CallFunction,
    CallMethod,
    Exactly,
    ExclusiveKeywordArg,
    Ignored,
    KeywordArg,
    Match,
    MultiOutputPattern,
    Pattern,
    find_match,
    last_call,
)
from stator.graph.order import stable_topological_sort
from stator.graph.rules import bound_value, why_not_same
from stator.graph.run import Ctx
from stator.torch_api import pytree

TraceFn = Callable[[Callable[..., Any], Sequence[Any]], fx.GraphModule]
Check = Callable[[Match], bool]
Handler = Callable[[Match, fx.Graph], bool]  # edits the graph; False if it left it alone

LEFT_OPEN: Final = (int, float, list, tuple, torch.device, torch.dtype)


class PatternPass:
    """A pass of patterns, with what to do where each is found."""

    def __init__(self, pass_name: str | None = None) -> None:
        self.__name__ = pass_name or "patterns"
        self.entries: dict[tuple[str, Any], list[tuple[Pattern, Handler]]] = {}
        self.known: dict[str, Handler] = {}
        self.functions: list[Callable[..., Any]] = []  # what it is made of, for cache keys

    def register(self, pattern: Pattern, handler: Handler) -> None:
        """Call `handler` wherever `pattern` is found, after those that were registered before."""
        last = last_call(pattern)
        for target in last.targets:
            self.entries.setdefault((last.op, target), []).append((pattern, handler))

    def all_entries(self) -> list[tuple[Pattern, Handler]]:
        """Every pattern with its handler."""
        return list(dict.fromkeys(entry for some in self.entries.values() for entry in some))

    def apply(self, graph: fx.Graph | fx.GraphModule) -> int:
        """Apply all patterns; return how many fired."""
        return self(graph.graph if isinstance(graph, fx.GraphModule) else graph, Ctx())

    def __call__(self, graph: fx.Graph, ctx: Ctx) -> int:
        """As a pass of the compiler's."""
        candidates = {
            node
            for op, target in self.entries
            for node in graph.find_nodes(op=op, target=target, sort=False)
        }
        fired = sum(
            self._apply(node, graph, ctx.fuel)
            for node in sorted(candidates, reverse=True)
            if not node._erased
        )
        if fired:
            stable_topological_sort(graph)
        return fired

    def _apply(self, node: fx.Node, graph: fx.Graph, fuel: Fuel) -> bool:
        for pattern, handler in self.entries[node.op, node.target]:
            found = find_match(pattern, node)
            if found is None:
                continue
            if fuel.left == 0:
                return False
            if handler(found, graph):
                fuel.spend(f"{self.__name__}: {node.name}")
                return True
        return False


@dataclass(frozen=True, slots=True)
class Sides:
    """The function to look for and the one to put there, which take the same arguments."""

    search: Callable[..., Any]
    replace: Callable[..., Any]
    names: Sequence[str]
    scalars: Mapping[str, Any]  # arguments that are numbers, with what stands for them in a trace

    @property
    def tensors(self) -> list[str]:
        """Names of the arguments that a trace takes."""
        return [name for name in self.names if name not in self.scalars]

    def given(self, function: Callable[..., Any], scalars: Mapping[str, Any]) -> Any:
        """`function` with its numbers, taking the rest by position."""

        def call(*tensors: Any) -> Any:
            return function(**dict(zip(self.tensors, tensors, strict=True)), **scalars)

        return call


@dataclass(slots=True, eq=False)
class Replacement:
    """What one function traces to, replaced with what another does."""

    sides: Sides
    example: Sequence[Any]
    trace: TraceFn
    check: Check | None
    exclusive: frozenset[str]
    proven: dict[Any, tuple[Pattern, fx.Graph] | None] = field(default_factory=dict)

    def loose(self) -> Pattern:
        """The pattern with numbers, sizes and types left open."""
        sides = self.sides
        module = self.trace(sides.given(sides.search, sides.scalars), self.example)
        return pattern_of_graph(
            module.graph, sides.tensors, self.exclusive, scalars=sides.scalars, strict=False
        )

    def __call__(self, found: Match, graph: fx.Graph) -> bool:
        """Prove the match on what it found, then replace it; False if it is none."""
        values = {name: bound_value(found.kwargs.get(name)) for name in self.sides.names}
        key = tuple(map(_key, values.values()))
        if key not in self.proven:
            self.proven[key] = self._prove(values)
        proof = self.proven[key]
        if proof is None:
            return False
        pattern, replaced = proof
        first = next(node for node in found.outputs if node is not None)
        exact = find_match(pattern, first)
        if exact is None or exact.nodes != found.nodes:
            return False
        if self.check is not None and not self.check(found):
            return False
        inputs = [exact.kwargs.get(name) for name in placeholder_names(replaced)]
        return put_in_place(replaced, inputs, exact, graph)

    def _prove(self, values: Mapping[str, Any]) -> tuple[Pattern, fx.Graph] | None:
        """The exact pattern for these values, and its replacement; None if it cannot be traced."""
        sides = self.sides
        names = sides.tensors
        scalars = {name: values[name] for name in sides.scalars}
        tensors = [_like(values[name], one) for name, one in zip(names, self.example, strict=True)]
        if any(value is None for value in (*tensors, *scalars.values())):
            return None
        try:
            searched = self.trace(sides.given(sides.search, scalars), tensors).graph
            replaced = self.trace(sides.given(sides.replace, scalars), tensors).graph
        except Exception:  # a function that these values do not go into: no match
            return None
        rename_placeholders(replaced, names)
        return pattern_of_graph(searched, names, self.exclusive, strict=True), replaced


def _like(value: Any, example: Any) -> Any:
    """A fake tensor to trace with, which wants gradients as the example did."""
    if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
        return value
    return value.detach().requires_grad_(example.requires_grad)


def _key(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    numbers = (*value.size(), *value.stride())
    return (value.dtype, value.device, value.ndim, *map(str, numbers))


def placeholder_names(graph: fx.Graph) -> list[str]:
    """Names of a graph's inputs, in order."""
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]


def rename_placeholders(graph: fx.Graph, names: Sequence[str]) -> None:
    """Give inputs their names; tangents, which come behind, keep theirs."""
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=False):
        node.target = name


def pattern_of_graph(
    graph: fx.Graph,
    names: Sequence[str],
    exclusive: Iterable[str] = (),
    *,
    scalars: Mapping[str, Any] | None = None,
    strict: bool,
) -> Pattern:
    """A traced graph as a pattern; not `strict`, with all constants left open but these."""
    rename_placeholders(graph, names)
    by_value = {(type(value), value): name for name, value in (scalars or {}).items()}

    def constant(value: Any, keep: bool) -> Any:
        if isinstance(value, int | float) and (type(value), value) in by_value:
            return KeywordArg(by_value[type(value), value])
        return Ignored() if not strict and not keep and isinstance(value, LEFT_OPEN) else value

    made: dict[fx.Node, Any] = {}

    def argument(value: Any, keep: bool) -> Any:
        if isinstance(value, fx.Node):
            return made[value]
        if isinstance(value, list | tuple) and (strict or _has_nodes(value)):
            return [argument(item, keep) for item in value]
        return constant(value, keep)

    for node in graph.nodes:
        symbolic = node.meta.get("val")
        if node.op == "placeholder":
            name = str(node.target)
            made[node] = (ExclusiveKeywordArg if name in exclusive else KeywordArg)(name)
        elif isinstance(symbolic, torch.SymInt | torch.SymFloat | torch.SymBool):
            made[node] = Exactly(symbolic.node.expr) if strict else Ignored()
        elif node.op in ("call_function", "call_method"):
            keep = node.target is getitem
            args = [argument(value, keep) for value in node.args]
            kwargs = {name: argument(value, keep) for name, value in node.kwargs.items()}
            kind = CallFunction if node.op == "call_function" else CallMethod
            made[node] = kind(node.target, *args, _users=len(node.users), **kwargs)
    (output,) = graph.find_nodes(op="output")
    results = [made[leaf] for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
    return results[0] if len(results) == 1 else MultiOutputPattern(results)


def _has_nodes(value: Any) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(value))


def put_in_place(source: fx.Graph, inputs: Sequence[Any], found: Match, graph: fx.Graph) -> bool:
    """Copy `source`, which takes `inputs`, to where `found` is, and let its readers read that."""
    outputs = [node for node in found.outputs if node is not None]
    made: dict[fx.Node, Any] = dict(zip(source.find_nodes(op="placeholder"), inputs, strict=True))
    added = []
    with graph.inserting_before(max(outputs)):
        for node in source.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = made[node] = graph.node_copy(node, made.__getitem__)
            copy.meta = {**_kept(outputs[0].meta), **_own(node.meta)}
            added.append(copy)
    (returned,) = source.find_nodes(op="output")
    results = [
        made[leaf] if isinstance(leaf, fx.Node) else leaf
        for leaf in pytree.tree_leaves(returned.args)
        if leaf is not None
    ]
    fit = len(results) == len(outputs)
    if not fit or any(why_not_same(*pair) for pair in zip(outputs, results, strict=True)):
        for node in reversed(added):
            graph.erase_node(node)
        return False
    for old, new in zip(outputs, results, strict=True):
        old.replace_all_uses_with(new)
    for node in [*reversed(found.nodes), *reversed(added)]:
        if not node.users and not node._erased and not node.is_impure():
            graph.erase_node(node)
    return True


def _kept(meta: Mapping[str, Any]) -> dict[str, Any]:
    names = ("stack_trace", "recompute", "ac_graph_id", "partitioner_tag", "nn_module_stack")
    return {name: meta[name] for name in names if name in meta}


def _own(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in ("val", "tensor_meta") if name in meta}
