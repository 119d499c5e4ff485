"""Rules: one equation each, with an example that proves it and the places where it must not fire.

    @rule(example=lambda: (rand(4, 8), rand(8, 16), rand(16)))
    def addmm_from_mm_add(x: Tensor, w: Tensor, bias: Tensor) -> Rewrite:
        \"\"\"mm(x, w) + bias  -->  addmm(bias, x, w)\"\"\"
        return Rewrite(before=aten.mm(x, w) + bias, after=aten.addmm(bias, x, w))

The function is run three times over: on names, which gives the pattern; on the nodes of a match,
which builds the right side; and by the tests on tensors, where both sides must agree.  Parameters
that are no tensors stand for constants.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import fx

from stator.core import faults
from stator.errors import CompileError
from stator.graph.build import Builder, overload_of
from stator.graph.match import (
    CallFunction,
    KeywordArg,
    Match,
    MultiOutputPattern,
    Pattern,
    find_match,
    last_call,
)
from stator.graph.order import stable_topological_sort
from stator.graph.run import Ctx, GraphPass
from stator.torch_api import OpOverload, is_view_op, pytree

Arguments = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Both sides of an equation.  A right side that asks for sizes is a function."""

    before: Any
    after: Any

    def right(self) -> Any:
        """The right side."""
        return self.after() if isinstance(self.after, FunctionType) else self.after


@dataclass(frozen=True)
class Rule:
    """A local rewrite."""

    function: Callable[..., Rewrite]
    example: Arguments
    rejects: Sequence[Arguments] = ()
    when: Callable[..., bool] | None = None  # asked with those arguments of the rule it names

    @property
    def name(self) -> str:
        """As in dumps, in `Options.skip`, and where fuel is spent."""
        return self.function.__name__

    @property
    def equation(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """Names, and whether each is a tensor."""
        annotated = inspect.get_annotations(self.function, eval_str=True)
        names = inspect.signature(self.function).parameters
        return {name: annotated.get(name, torch.Tensor) is torch.Tensor for name in names}

    @cached_property
    def pattern(self) -> Pattern:
        """The left side."""
        return pattern_of(self.function, list(self.parameters))

    @cached_property
    def _guarded(self) -> list[str]:
        return [] if self.when is None else list(inspect.signature(self.when).parameters)

    def allows(self, values: dict[str, Any]) -> bool:
        """Whether the guard holds, for fake tensors and constants."""
        for name, is_tensor in self.parameters.items():
            if name in values and is_tensor is not isinstance(values[name], torch.Tensor):
                return False
        return self.when is None or self.when(*(values[name] for name in self._guarded))


def rule(
    *,
    example: Arguments,
    rejects: Sequence[Arguments] = (),
    when: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., Rewrite]], Rule]:
    """Decorator: a function of both sides becomes a rule."""

    def make(function: Callable[..., Rewrite]) -> Rule:
        return Rule(function, example, rejects, when)

    return make


def pattern_of(function: Callable[..., Rewrite], names: Sequence[str]) -> Pattern:
    """The left side of a rule as a pattern: run on names, nothing is computed."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    arguments = [fx.Proxy(graph.placeholder(name), tracer) for name in names]
    before = function(*arguments).before
    several = isinstance(before, tuple | list)
    outputs = [proxy.node for proxy in (before if several else (before,))]
    made: dict[fx.Node, Pattern] = {node.node: KeywordArg(node.node.name) for node in arguments}
    counts = _readers(outputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = pytree.tree_map_only(fx.Node, made.__getitem__, (node.args, node.kwargs))
        target = node.target
        target = overload_of(target) if not hasattr(target, "overloads") else target
        made[node] = CallFunction(target, *args, _users=counts.get(node, 0), **kwargs)
    found = [made[node] for node in outputs]
    return MultiOutputPattern(found) if several else found[0]


def _readers(outputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many nodes of the left side read each of its nodes; those of the right side do not."""
    counts: dict[fx.Node, int] = {}
    todo, seen = list(outputs), set(outputs)
    while todo:
        node = todo.pop()
        for source in node.all_input_nodes:
            counts[source] = counts.get(source, 0) + 1
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return counts


def apply_rules(name: str, rules: Iterable[Rule]) -> GraphPass:
    """A pass that applies rules until none fires."""
    known = tuple(rules)

    def apply(graph: fx.Graph, ctx: Ctx) -> int:
        wanted = [rule for rule in known if rule.name not in ctx.options.skip]
        return Rewriter(graph, ctx, wanted).run()

    apply.__name__ = name
    apply.rules = known  # type: ignore[attr-defined]  # for the list of passes and their rules
    apply.functions = [one.function for one in known]  # type: ignore[attr-defined]  # what it is
    apply.functions += [one.when for one in known if one.when]  # type: ignore[attr-defined]
    return apply


MOST_FIRINGS = 20  # a node, on average: beyond that rules undo one another


@dataclass(slots=True)
class Rewriter:
    """Rules over a graph: last nodes first, and again wherever something changed."""

    graph: fx.Graph
    ctx: Ctx
    rules: Sequence[Rule]
    by_target: dict[Any, list[Rule]] = field(default_factory=dict)
    todo: deque[fx.Node] = field(default_factory=deque)

    def run(self) -> int:
        """Apply all rules; return how many fired."""
        for one in self.rules:
            for target in last_call(one.pattern).targets:
                self.by_target.setdefault(target, []).append(one)
        self.todo.extend(
            node
            for target in self.by_target
            for node in self.graph.find_nodes(op="call_function", target=target, sort=False)
        )
        most, fired = MOST_FIRINGS * len(self.graph.nodes), 0
        while self.todo:
            node = self.todo.pop()
            name = None if node._erased else self._rewritten(node)
            fired += name is not None
            if fired > most:
                raise CompileError("rules", f"{name} fires without end", hint="Options.skip it")
        return fired

    def _rewritten(self, node: fx.Node) -> str | None:
        """Apply the first rule that fires; its name."""
        for one in self.by_target.get(node.target, ()):
            found = find_match(one.pattern, node)
            if found is not None and self._apply(one, found):
                return one.name
        return None

    def _apply(self, one: Rule, found: Match) -> bool:
        values = {name: bound_value(bound) for name, bound in found.kwargs.items()}
        if not one.allows(values):
            return False
        outputs = [node for node in found.outputs if node is not None]
        builder = Builder(self.graph, min(outputs), only_results=True)
        bound = [found.kwargs[name] for name in one.parameters]
        try:
            after = builder.run(lambda *given: one.function(*given).right(), *bound)
        except (RuntimeError, ValueError, IndexError):  # these values do not go into the right side
            builder.take_back()
            return False
        if faults.SET:
            after = faults.strike("rule", after, one.name, builder, bound)
        several = isinstance(after, tuple | list)
        results = list(after) if several else [after]
        fit = len(results) == len(outputs) and not any(
            why_not_same(old, new) for old, new in zip(outputs, results, strict=True)
        )
        if not fit or not self.ctx.fuel.spend(f"{one.name}: {outputs[0].name}"):
            builder.take_back()
            return False
        self._replace(outputs, results, found, builder)
        if len(outputs) > 1:  # an input of one may come behind another
            stable_topological_sort(self.graph)
        return True

    def _replace(
        self, outputs: list[fx.Node], results: list[Any], found: Match, builder: Builder
    ) -> None:
        readers = [user for old in outputs for user in old.users]
        for old, new in zip(outputs, results, strict=True):
            old.replace_all_uses_with(new)
        sources = [node for node in found.nodes for node in node.all_input_nodes]
        for node in reversed(found.nodes):
            if not node.users:
                self.graph.erase_node(node)
        builder.drop_unread()
        again = dict.fromkeys([*readers, *builder.added, *sources])
        self.todo.extend(node for node in again if not node._erased)


def bound_value(bound: Any) -> Any:
    """What a match bound: a constant, or a node's fake value."""
    return bound.meta.get("val") if isinstance(bound, fx.Node) else bound


def why_not_same(old: fx.Node, new: Any) -> str | None:
    """None if `new` may stand for `old` everywhere; otherwise the reason, for the log."""
    if not isinstance(new, fx.Node):
        return f"{new!r} is no node"
    was, now = old.meta.get("val"), new.meta.get("val")
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return None if type(was) is type(now) else "another kind of value"
    if (was.dtype, was.device, was.layout) != (now.dtype, now.device, now.layout):
        return f"{was.dtype} on {was.device} would become {now.dtype} on {now.device}"
    if layout_of(was) != layout_of(now):
        return f"{layout_of(was)} would become {layout_of(now)}"
    if any(user.op == "output" for user in old.users) and _shares(new) and not _shares(old):
        return "what the caller gets would share memory with another value"
    return None


def layout_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and lazy bits, compared without asking symbols anything."""
    numbers = (*value.size(), None, *(value.stride() if value.layout is torch.strided else ()))
    plain = (n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers)
    return (*plain, value.is_conj(), value.is_neg())


def _shares(node: fx.Node) -> bool:
    """Whether the node's memory may be another's: an input, a view, or what is returned too."""
    if node.op != "call_function":
        return True
    is_view = isinstance(node.target, OpOverload) and is_view_op(node.target)
    return is_view or any(user.op == "output" for user in node.users)
