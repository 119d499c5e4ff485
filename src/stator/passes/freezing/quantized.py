"""Integers that stand for floats, as passes see them: inputs, weights, and what stands behind.

A model that PT2E quantised computes in floats, between operators that say which integers would do.
Moves and quantisation of single elements may change places: an operator finds its integers behind
views, and everyone who reads one dequantised tensor finds them for himself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.edit import VALUE
from stator.ops.packs import centres, channel_scales, same_scale
from stator.ops.quantize import quantized
from stator.torch_api import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten

QUANTIZE: Final = quantized.quantize_per_tensor.default
DEQUANTIZE: Final = (
    quantized.dequantize_per_tensor.default,
    quantized.dequantize_per_tensor.tensor,
)
DEQUANTIZE_CHANNELS: Final = quantized.dequantize_per_channel.default
BOUNDS: Final = {torch.uint8: (0, 255), torch.int8: (-128, 127)}

MOVES: Final = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.clone.default,
    }
)
FLOATS: Final = (torch.float32, torch.bfloat16)
TURNS: Final = (aten.t.default, aten.permute.default, aten.transpose.int)


@dataclass(frozen=True, slots=True)
class Integers:
    """A dequantised tensor: (moves of `source` - zero_point) * scale."""

    source: fx.Node
    moves: tuple[fx.Node, ...]  # of floats, to be done to integers
    scale: Any  # a number; a node if it is known at run time alone
    zero_point: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the integers."""
        dtype: torch.dtype = self.source.meta["val"].dtype
        return dtype

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is known at run time alone."""
        return isinstance(self.scale, fx.Node)

    @staticmethod
    def behind(read: Any) -> Integers | None:
        """Those of which `read` is made; None if it is no dequantised tensor."""
        moves: list[fx.Node] = []
        node = read
        while isinstance(node, fx.Node) and _only_moves(node):
            moves += [] if is_cast(node) else [node]
            node = node.args[0]
        if not isinstance(node, fx.Node) or node.target not in DEQUANTIZE:
            return None
        source, scale, zero_point, *_ = node.args
        if node.meta["val"].dtype is not torch.float32 or source.meta["val"].dtype not in BOUNDS:
            return None
        is_one = isinstance(scale, fx.Node) == isinstance(zero_point, fx.Node)
        return Integers(source, tuple(reversed(moves)), scale, zero_point) if is_one else None

    def moved(self, builder: Builder) -> fx.Node:
        """The integers, where the floats were."""
        return moved(self.source, self.moves, builder)


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A dequantised weight, whose first axis has the channels."""

    node: fx.Node  # int8
    scales: Any  # a tensor, or a number for all of it
    zero_points: fx.Node | None

    @staticmethod
    def behind(read: Any, settled: Collection[fx.Node], *, turned: bool) -> IntegerWeight | str:
        """The one that `read` is; `turned`: its two axes are exchanged.  Otherwise the reason."""
        node, turns = read, 0
        while node.target in (*TURNS, aten.clone.default) or is_cast(node):
            turns += node.target in TURNS
            if node.target in TURNS and node.meta["val"].dim() != 2:
                return "its weight is turned"
            node = node.args[0]
        if node.target is not DEQUANTIZE_CHANNELS and node.target not in DEQUANTIZE:
            return "its weight is not dequantised"
        if any(source not in settled for source in node.all_input_nodes):
            return "its weight is no constant"
        if node.meta["val"].dtype is not torch.float32 or turns % 2 != turned:
            return "its weight is not dequantised to float32, rows being channels"
        return _integer_weight(node)

    def prepared(self, graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
        """Nodes for its scales and zero points."""
        value = self.node.meta["val"]
        if isinstance(self.scales, fx.Node):
            size = self.scales.meta["val"].numel()
            scales = graph.call_function(channel_scales, (self.scales,))
        else:
            size, scales = 1, graph.call_function(same_scale, (self.node, self.scales))
        scales.meta = {"val": value.new_empty(size, dtype=torch.float32)}
        points = graph.call_function(centres, (scales,))
        points.meta = {"val": value.new_empty(size, dtype=torch.int64)}
        return scales, points


def _integer_weight(node: fx.Node) -> IntegerWeight | str:
    source, scale, zero_point, *rest = node.args
    if source.meta["val"].dtype is not torch.int8:
        return "its weight is not of int8"
    if isinstance(zero_point, fx.Node) and _is_known_not_to_be_0(zero_point):
        return "its weight has zero points other than 0"
    if node.target is DEQUANTIZE_CHANNELS:
        if rest[0] != 0:
            return "the channels of its weight are not its rows"
        return IntegerWeight(source, scale, zero_point)
    if isinstance(scale, fx.Node):
        return IntegerWeight(source, scale, zero_point)
    return IntegerWeight(source, scale, None) if zero_point == 0 else "its weight has a zero point"


def _is_known_not_to_be_0(weight: fx.Node) -> bool:
    """Whether the tensor that a weight is has been seen to hold anything but zeros."""
    held = weight.meta.get(VALUE)
    value = None if held is None else held()
    with unset_fake_temporarily():
        return value is not None and not isinstance(value, FakeTensor) and bool(value.any())


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of single elements, as oneDNN calls it."""

    name: str = "none"
    numbers: tuple[float, ...] = ()
    algorithm: str = ""

    @staticmethod
    def of(node: fx.Node) -> Activation | None:
        """The one that a node is."""
        if node.target is aten.gelu.default:
            return Activation("gelu", (), str(node.kwargs.get("approximate", "none")))
        if node.target in (aten.hardtanh.default, aten.clamp.default):
            bounds = (*node.args[1:], -1.0, 1.0)[:2] if len(node.args) != 2 else ()
            numbers = [float(n) for n in bounds if isinstance(n, int | float)]
            is_plain = len(numbers) == 2 and not node.kwargs
            return Activation("hardtanh", tuple(numbers)) if is_plain else None
        name = ACTIVATIONS.get(node.target)
        return None if name is None else Activation(name)


BEHIND_SUM: Final = frozenset({"none", "relu"})  # oneDNN has no other behind a sum of integers
# Those with numbers, which reach oneDNN's operators on integers from Python alone.
BOUNDED: Final = frozenset({"hardtanh"})
ACTIVATIONS: Final[Mapping[Any, str]] = {
    aten.relu.default: "relu",
    aten.silu.default: "swish",
    aten.hardswish.default: "hardswish",
}


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind a product and is part of it."""

    nodes: tuple[fx.Node, ...]  # the product, and all up to the last
    moves: tuple[fx.Node, ...]  # those among them that only move
    plus: Integers | None  # what is added first
    activation: Activation
    quantize: fx.Node | None
    ends: str  # why there is no more

    @property
    def last(self) -> fx.Node:
        """Whose place the new call takes."""
        return self.nodes[-1]

    @property
    def output(self) -> tuple[float, int, torch.dtype]:
        """Scale, zero point and type of the result."""
        if self.quantize is None:
            return 1.0, 0, self.last.meta["val"].dtype
        _, scale, zero_point, _, _, dtype = self.quantize.args
        return scale, zero_point, dtype

    @staticmethod
    def of(
        product: Sequence[fx.Node],
        names: Collection[str],
        may_add: Callable[[Integers, fx.Node], bool] | None = None,
    ) -> Tail:
        """The longest; activations of these names may be in it, and one sum that `may_add`."""
        nodes, kept, activation = [*product], len(product), Activation()
        quantize, plus, ends = None, None, ""
        while quantize is None:
            if len(nodes[-1].users) != 1:
                ends = f"{len(nodes[-1].users)} read {nodes[-1].name}"
                break
            (user,) = nodes[-1].users
            if may_add is not None and len(nodes) == len(product):
                plus = _added(user, nodes[-1], may_add)
            own = Activation.of(user) if user.all_input_nodes == [nodes[-1]] else None
            if own is not None and own.name in names and activation.name == "none":
                activation = own
            elif _is_whole_quantize(user):
                quantize = user
            elif (len(nodes) > len(product) or plus is None) and not _only_moves(user):
                ends = f"{user.name} reads it"
                break
            nodes.append(user)
            kept = kept if _only_moves(user) else len(nodes)
        # The library adds integers to their like alone.
        alike = plus is not None and quantize is not None and quantize.args[5] is plus.dtype
        if plus is not None and not (alike and activation.name in BEHIND_SUM):
            return Tail.of(product, names)
        inside = tuple(nodes[:kept])
        moves = tuple(node for node in inside if node.target in MOVES)
        return Tail(inside, moves, plus, activation, quantize, ends)

    def take_place(self, new: fx.Node) -> None:
        """Let `new` be read instead."""
        self.last.replace_all_uses_with(new)
        for node in reversed(self.nodes):
            node.graph.erase_node(node)

    def told(self) -> str:
        """For the log."""
        parts = (["add"] if self.plus is not None else []) + (
            [self.activation.name] if self.activation.name != "none" else []
        )
        inside = f", {' and '.join(parts)} inside" if parts else ""
        out = str(self.output[2]).removeprefix("torch.")
        because = f" ({self.ends})" if self.quantize is None else ""
        return f"is int8{inside}, and gives {out}{because}"


def is_cast(node: fx.Node) -> bool:
    """Whether a node casts from one of oneDNN's floating-point types to the other.

    Integers have no need of it: what is left out is a rounding.
    """
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node), "a cast has an operand"
    return node.meta["val"].dtype in FLOATS and source.meta["val"].dtype in FLOATS


def _only_moves(node: fx.Node) -> bool:
    return node.target in MOVES or is_cast(node)


def _added(
    node: fx.Node, product: fx.Node, may_add: Callable[[Integers, fx.Node], bool]
) -> Integers | None:
    """The integers that a node adds to a product, one to each element; None if it does not."""
    if node.target is not aten.add.Tensor or node.kwargs or node.args.count(product) != 1:
        return None
    (other,) = (arg for arg in node.args if arg is not product)
    found = Integers.behind(other)
    if found is None or found.moves or found.is_dynamic:
        return None
    same = found.source.meta["val"].size() == product.meta["val"].size()
    return found if same and may_add(found, node) else None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a tensor, or moves or casts of it."""
    for user in node.users:
        if _only_moves(user):
            yield from readers(user)
        else:
            yield user


def _is_whole_quantize(node: fx.Node) -> bool:
    """Whether a node quantises to all of a type: the library knows no other bounds."""
    return node.target is QUANTIZE and BOUNDS.get(node.args[5]) == (node.args[3], node.args[4])


def moved(node: fx.Node, moves: Collection[fx.Node], builder: Builder) -> fx.Node:
    """Moves of others, done to `node`."""
    for move in moves:
        node = builder.call(move.target, node, *move.args[1:], **move.kwargs)
    return node
