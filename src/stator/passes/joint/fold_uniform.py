"""Values that are one number everywhere become `full`; adding 0 and multiplying by 1 vanish."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.rules import why_not_same
from stator.graph.run import Ctx
from stator.graph.sharing import Sharing
from stator.torch_api import is_random_op, is_view_op, pytree

aten = torch.ops.aten

# One number each, and where it stands among the arguments.
MADE: Final[dict[Any, Any]] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
ZEROS: Final = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
ONES: Final = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
SIMPLE: Final = frozenset(  # nothing is gained by another spelling of these
    {aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default}
)
COPIES: Final = frozenset({aten.clone.default, aten.repeat.default, aten._unsafe_view.default})
FOLDED_TYPES: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
COUNTS: Final[dict[Any, Callable[..., tuple[Any, Any]]]] = {  # to where they start, and the step
    aten.arange.default: lambda end: (0, 1),
    aten.arange.start: lambda start, end: (start, 1),
    aten.arange.start_step: lambda start, end, step=1: (start, step),
}
ATTENTIONS: Final = (  # whose fourth argument is added to scores
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
ARITHMETIC: Final = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def fold_uniform(graph: fx.Graph, ctx: Ctx) -> int:
    """Compute what is one number everywhere; return how many nodes were replaced.

    before: y = ones_like(x);  z = expand(y * 3.0, [4, 2, 3]);  u = x * y;  v = u - z
    after:  z = full([4, 2, 3], 3.0);  v = x - z
    """
    sharing = Sharing(graph)
    found = _Uniform(graph, sharing)
    for node in graph.nodes:
        found.look_at(node)
    folded = _drop_neutral(graph, ctx, found) + _drop_bias(graph, ctx, found)
    for node in reversed(list(found.numbers)):
        if node.users and node.target not in SIMPLE:
            folded += found.replace(node, ctx)
        elif not node.users:
            graph.erase_node(node)
    return folded


@dataclass(slots=True)
class _Uniform:
    """Tensors of one element for those that repeat it, in the order of the graph."""

    graph: fx.Graph
    sharing: Sharing
    numbers: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    sizes: dict[Any, fx.Node] = field(default_factory=dict)  # symbolic ones, where first known
    naturals: set[fx.Node] = field(default_factory=set)  # counts from 0 on, seen as views or not

    def look_at(self, node: fx.Node) -> None:
        """Note the node's number, if it has one."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self.sizes.setdefault(value.node.expr, node)
        if node.op != "call_function" or not node.users or not _is_plain(value):
            return
        if self.sharing.is_written(node):
            return  # it is a number only until then
        if self._counts(node):
            self.naturals.add(node)
        number = self._number(node, value)
        if number is not None and number.dtype == value.dtype:
            self.numbers[node] = number.reshape([1] * value.ndim)

    def _counts(self, node: fx.Node) -> bool:
        """Whether all of its numbers are known to be at least 0."""
        if node.target in COUNTS:
            start, step = COUNTS[node.target](*node.args)
            return isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0
        same = is_view_op(node.target) or node.target in COPIES
        return same and node.args[0] in self.naturals

    def _number(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
        target = node.target
        if target is aten.ge.Scalar and node.args[0] in self.naturals and node.args[1] == 0:
            return _single(1, value)  # as masks are written that leave everything
        if target in MADE:
            position = MADE[target]
            given = node.args[position] if position < len(node.args) else None
            return _single(given, value)
        if target in ZEROS or target in ONES:
            return _single(int(target in ONES), value)
        is_whole_product = target is aten.mul.Tensor and not value.dtype.is_floating_point
        if is_whole_product and any(self._is_zero(arg) for arg in node.args):
            return _single(0, value)
        if not node.all_input_nodes or any(n not in self.numbers for n in _tensors(node)):
            return None
        if is_view_op(target) or target in COPIES or self._is_padded_alike(node):
            return self._viewed(node, value)
        return self._computed(node) if _is_pointwise(target) else None

    def _is_zero(self, argument: Any) -> bool:
        if argument in self.numbers:
            return not self.numbers[argument].item()
        return isinstance(argument, int) and argument == 0

    def _is_padded_alike(self, node: fx.Node) -> bool:
        """Whether it is surrounded by the number that it is."""
        if node.target is not aten.constant_pad_nd.default:
            return False
        around = node.args[2] if len(node.args) > 2 else 0
        return bool(self.numbers[node.args[0]].item() == around)

    def _viewed(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
        source = self.numbers.get(node.args[0])
        return source if source is not None and source.dtype == value.dtype else None

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if any(n not in self.numbers for n in node.all_input_nodes):
            return None  # a symbolic number
        args, kwargs = pytree.tree_map_only(
            fx.Node, self.numbers.__getitem__, (node.args, node.kwargs)
        )
        if node.target is aten._to_copy.default and not _can_be_cast(args[0], node.meta["val"]):
            return None
        try:
            result = node.target(*args, **{**kwargs, **_here(kwargs)})
        except (RuntimeError, OverflowError):  # a division by zero: raised when it runs
            return None
        return result if isinstance(result, torch.Tensor) and result.numel() == 1 else None

    def replace(self, node: fx.Node, ctx: Ctx) -> int:
        """Put `full` in the node's place, if that lies as it does; 1 if so."""
        value = node.meta["val"]
        sizes = [self._size(size, node) for size in value.size()]
        if any(size is None for size in sizes) or self._is_shared_view(node):
            return 0
        number = self.numbers[node].item()
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        builder = Builder(self.graph, node)
        new = builder.call(aten.full.default, sizes, number, **options)
        reason = why_not_same(node, new)
        if reason is not None or not ctx.fuel.spend(f"fold_uniform: {node.name}"):
            builder.take_back()
            return 0
        new.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return 1

    def _is_shared_view(self, node: fx.Node) -> bool:
        """Whether the caller gets a view, and perhaps what it is a view of."""
        is_view = is_view_op(node.target) or node.target is aten._unsafe_view.default
        return is_view and self.sharing.is_returned(node)

    def _size(self, size: Any, node: fx.Node) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        known = self.sizes.get(size.node.expr)
        return known if known is not None and known < node else None


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype in FOLDED_TYPES and not value.is_neg()


def _single(number: Any, value: torch.Tensor) -> torch.Tensor | None:
    """A tensor of one element; None if the number is none, or not one of the type."""
    if not isinstance(number, int | float):
        return None
    if isinstance(number, float) and not value.dtype.is_floating_point:
        return None
    try:
        return torch.full([], number, dtype=value.dtype)
    except (RuntimeError, OverflowError):  # too large: torch complains when it runs
        return None


def _tensors(node: fx.Node) -> list[fx.Node]:
    sources = node.all_input_nodes
    return [source for source in sources if isinstance(source.meta.get("val"), torch.Tensor)]


def _here(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A place to compute, whatever the device: it is one number."""
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _is_pointwise(target: Any) -> bool:
    if target is aten._to_copy.default:
        return True
    return torch.Tag.pointwise in getattr(target, "tags", ()) and not is_random_op(target)


def _can_be_cast(number: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether every machine casts it to the same; not so floats that a whole type has not."""
    if not number.dtype.is_floating_point or value.dtype.is_floating_point:
        return True
    return bool(0 <= number.item() < 128)  # NaN is not


def _drop_neutral(graph: fx.Graph, ctx: Ctx, known: _Uniform) -> int:
    """Let readers of x + 0, x - 0, x * 1 and x / 1 read x, in the type that they read."""
    found = [n for t in ARITHMETIC for n in graph.find_nodes(op="call_function", target=t)]
    dropped = 0
    for node in sorted(found):  # sources first: of a chain, each is judged by what is left
        source = None if node in known.numbers else _kept(node, known.numbers)
        if source is not None and isinstance(source.meta.get("val"), torch.Tensor):
            dropped += _read_instead(node, source, known.sharing, ctx)
    return dropped


def _drop_bias(graph: fx.Graph, ctx: Ctx, known: _Uniform) -> int:
    """Let attention add nothing, where that is what it adds: its kernels without are faster."""
    dropped = 0
    for target in ATTENTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            number = known.numbers.get(node.args[3])
            adds_nothing = number is not None and number.item() == 0
            if adds_nothing and ctx.fuel.spend(f"fold_uniform: {node.name}"):
                node.update_arg(3, None)
                dropped += 1
    return dropped


def _read_instead(node: fx.Node, source: fx.Node, sharing: Sharing, ctx: Ctx) -> int:
    value = node.meta["val"]
    builder = Builder(node.graph, node)
    new = source
    if value.dtype != source.meta["val"].dtype:
        new = builder.run(lambda x: aten._to_copy.default(x, dtype=value.dtype), source)
    elif sharing.why_not_merge(node, source) is not None:
        return 0
    reason = why_not_same(node, new)
    if reason is not None or not ctx.fuel.spend(f"fold_uniform: {node.name}"):
        builder.take_back()
        return 0
    if new is source:
        sharing.merge(node, source)
    else:
        new.meta = {**node.meta, "val": new.meta["val"]}
        sharing.replace(node, new)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return 1


def _kept(node: fx.Node, numbers: dict[fx.Node, torch.Tensor]) -> fx.Node | None:
    """The operand that the node's values are; None if there is none."""
    value = node.meta.get("val")
    if not _is_plain(value) or node.kwargs:  # another alpha: nobody writes it
        return None
    one, other = node.args
    if _is_neutral(node.target, other, value.dtype, numbers) and isinstance(one, fx.Node):
        return one
    if node.target not in (aten.add.Tensor, aten.mul.Tensor) or not isinstance(other, fx.Node):
        return None
    return other if _is_neutral(node.target, one, value.dtype, numbers) else None


def _is_neutral(
    target: Any, operand: Any, dtype: torch.dtype, numbers: dict[fx.Node, torch.Tensor]
) -> bool:
    """Whether the second operand leaves every value of the first, -0.0 and NaN too."""
    number = numbers[operand].item() if operand in numbers else operand
    if not isinstance(number, int | float):
        return False
    if target in (aten.mul.Tensor, aten.div.Tensor):
        return number == 1
    if number != 0 or not dtype.is_floating_point:
        return number == 0
    negative = math.copysign(1, number) < 0
    return negative == (target is aten.add.Tensor)  # -0.0 + 0.0 is 0.0
