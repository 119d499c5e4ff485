"""y * factor + summand, a number each for every channel, as part of the product that makes y.

What is computed of weights is written as nodes, which become recipes of constants: in float64 if
the weight has 32 bits, in float32 if it has 16, and rounded once, however much is folded.  Where a
factor is infinite or NaN, so is all of its channel, though perhaps not in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder, Value
from stator.graph.edit import needed_by
from stator.graph.rules import layout_of
from stator.graph.run import Ctx
from stator.passes.freezing.take_constants import is_too_large
from stator.torch_api import is_mutable_op

aten = torch.ops.aten

CAST: Final = aten._to_copy.default
PRODUCTS: Final = (aten.convolution.default, aten.mm.default, aten.addmm.default)
VIEWS: Final = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
ADD: Final = (aten.add.Tensor, aten.add.Scalar)
SUB: Final = (aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
MUL: Final = (aten.mul.Tensor, aten.mul.Scalar)
DIV: Final = (aten.div.Tensor, aten.div.Scalar)
ARITHMETIC: Final = frozenset({*ADD, *SUB, *MUL, *DIV})
TURNS: Final = (aten.t.default, aten.permute.default, aten.transpose.int)
HALF_RANGE: Final = 16.0  # a factor that leaves weights of float16 where it has all its digits
LARGE: Final = 1 << 18  # elements of a weight that is not held twice for the sake of a fold

Affine = Callable[..., tuple[Any, Any]]  # factor and summand of constants; None changes nothing


@dataclass(frozen=True, slots=True)
class Product:
    """A convolution or matrix product; its result has channels along axis 1."""

    node: fx.Node
    read: fx.Node  # the result, or a view of it, perhaps with more digits

    @staticmethod
    def behind(read: Any) -> Product | None:
        """The product that `read` is a view of, or a cast to a wider type."""
        node = read
        while isinstance(node, fx.Node) and (node.target in VIEWS or _widens(node)):
            node = node.args[0]
        is_product = isinstance(node, fx.Node) and node.target in PRODUCTS
        return Product(node, read) if is_product else None

    @property
    def is_convolution(self) -> bool:
        """Whether it is of images."""
        return self.node.target is aten.convolution.default

    @property
    def weight(self) -> fx.Node:
        """What the input is multiplied by."""
        weight = self.node.args[1 if self.is_convolution else -1]
        assert isinstance(weight, fx.Node), "an operand is a node"
        return weight

    @property
    def bias(self) -> Any:
        """What is added: a node or None."""
        if self.is_convolution:
            return self.node.args[2]
        return self.node.args[0] if self.node.target is aten.addmm.default else None

    @property
    def channels(self) -> int:
        """How many there are."""
        return int(self.node.meta["val"].size(1))

    def has_channels(self, axis: int) -> bool:
        """Whether the value that is read has the channels along an axis."""
        if self.read is self.node:
            return axis == 1
        _, channels, *rest = self.node.meta["val"].size()
        size, *behind = self.read.meta["val"].size()[axis:]
        is_known = all(isinstance(n, int) for n in (*rest, size, *behind))
        return is_known and size == channels and math.prod(rest) == math.prod(behind)

    def why_not(self, settled: Collection[fx.Node]) -> str | None:
        """None if it may have another result; otherwise the reason, for the log."""
        if reason := self.why_not_settled(settled):
            return reason
        node = self.read
        while len(node.users) == 1:
            if node is self.node:
                return None
            node = node.args[0]  # whatever sizes a view has, which may be nodes
        return f"others read {node.name}, too"

    def why_not_settled(self, settled: Collection[fx.Node]) -> str | None:
        """None if it is a plain product with constants; otherwise the reason."""
        name, value = self.node.name, self.weight.meta["val"]
        if self.weight not in settled:
            return f"the weight of {name} is no constant"
        if self.bias is not None and self.bias not in settled:
            return f"the bias of {name} is no constant"
        if self.node.kwargs or not value.dtype.is_floating_point:
            return f"{name} is no plain product of floating-point numbers"
        if not value.numel():
            return f"the weight of {name} is empty"
        return None

    def why_not_scaled(self) -> str | None:
        """None if its weight may be replaced by another of its size; otherwise the reason."""
        above, node = [self.weight], self.weight
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
            above.append(node)
        shared = [one for one in above if len(one.users) > 1]
        if shared and shared[0].meta["val"].numel() > LARGE:
            return f"others read {shared[0].name}, which is large, too"
        return None

    def why_not_in_range(self, factor: float | None) -> str | None:
        """None if its weight, times a factor, has all its digits; otherwise the reason.

        None stands for factors that are tensors: new weights come without a new compilation, so
        that nobody looks at values here.
        """
        if self.weight.meta["val"].dtype is not torch.float16:
            return None  # the others have the range of float32 at least
        if factor is None:
            return "weights multiplied by a tensor may leave the range of float16"
        total = abs(factor) * _factor_of(self.weight)
        if not 1 / HALF_RANGE <= total <= HALF_RANGE:
            return f"weights multiplied by {total:g} would lose digits in float16"
        return None


def _factor_of(weight: fx.Node) -> float:
    """What folds have multiplied a weight by."""
    total, node = 1.0, weight
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if node.target is aten.mul.Tensor:
            total *= math.prod(abs(one) for one in node.args if not isinstance(one, fx.Node))
        (node,) = node.all_input_nodes
    return total


def fold(
    product: Product,
    result: fx.Node,
    affine: Affine,
    constants: Sequence[Any],
    settled: dict[fx.Node, None],
    ctx: Ctx,
) -> str | None:
    """Let `product` compute the affine function that `result` is; the reason, if it may not.

    What is made for that joins the nodes that are `settled`.
    """
    was, now, own = (node.meta["val"] for node in (result, product.read, product.node))
    if layout_of(was) != layout_of(now) or not (
        was.dtype == own.dtype or _is_rounded_behind(result, own.dtype, settled)
    ):
        return f"it makes {was.dtype} {tuple(was.size())} of {own.dtype} {tuple(now.size())}"
    builder = Builder(product.node.graph, result)
    weight, bias = builder.run(_folded, product, affine, product.weight, product.bias, *constants)
    if reason := why_not_kept(builder.added, f"fold: {result.name}", ctx):
        builder.take_back()
        return reason
    hoist(builder.added, product.node)
    settled.update(dict.fromkeys(builder.added))
    new = _rewritten(product, weight, bias)
    read = new if product.read is product.node else product.read
    if was.dtype != now.dtype:
        read = Builder(result.graph, result).call(CAST, read, dtype=was.dtype)
    result.replace_all_uses_with(read)
    result.graph.erase_node(result)  # it would count as a reader
    return None


def _is_rounded_behind(result: fx.Node, dtype: torch.dtype, settled: Collection[fx.Node]) -> bool:
    """Whether a result of more digits is rounded to `dtype` anyway.

    At once; or, of a multiplication, behind arithmetic with constants: its digits are those of the
    product, which was rounded before.  Those of a sum might be all that is left of a later one.
    """
    links = (*VIEWS, *ARITHMETIC) if result.target in (*MUL, *DIV) else VIEWS
    node = result
    while len(node.users) == 1:
        (reader,) = node.users
        if is_cast(reader):
            return bool(reader.meta["val"].dtype == dtype)
        others = [one for one in reader.all_input_nodes if one is not node]
        is_settled = reader.target in VIEWS or all(one in settled for one in others)
        if reader.target not in links or not is_settled:
            return False
        node = reader
    return False


def is_cast(node: fx.Node) -> bool:
    """Whether the node changes the type of its operand and nothing else."""
    return node.target is CAST and set(node.kwargs) == {"dtype"}


def _widens(node: fx.Node) -> bool:
    """Whether the node casts to a floating-point type that has all numbers of its operand's."""
    if not is_cast(node):
        return False
    narrow, wide = (one.meta["val"].dtype for one in (*node.all_input_nodes, node))
    return bool(wide.is_floating_point and torch.promote_types(narrow, wide) == wide)


def why_not_kept(made: Sequence[fx.Node], what: str, ctx: Ctx) -> str | None:
    """None if the rewrite `what` may make these constants; otherwise the reason."""
    if any(map(is_too_large, made)):  # it would be made anew at every call
        return "what would be read in its place is too large to keep"
    return None if ctx.fuel.spend(what) else "there is no fuel left"


def hoist(made: Sequence[fx.Node], place: fx.Node) -> None:
    """Move nodes, and what they are made of, before `place`."""
    for node in sorted(one for one in needed_by(made) if place < one):
        place.prepend(node)


def writer_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """A call from `first` to `last` that writes to something: reading may not move across it."""
    node = first
    while node is not last:
        if is_mutable_op(node.target):
            return node
        node = node.next
    return None


def _folded(
    product: Product, affine: Affine, weight: Value, bias: Value | None, *constants: Any
) -> tuple[Value, Value | None]:
    factor, summand = affine(*(_by_channel(one) for one in constants))
    total = None if bias is None else _wide(bias)
    exact = weight
    if factor is not None:
        exact = _unrounded(weight)
        wide = torch.float64 if exact.dtype.itemsize > 2 else torch.float32
        exact = _scaled(product, _cast(exact, wide), factor)
        total = None if total is None else total * factor
    if summand is not None:
        total = _filled(product, weight, summand) if total is None else total + summand
    return _cast(exact, weight.dtype), None if total is None else _cast(total, weight.dtype)


def _by_channel(constant: Any) -> Any:
    """A constant as a vector of float64; numbers and None stay."""
    if not isinstance(constant, Value):
        return constant
    wide = _wide(constant)
    return wide if wide.ndim == 1 else aten.view.default(wide, [constant.value.numel()])


def _wide(value: Value) -> Any:
    return _cast(_unrounded(value), torch.float64)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)


def _unrounded(value: Value) -> Value:
    """What a value was before it was rounded to fewer bits."""
    node = value.node
    if node.op != "call_function" or node.target not in (aten._to_copy.default, *TURNS):
        return value
    source = value.tracer.proxy(node.args[0])
    if node.target in TURNS:
        inner = _unrounded(source)
        return value if inner is source else node.target(inner, *node.args[1:])
    is_rounded = source.dtype.is_floating_point and source.dtype.itemsize > value.dtype.itemsize
    return _unrounded(source) if is_rounded and set(node.kwargs) == {"dtype"} else value


def _scaled(product: Product, weight: Value, factor: Any) -> Any:
    """The weight, what belongs to a channel multiplied by its factor."""
    if not isinstance(factor, Value):
        return weight * factor
    factor = _cast(factor, weight.dtype)
    if not product.is_convolution or factor.shape[0] == 1:
        return weight * factor
    depth, width, *rest = weight.shape
    is_transposed, groups = product.node.args[6], product.node.args[8]
    ones = [1] * len(rest)
    if not is_transposed:
        return weight * aten.view.default(factor, [depth, 1, *ones])
    # Rows are inputs: those of a group meet the channels of the group alone.
    grouped = aten.view.default(weight, [groups, depth // groups, width, *rest])
    scaled = grouped * aten.view.default(factor, [groups, 1, width, *ones])
    return aten.view.default(scaled, [depth, width, *rest])


def _filled(product: Product, weight: Value, summand: Any) -> Any:
    """A summand for every channel."""
    if isinstance(summand, Value):
        return aten.expand.default(summand, [product.channels])
    return aten.new_full.default(weight, [product.channels], summand, dtype=torch.float64)


def _rewritten(product: Product, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    node, graph = product.node, product.node.graph
    arguments = (*node.args[:1], weight, bias, *node.args[3:])
    target = node.target
    if not product.is_convolution:
        x = node.args[-2]
        arguments = (x, weight) if bias is None else (bias, x, weight)
        target = aten.mm.default if bias is None else aten.addmm.default
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new
