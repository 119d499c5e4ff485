"""Equal calls of equal arguments are one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import fx

from stator.graph.edit import EARLY, is_effect
from stator.graph.rules import layout_of
from stator.graph.run import Ctx
from stator.graph.sharing import Sharing, is_returned, written_by
from stator.torch_api import OpOverload, is_mutable_op, is_random_op, is_view_op, pytree

aten = torch.ops.aten

# What they hold is nobody's business but that of who writes there.
EMPTY: Final = frozenset(
    getattr(packet, name)
    for packet in (
        *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
        *(aten.new_empty, aten.new_empty_strided),
    )
    for name in packet.overloads()
)
# Beside torch's operators: parts of results, and arithmetic of sizes.
PLAIN: Final = frozenset(
    {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}
    | {operator.neg, operator.truediv, operator.pow, torch.sym_max, torch.sym_min}
)

# Of two equal calls and of what shares memory: the reason why one may not stand for both, if any.
WhyNot = Callable[[fx.Node, fx.Node, Sharing], str | None]


def share_subexpressions(graph: fx.Graph, ctx: Ctx) -> int:
    """Let readers of a call that was made before read the first; return how many are gone.

    before: y = sin(x);  z = sin(x);  u = y + z
    after:  y = sin(x);  u = y + y
    """
    return share_calls(graph, ctx, "share_subexpressions", why_not_share)


def share_calls(graph: fx.Graph, ctx: Ctx, name: str, why_not: WhyNot) -> int:
    """Let readers of an equal call read the first, where nothing speaks against it."""
    sharing = Sharing(graph)
    versions: dict[fx.Node, int] = {}
    known: dict[Hashable, fx.Node] = {}
    shared = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_mutable_op(node.target):
            for source in written_by(node):  # what is read behind it may be something else
                memory = sharing.memory(source)
                versions[memory] = versions.get(memory, 0) + 1
            continue
        key = _key(node, sharing, versions) if _is_pure(node) else None
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node or why_not(first, node, sharing) is not None:
            continue
        if ctx.fuel.spend(f"{name}: {node.name}"):
            sharing.merge(node, first)
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            shared += 1
    return shared


def why_not_share(first: fx.Node, second: fx.Node, sharing: Sharing) -> str | None:
    """None if readers of `second`, an equal call, may read `first`; otherwise the reason."""
    if not _are_alike(first.meta.get("val"), second.meta.get("val")):
        return "their values are described otherwise"  # by a size that is known only at run time
    if is_returned(first) and is_returned(second):
        return "the caller gets both"
    if _is_view(second):
        return None  # of one memory
    if sharing.is_returned(first) and sharing.is_returned(second):
        return "the caller gets views of both"
    if sharing.is_written(first) or sharing.is_written(second):
        return "it is written to"
    return None


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view_op(node.target)


def _is_pure(node: fx.Node) -> bool:
    """Whether the same arguments give the same result, and nothing else happens."""
    target = node.target
    if target in PLAIN:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return not is_random_op(target) and target not in EMPTY and not is_effect(node)


def _key(node: fx.Node, sharing: Sharing, versions: dict[fx.Node, int]) -> Hashable:
    """What two equal calls have in common; None if that cannot be told.

    What is computed early is computed again later so that it need not live so long.
    """
    early = bool(node.meta.get(EARLY))
    read = () if _is_view(node) else node.all_input_nodes  # a view sees memory as it will be
    written = tuple(versions.get(sharing.memory(source), 0) for source in read)
    try:
        key = (early, node.target, _frozen(node.args), _frozen(node.kwargs), written)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """A constant by value and type: 1, 1.0 and True are three, and so are 0.0 and -0.0 two."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(value[name])) for name in sorted(value))
    if isinstance(value, slice):
        return (slice, _frozen((value.start, value.stop, value.step)))
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, bool | int):
        return (type(value), value)
    assert not isinstance(value, torch.SymInt), "sizes in a graph are nodes"
    return value  # type: ignore[no-any-return]  # or not: hash says so


def _are_alike(one: Any, other: Any) -> bool:
    return list(map(_told, pytree.tree_leaves(one))) == list(map(_told, pytree.tree_leaves(other)))


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, value.layout, layout_of(value))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return (type(value), value)
