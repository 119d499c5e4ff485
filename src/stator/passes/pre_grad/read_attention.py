"""What a product means, if it is an attention.

Factors may stand at q, at k or at the scores, masks may be added, filled in or chosen; dropout,
casts and views may lie between.  Read from the outside in: the product with v, what may stand
before the softmax, the softmax over the last dimension, and scores that have to turn out as
`scale * q @ k.mT + mask`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx

from stator.graph.torch_calls import Call, is_written_between, reading, value_of

CASTS: Final = frozenset({"to", "float", "half", "bfloat16", "type_as"})


@dataclass(frozen=True, slots=True)
class Operand:
    """A node, and the order in which its dimensions are wanted."""

    node: fx.Node
    order: tuple[int, ...] | None = None

    def laid_out(self, value: Any) -> Any:
        """The value with its dimensions in that order."""
        return value if self.order is None else value.permute(*self.order)


@dataclass(frozen=True, slots=True)
class Added:
    """A mask that is added to the scores, times a number."""

    node: fx.Node
    factor: float


@dataclass(frozen=True, slots=True)
class Filled:
    """Scores that are replaced where a condition says so."""

    node: fx.Node
    value: float  # -inf, or the smallest number there is
    where: bool  # what the condition is there


@dataclass(slots=True)
class Attention:
    """softmax(scale * q @ k.mT + masks) @ v."""

    node: fx.Node
    q: Operand
    k: Operand
    v: Operand
    scale: float = 1.0
    dropout: float = 0.0
    factors: list[tuple[fx.Node, bool]] = field(default_factory=list)  # symbols; True: divided by
    masks: list[Added | Filled] = field(default_factory=list)  # the outermost first
    inner: list[fx.Node] = field(default_factory=list)  # what is gone then
    batch: list[Any] | None = None  # the sizes in front, where a view splits or joins them
    out_order: tuple[int, ...] | None = None

    @property
    def may_be_dead(self) -> bool:
        """Whether a row may see nothing at all."""
        return any(isinstance(one, Added) or one.value == -math.inf for one in self.masks)


class NotAttention(Exception):  # noqa: N818  says what it is
    """A product of a softmax that means something else."""


def read_attention(node: fx.Node) -> Attention | str | None:
    """The attention whose result `node` is; why it is none; None if nothing is like one."""
    call = reading(node)
    if call is None or call.name not in ("matmul", "einsum"):
        return None
    reader = _Reader(node)
    try:
        return reader.read(call)
    except NotAttention as error:
        return str(error) if reader.saw_softmax else None


@dataclass(slots=True)
class _Reader:
    """One walk from a product down to q and k."""

    node: fx.Node
    scale: float = 1.0
    dropout: float = 0.0
    factors: list[tuple[fx.Node, bool]] = field(default_factory=list)
    masks: list[Added | Filled] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    batch: list[Any] | None = None
    saw_softmax: bool = False

    def read(self, call: Call) -> Attention:
        weights, v, out_order = self._last_product(call)
        scores = self._softmax(weights)
        q, k = self._scores(scores)
        q, k = self._unscaled(q), self._unscaled(k)
        if self.batch is None and any(_rank(one.node) not in (3, 4) for one in (q, k, v)):
            raise NotAttention("q, k and v have other dimensions than torch's attention takes")
        return Attention(
            self.node,
            q,
            k,
            v,
            self.scale,
            self.dropout,
            self.factors,
            self.masks,
            self.inner,
            self.batch,
            out_order,
        )

    # The product with v.

    def _last_product(self, call: Call) -> tuple[fx.Node, Operand, tuple[int, ...] | None]:
        if call.name == "matmul":
            return _node(call["input"]), Operand(_node(call["other"])), None
        left, right, out = _letters(call, 2)
        weights, v = (_node(operand) for operand in call["operands"])
        *batch, row, column = left
        (width,) = _only(set(right) - set(left))
        inside = [*batch, row, width]
        if set(right) != {*batch, column, width} or set(out) != set(inside):
            raise NotAttention("the equation is not that of an attention")
        order = tuple(right.index(letter) for letter in (*batch, column, width))
        out_order = tuple(inside.index(letter) for letter in out)
        return weights, Operand(v, order), None if list(out) == inside else out_order

    # Between the softmax and that product.

    def _softmax(self, node: fx.Node) -> fx.Node:
        while True:
            call = self._inner(node)
            if call.name == "softmax":
                self._check_softmax(node, call)
                return _node(call["input"])
            if call.name == "dropout":
                self._drop(call)
            elif call.name == "view":
                self._view(node, call)
            elif call.name not in CASTS and call.name != "contiguous":
                raise NotAttention(f"{call.name} stands before the softmax")
            node = _node(call["input"])

    def _check_softmax(self, node: fx.Node, call: Call) -> None:
        rank = _rank(node)
        if call["dim"] not in (-1, rank - 1):
            raise NotAttention(f"the softmax is over dimension {call['dim']}")
        if self.scale != 1:
            raise NotAttention("the softmax itself is scaled")

    def _drop(self, call: Call) -> None:
        if not isinstance(call["p"], int | float) or not isinstance(call["training"], bool):
            raise NotAttention("the dropout is not known")
        if self.dropout:
            raise NotAttention("there are two dropouts")
        self.dropout = float(call["p"]) if call["training"] else 0.0

    def _view(self, node: fx.Node, call: Call) -> None:
        """A view that splits or joins batches and heads, and nothing else."""
        outside, inside = value_of(node), value_of(call["input"])
        if outside.dtype != inside.dtype or _sizes(outside)[-2:] != _sizes(inside)[-2:]:
            raise NotAttention(f"{node.name} mixes rows")
        if _sizes(outside) == _sizes(inside):
            return
        four = [value for value in (outside, inside) if value.ndim == 4]
        if len(four) != 1 or {outside.ndim, inside.ndim} != {3, 4}:
            raise NotAttention(f"{node.name} has other dimensions than batches and heads")
        batch = list(four[0].shape[:-2])
        if self.batch is not None and str(batch) != str(self.batch):
            raise NotAttention("views split batches and heads in two ways")
        self.batch = batch

    # The scores.

    def _scores(self, node: fx.Node) -> tuple[Operand, Operand]:
        while True:
            call = self._inner(node)
            if call.name in ("matmul", "einsum"):
                return self._first_product(call)
            if call.name in ("mul", "div"):
                node = self._factor(call)
            elif call.name in ("add", "sub"):
                node = self._added(node, call)
            elif call.name in ("masked_fill", "where"):
                node = self._filled(node, call)
            elif call.name == "view":
                self._view(node, call)
                node = _node(call["input"])
            elif call.name in CASTS or call.name == "contiguous":
                node = _node(call["input"])
            else:
                raise NotAttention(f"{call.name} stands between the product and the softmax")

    def _first_product(self, call: Call) -> tuple[Operand, Operand]:
        if call.name == "matmul":
            q, turned = _node(call["input"]), _node(call["other"])
            rank = _rank(turned)
            return Operand(q), Operand(turned, (*range(rank - 2), rank - 1, rank - 2))
        left, right, out = _letters(call, 2)
        q, k = (_node(operand) for operand in call["operands"])
        *batch, row, column = out
        if column in left:  # the operands stand the other way round
            left, right, q, k = right, left, k, q
        (width,) = _only(set(left) - set(out))
        if set(left) != {*batch, row, width} or set(right) != {*batch, column, width}:
            raise NotAttention("the equation is not that of an attention")
        return (
            Operand(q, tuple(left.index(letter) for letter in (*batch, row, width))),
            Operand(k, tuple(right.index(letter) for letter in (*batch, column, width))),
        )

    def _factor(self, call: Call) -> fx.Node:
        if call.args.get("rounding_mode") is not None:
            raise NotAttention("a division rounds")
        one, other = call["input"], call["other"]
        if call.name == "mul" and _number(one) is not None:
            one, other = other, one
        number = _number(other)
        if number is None and isinstance(value_of(other), torch.SymFloat | torch.SymInt):
            self.factors.append((_node(other), call.name == "div"))
            return _node(one)
        if number is None:
            raise NotAttention("the scores are scaled by something else than a number")
        if call.name == "div" and number == 0:
            raise NotAttention("the scores are divided by zero")
        self.scale = self.scale / number if call.name == "div" else self.scale * number
        return _node(one)

    def _added(self, node: fx.Node, call: Call) -> fx.Node:
        one, other = _node(call["input"]), _node(call["other"])
        if call["alpha"] != 1:
            raise NotAttention("a mask is added with a factor")
        if call.name == "add" and not _leads_to_product(one):
            if call.in_place:
                raise NotAttention(f"{one.name} is written to")
            one, other = other, one
        if _sizes(value_of(one)) != _sizes(value_of(node)):
            raise NotAttention(f"{other.name} is wider than the scores")
        self._check_context(other)
        self.masks.append(Added(other, -self.scale if call.name == "sub" else self.scale))
        return one

    def _filled(self, node: fx.Node, call: Call) -> fx.Node:
        if call.name == "masked_fill":
            scores, value, condition, where = call["input"], call["value"], call["mask"], True
        elif _number(call["other"]) is not None:
            scores, value, condition, where = call["input"], call["other"], call["condition"], False
        else:
            scores, value, condition, where = call["other"], call["input"], call["condition"], True
        number, scores, condition = _number(value), _node(scores), _node(condition)
        dtype = value_of(scores).dtype
        least = torch.finfo(dtype).min if dtype.is_floating_point else None
        if number is None or number not in (-math.inf, least) or self.scale <= 0:
            raise NotAttention(f"scores are replaced by {value}: not -inf, nor the smallest number")
        if number == least and self.scale != 1:
            raise NotAttention("the smallest number is scaled")
        if _sizes(value_of(scores)) != _sizes(value_of(node)):
            raise NotAttention(f"{condition.name} is wider than the scores")
        self._check_context(condition)
        self.masks.append(Filled(condition, number, where))
        return scores

    def _check_context(self, mask: fx.Node) -> None:
        """A mask for scores whose heads are joined to batches would have to be split again."""
        if self.factors:
            raise NotAttention(f"{mask.name} is scaled by a number known at run time alone")
        if self.batch is not None and _rank(mask) == 3:
            raise NotAttention(f"{mask.name} knows nothing of heads")

    # q and k.

    def _unscaled(self, operand: Operand) -> Operand:
        """q or k without the factors at it, which go to the scale."""
        while True:
            call = reading(operand.node)
            if call is None or call.in_place or is_written_between(operand.node, self.node):
                return operand
            if call.name in ("mul", "div") and call.args.get("rounding_mode") is None:
                one, other = call["input"], call["other"]
                if call.name == "mul" and _number(one) is not None:
                    one, other = other, one
                number = _number(other)
                if number is None or number == 0 or not isinstance(one, fx.Node):
                    return operand
                if value_of(one).dtype != value_of(operand.node).dtype:
                    return operand
                self.scale = self.scale / number if call.name == "div" else self.scale * number
                operand = Operand(one, operand.order)
            elif call.name == "transpose" and isinstance(call["input"], fx.Node):
                operand = _through_transpose(operand, call)
            else:
                return operand

    def _inner(self, node: fx.Node) -> Call:
        """A call that only the attention reads."""
        call = reading(node)
        if call is None:
            raise NotAttention(f"{node.name} is not known")
        self.saw_softmax = self.saw_softmax or call.name == "softmax"
        if len(node.users) != 1:
            raise NotAttention(f"{node.name} is read elsewhere too")
        if not isinstance(value_of(node), Tensor) or not value_of(node).is_floating_point():
            raise NotAttention(f"{node.name} is no tensor of floating-point numbers")
        self.inner.append(node)
        return call


def _through_transpose(operand: Operand, call: Call) -> Operand:
    """The same operand, said of what was transposed."""
    rank = _rank(operand.node)
    order = list(operand.order or range(rank))
    one, other = call["dim0"] % rank, call["dim1"] % rank
    swapped = {one: other, other: one}
    return Operand(_node(call["input"]), tuple(swapped.get(axis, axis) for axis in order))


def _node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise NotAttention(f"{value} stands for a tensor")
    return value


def _rank(node: fx.Node) -> int:
    value = value_of(node)
    if not isinstance(value, Tensor):
        raise NotAttention(f"{node.name} is no tensor")
    return int(value.ndim)


def _sizes(value: Any) -> list[str]:
    return [str(size) for size in value.shape]


def _number(value: Any) -> float | None:
    """A number, or the one that a tensor without dimensions was made of."""
    if isinstance(value, bool | torch.SymFloat):
        return None
    if isinstance(value, int | float):
        return float(value)
    call = reading(value)
    known = value_of(value)
    if call is None or not isinstance(known, Tensor) or known.ndim or known.requires_grad:
        return None
    given = {"full": "fill_value", "tensor": "data"}.get(call.name)
    number = None if given is None else _number(call[given])
    return None if number is None else float(torch.tensor(number, dtype=known.dtype))


def _leads_to_product(node: fx.Node) -> bool:
    """Whether scores, rather than a mask, stand behind a node."""
    for _ in range(8):
        call = reading(node)
        if call is None:
            return False
        if call.name in ("matmul", "einsum"):
            return True
        given = call.args.get("input")
        following = given if isinstance(given, fx.Node) else call.args.get("other")
        if not isinstance(following, fx.Node):
            return False
        node = following
    return False


def _letters(call: Call, count: int) -> list[list[str]]:
    """The letters of an equation: of both operands, and of the result."""
    equation = call["equation"]
    operands = call["operands"]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise NotAttention("the equation is not written out")
    given, out = equation.replace(" ", "").split("->")
    parts = given.split(",")
    if len(parts) != count or len(operands) != count:
        raise NotAttention("the equation has other operands")
    if any(len(set(part)) != len(part) for part in (*parts, out)):
        raise NotAttention("the equation repeats a letter")
    return [list(part) for part in (*parts, out)]


def _only(letters: set[str]) -> set[str]:
    if len(letters) != 1:
        raise NotAttention("the equation is not that of an attention")
    return letters
