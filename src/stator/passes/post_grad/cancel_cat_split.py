"""What is put together and taken apart again, or the other way round."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.rules import layout_of, why_not_same
from stator.graph.run import Ctx
from stator.graph.sharing import Sharing
from stator.torch_api import FakeTensor, OpOverload, is_mutable_op, pytree

aten = torch.ops.aten

SPLITS: Final = frozenset({aten.split.Tensor, aten.split_with_sizes.default})

# A part of a tensor: which, along which dimension, from where to where; symbolic or not.
Part: TypeAlias = tuple[fx.Node, int, Any, Any]


def cancel_cat_split(graph: fx.Graph, ctx: Ctx) -> int:
    """Read what was there before; return how many nodes were replaced.

    before: y = cat([a, b]);  z = slice(y, 0, 0, len(a))     after: z is gone, its users read a
    before: a, b = split(x, n);  y = cat([a, b])             after: y is gone, its users read x
    before: y = cat([cat([a, b]), c])                        after: y = cat([a, b, c])
    """
    cats = graph.find_nodes(op="call_function", target=aten.cat.default)
    if not cats:
        return 0
    sharing = Sharing(graph)
    count = 0
    for node in cats:  # in order: an inner one is flat before it joins an outer one
        count += _flatten(node, sharing, ctx)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        count += _join(node, sharing, ctx) or _take_apart(node, sharing, ctx)
    return count


def _flatten(node: fx.Node, sharing: Sharing, ctx: Ctx) -> int:
    """Put the operands of inner cats, which nobody else reads, where those stood."""
    dim = _dim_of_cat(node)
    flat: list[fx.Node] = []
    for operand in node.args[0]:
        flat += operand.args[0] if _can_join(operand, node, dim) else [operand]
    if len(flat) == len(node.args[0]):
        return 0
    builder = Builder(node.graph, node)
    new = builder.call(aten.cat.default, flat, dim)
    if not _replace(node, new, builder, ctx):
        return 0
    sharing.replace(node, new)
    return 1


def _can_join(inner: fx.Node, outer: fx.Node, dim: int | None) -> bool:
    if inner.target is not aten.cat.default or list(inner.users) != [outer]:
        return False
    if dim is None or _dim_of_cat(inner) != dim or list(outer.args[0]).count(inner) > 1:
        return False
    dtypes = {operand.meta["val"].dtype for operand in inner.args[0]}
    return dtypes == {outer.meta["val"].dtype}  # a cast in between may round


def _join(node: fx.Node, sharing: Sharing, ctx: Ctx) -> int:
    """Read the tensor that all operands, in order, are all parts of."""
    parts = [_part(operand) for operand in node.args[0]]
    first = parts[0]
    if first is None or len(parts) < 2 or first[1] != _dim_of_cat(node):
        return 0
    source, dim, position = first[0], first[1], 0
    for part in parts:
        if part is None or part[:2] != (source, dim) or part[2] != position:
            return 0
        position = part[3]
    if position != _plain(source.meta["val"].size(dim)):
        return 0
    if sharing.why_not_merge(node, source) is not None:
        return 0
    if not _replace(node, source, None, ctx):
        return 0
    sharing.merge(node, source)
    return 1


def _take_apart(cat: fx.Node, sharing: Sharing, ctx: Ctx) -> int:
    """Let readers of one operand's place in a cat read the operand."""
    dim = _dim_of_cat(cat)
    readers = [user for user in cat.users if user.target is aten.slice.Tensor]
    for split in cat.users:
        readers += [user for user in split.users if split.target in SPLITS]
    if dim is None or not readers or any(op.meta["val"].dim() <= dim for op in cat.args[0]):
        return 0  # an empty vector may stand in any cat
    places: dict[Any, fx.Node] = {}
    position: Any = 0
    for operand in cat.args[0]:
        end = position + _plain(operand.meta["val"].size(dim))
        places.setdefault((position, end), operand)
        position = end
    count = 0
    for node in readers:
        part = _part(node)
        operand = None if part is None or part[1] != dim else places.get(part[2:])
        if operand is not None and _can_read(node, operand, sharing):
            replaced = _replace(node, operand, None, ctx, lies_alike=False)
            if replaced:
                sharing.merge(node, operand)
            count += replaced
    return count


def _part(node: fx.Node) -> Part | None:
    """What of which tensor a node is; None if it is no part, or that cannot be told."""
    if node.target is aten.slice.Tensor:
        given: list[Any] = list(node.args)
        source, dim, start, _, step = given + [0, None, None, 1][len(given) - 1 :]
        begin = 0 if start is None else _plain(_value(start))
        if step != 1 or node.kwargs or _is_negative(begin):
            return None
        dim = dim % source.meta["val"].dim()
        return source, dim, begin, begin + _plain(node.meta["val"].size(dim))
    if node.target is not operator.getitem or node.args[0].target not in SPLITS:
        return None
    split, index = node.args
    if split.kwargs or not isinstance(index, int) or index < 0:
        return None
    dim = (split.args[2] if len(split.args) > 2 else 0) % split.args[0].meta["val"].dim()
    sizes = [_plain(part.size(dim)) for part in split.meta["val"]]
    begin = sum(sizes[:index])
    return split.args[0], dim, begin, begin + sizes[index]


def _can_read(node: fx.Node, operand: fx.Node, sharing: Sharing) -> bool:
    """Whether readers of a part of a cat may read what was put there."""
    one, other = node.meta["val"], operand.meta["val"]
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return False
    if sharing.is_returned(node) or sharing.is_written(node) or sharing.is_written(operand):
        return False
    return layout_of(one) == layout_of(other) or _readers_agree(node, operand)


def _readers_agree(node: fx.Node, operand: fx.Node) -> bool:
    """Whether results lie as before if the operand, of other strides, is read."""
    value = operand.meta["val"]
    if not isinstance(value, FakeTensor) or not _is_static(value):
        return False
    for user in node.users:
        if not isinstance(user.target, OpOverload) or is_mutable_op(user.target):
            return False

        def known(source: fx.Node) -> Any:
            return (operand if source is node else source).meta["val"]

        args, kwargs = pytree.tree_map_only(fx.Node, known, (user.args, user.kwargs))
        try:
            with value.fake_mode, torch.no_grad():
                found = user.target(*args, **kwargs)
        except (RuntimeError, ValueError):  # a view that the other strides do not allow
            return False
        if _layouts(found) != _layouts(user.meta["val"]):
            return False
    return True


def _replace(
    node: fx.Node, new: fx.Node, builder: Builder | None, ctx: Ctx, *, lies_alike: bool = True
) -> int:
    reason = why_not_same(node, new) if lies_alike else None
    if reason is not None or not ctx.fuel.spend(f"cancel_cat_split: {node.name}"):
        if builder is not None:
            builder.take_back()
        return 0
    node.replace_all_uses_with(new)
    _erase_unread(node)
    return 1


def _erase_unread(node: fx.Node) -> None:
    """Erase a node, and what it alone read of the operators this pass knows."""
    todo = [node]
    while todo:
        current = todo.pop()
        if current._erased or current.users:
            continue
        sources = current.all_input_nodes
        current.graph.erase_node(current)
        todo += [s for s in sources if s.target in KNOWN]


KNOWN: Final = SPLITS | {aten.cat.default, aten.slice.Tensor, operator.getitem}


def _dim_of_cat(node: fx.Node) -> int | None:
    dim = node.args[1] if len(node.args) > 1 else 0
    rank = node.meta["val"].dim()
    return dim % rank if isinstance(dim, int) and rank and not node.kwargs else None


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def _plain(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_negative(size: Any) -> bool:
    return isinstance(size, int) and size < 0  # a symbolic one is no part's beginning then


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.size(), *value.stride()))


def _layouts(value: Any) -> Sequence[Any]:
    leaves = pytree.tree_leaves(value)
    return [(v.dtype, layout_of(v)) if isinstance(v, torch.Tensor) else v for v in leaves]
