"""What it costs to keep a forward value for the backward, and what to compute it again.

Costs are in bytes of memory traffic, the currency in which fusion is decided too.  A value that our
kernels compute is nearly free to compute again: it joins the kernel that reads it.  Nearly, because
arithmetic takes time; and where a library reads it, it has to be written to memory first.  What a
library computes costs its multiplications.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.partition.classify import Classes, leaves_region
from stator.aot.partition.joint import Joint
from stator.aot.partition.rates import rates_of
from stator.errors import OptionError
from stator.graph.edit import draws_numbers, is_effect
from stator.ops import draws
from stator.ops.table import POINTWISE, RULES, VIEW_RULES
from stator.torch_api import OpOverload, is_mutable_op, is_random_op, is_view_op, size_hint

aten = torch.ops.aten

NEVER: Final = math.inf

# How many bytes move meanwhile; what depends on the device is in rates.py.
CALL: Final = 1 << 14  # asking a library for anything
UNKNOWN: Final = 8.0  # a byte that a library works on in ways that we do not know

NUMBER: Final = 8  # bytes of a size
A_NUMBER: Final = "a number"

# fmt: off
_HARD_NAMES: Final = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "tanh_backward", "sigmoid",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "erf", "erfc", "erfinv",
    "lgamma", "digamma", "pow", "gelu", "gelu_backward", "silu", "silu_backward", "mish",
    "mish_backward", "softplus", "softplus_backward", "elu", "celu", "selu", "logit",
    "log_sigmoid_forward", "logaddexp", "_softmax", "_log_softmax", "xlogy",
})
# fmt: on
_DRAWN: Final = frozenset(
    value
    for name, value in vars(draws).items()
    if isinstance(value, FunctionType)
    and value.__module__ == draws.__name__
    and name != "draw_seed"
)


@dataclass(frozen=True, slots=True)
class Weight:
    """What the two ways to have a value in the backward cost."""

    bytes: int  # of memory that it takes between forward and backward, if it is kept
    keep: float  # traffic, if it is kept
    again: float  # traffic and work, if it is computed again
    why: str = ""  # what decided, where it is not the figures
    is_copied: bool = False  # a copy is kept, since the value belongs to the caller

    def price(self, per_byte: float) -> float:
        """The cost of keeping it where a byte of memory costs `per_byte`."""
        return self.keep + per_byte * self.bytes


Policy = Callable[[fx.Node], str | None]  # "save", "recompute", or None: as the costs say
ANSWERS: Final = ("save", "recompute", None)
AGAIN: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Scales:
    """How the weights of one graph are found."""

    joint: Joint
    classes: Classes
    policy: Policy | None = None
    times: Mapping[fx.Node, float] = field(default_factory=dict)  # measured, in bytes of traffic
    # Whether inputs and outputs may be kept that eager would not keep.  A caller may write to those
    # before the backward runs, so this is left to people who ask for less memory.
    trusts_caller: bool = False
    stages: Mapping[fx.Node, int] = field(init=False)  # how many library calls stand before a node
    answers: Mapping[fx.Node, str | None] = field(init=False)  # the policy's
    given: frozenset[fx.Node] = field(init=False)  # what eager keeps, or the user asks to start at
    work: dict[fx.Node, float] = field(default_factory=dict)  # what was asked for, see `work_of`

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", _stages(self.joint.graph))
        object.__setattr__(self, "answers", _answers(self.joint, self.classes, self.policy))
        object.__setattr__(self, "given", self._given())

    def weigh(self, node: fx.Node) -> Weight:
        """A forward value's costs, under what the user asks for."""
        return self._as_asked(node, self._by_cost(node))

    def _by_cost(self, node: fx.Node) -> Weight:
        if node.op == "placeholder":
            return self._primal(node)
        if node.op != "call_function":
            return Weight(0, NEVER, 0, "a constant of the graph")
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            return Weight(0, NEVER, self._again(node))
        if not isinstance(value, torch.Tensor):
            return Weight(NUMBER, NUMBER, self._again(node), A_NUMBER)
        if is_view_op(node.target) and node not in self.joint.values:
            # Costs nothing, and holds its base, which autograd watches for writes.
            return Weight(0, NEVER, 0, "a view")
        held = bytes_of(value)
        there = node in self.joint.values
        if there and not self._is_safe(node):
            return Weight(0, NEVER, self._again(node), "an output that the caller may write to")
        written = there or self._is_written(node)
        keep = held if written else 2 * held
        return Weight(0 if there else held, keep, self._again(node))

    def _primal(self, node: fx.Node) -> Weight:
        held = bytes_of(node.meta.get("val"))
        if self.joint.keepers.get(node) is aten.clone.default:
            return Weight(held, 3 * held, NEVER, "an input that is overwritten")
        if not self._is_safe(node):
            # Worth it where the input is narrower than what eager keeps of it.
            why = "a copy of an input that the caller may write to"
            return Weight(held, 3 * held, NEVER, why, is_copied=True)
        return Weight(0, held, NEVER, "an input")

    def _is_safe(self, node: fx.Node) -> bool:
        """Whether what the caller holds may be kept."""
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        return self.trusts_caller or not is_tensor or node in self.given

    def _again(self, node: fx.Node) -> float:
        """Work of computing a value again, and of writing it where a library reads it."""
        if node in self.classes.movable:
            return 0  # it is computed once, in the forward or in the backward
        if not may_run_again(node):
            return NEVER
        if node.target is operator.getitem:
            return self._handing_over(node)
        if node not in self.work:
            self.work[node] = work_of(node)
        return self.times.get(node, self.work[node]) + self._handing_over(node)

    def _handing_over(self, node: fx.Node) -> float:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or is_view_op(node.target):
            return 0
        outside = any(
            reader not in self.classes.forward and not is_generated(reader)
            for reader in readers(node)
        )
        return 2 * bytes_of(value) if outside and is_generated(node) else 0

    def _is_written(self, node: fx.Node) -> bool:
        """Whether the forward has the value in memory in any case.

        It has if a library makes or reads it, or if one runs before somebody reads it: kernels on
        two sides of a call do not fuse.
        """
        return not is_generated(node) or any(
            reader in self.classes.forward
            and (not is_generated(reader) or self.stages[reader] > self.stages[node])
            for reader in readers(node)
        )

    def _wish(self, node: fx.Node) -> tuple[str | None, Any]:
        """The policy's answer and the checkpoint tag; a part has those of the whole."""
        answer, tag = self.answers.get(node), node.meta.get("recompute")
        whole = node.args[0] if node.target is operator.getitem else None
        if isinstance(whole, fx.Node) and answer is None and tag is None:
            return self._wish(whole)
        return answer, tag

    def _is_again(self, node: fx.Node) -> bool:
        """Whether the user asks to compute it again."""
        answer, tag = self._wish(node)
        return answer == "recompute" or (answer is None and tag in AGAIN)

    def _given(self) -> frozenset[fx.Node]:
        """What the recorded backward reads, and what the user asks to compute values again from.

        With what those are views of.
        """
        joint, classes = self.joint, self.classes
        again = (node for node in joint.graph.nodes if self._is_again(node))
        pending = [
            source for node in (*classes.backward, *again) for source in node.all_input_nodes
        ]
        pending += [grad for grad in joint.grads if isinstance(grad, fx.Node)]
        kept: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in kept or node not in classes.forward:
                continue
            kept.add(node)
            if is_view_op(node.target) or node.target is operator.getitem:
                pending += node.all_input_nodes
        return frozenset(kept)

    def _as_asked(self, node: fx.Node, weight: Weight) -> Weight:
        """Checkpoint tags and the user's policy over the costs; nothing makes a draw repeatable."""
        if weight.why == A_NUMBER:
            return weight
        wanted, tag = self._wish(node)
        if wanted == "save" or (wanted is None and tag is CheckpointPolicy.MUST_SAVE):
            if weight.keep == NEVER:
                return weight
            return replace(weight, again=NEVER, why="asked for: save")
        if self._is_again(node) and (wanted is not None or not leaves_region(node, self.classes)):
            if not may_run_again(node, any_operator=True):
                return weight
            must = wanted is not None or tag is CheckpointPolicy.MUST_RECOMPUTE
            keep = NEVER if must else weight.keep
            return replace(weight, keep=keep, again=0, why="asked for: recompute")
        if tag is CheckpointPolicy.PREFER_SAVE and wanted is None:
            return replace(weight, again=8 * weight.again, why="asked for: rather save")
        return weight


def _answers(joint: Joint, classes: Classes, policy: Policy | None) -> dict[fx.Node, str | None]:
    """What the user's policy says of each forward value."""
    if policy is None:
        return {}
    calls = (node for node in joint.graph.nodes if node.op == "call_function")
    asked = (node for node in calls if classes.is_early(node) and not _is_arithmetic(node))
    return {node: _answer(policy, node) for node in asked}


def _answer(policy: Policy, node: fx.Node) -> str | None:
    try:
        answer = policy(node)
    except Exception as error:
        raise OptionError(
            f"save_policy raised {type(error).__name__}: {error}",
            where=f"{node.name} = {node.target}",
            hint='it is asked for each value of the forward: "save", "recompute" or None',
        ) from error
    if answer not in ANSWERS:
        raise OptionError(
            f"save_policy answered {answer!r}",
            where=f"{node.name} = {node.target}",
            hint='answer "save", "recompute", or None for as the costs say',
        )
    return answer


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((stages[source] for source in node.all_input_nodes), default=0)
        own = node.op == "call_function" and not is_generated(node) and not is_view_op(node.target)
        stages[node] = before + own
    return stages


def may_run_again(node: fx.Node, *, any_operator: bool = False) -> bool:
    """Whether a second run gives the same; of operators that are not torch's own, nobody knows."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and may_run_again(source, any_operator=any_operator)
    if node.op != "call_function" or is_mutable_op(node.target):
        return False
    if is_effect(node) and (draws_numbers(node) or not is_random_op(node.target)):
        return False
    if isinstance(node.target, OpOverload):
        return any_operator or node.target.namespace in ("aten", "prims", "prim")
    return any_operator or node.target in _DRAWN or _is_arithmetic(node)


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether it computes a size: Python's operators on numbers."""
    return not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def is_generated(node: fx.Node) -> bool:
    """Whether our kernels compute the node, as far as its operator tells."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_generated(source)
    return (
        node.target in POINTWISE
        or node.target in RULES
        or node.target in VIEW_RULES
        or node.target in _DRAWN
    )


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the value, through views and parts."""
    pending = list(node.users)
    seen = set(pending)
    while pending:
        user = pending.pop()
        if user.target is operator.getitem or is_view_op(user.target):
            fresh = [reader for reader in user.users if reader not in seen]
            seen.update(fresh)
            pending += fresh
        elif user.op != "output":
            yield user


def work_of(node: fx.Node) -> float:
    """What running the node costs, in bytes of traffic; written results are not counted."""
    if node.op != "call_function" or node.target is operator.getitem or is_view_op(node.target):
        return 0
    value = node.meta.get("val")
    made = sum(bytes_of(part) for part in _parts(value))
    count = sum(elements(part) for part in _parts(value))
    rates = rates_of(value)
    if node.target in _DRAWN:
        return rates.random * count
    if is_generated(node):
        name = getattr(node.target, "__name__", "").partition(".")[0]
        hard = rates.hard if name in _HARD_NAMES and not _is_square(node) else rates.easy
        if node.target in POINTWISE:
            return hard * count
        return hard * count + sum(bytes_of(source.meta.get("val")) for source in _tensors(node))
    if not made:
        return rates.easy
    read = sum(bytes_of(source.meta.get("val")) for source in _tensors(node))
    flops = flops_of(node)
    if flops is None:
        return CALL + UNKNOWN * (read + made)
    return CALL + read + made + rates.multiplication * flops / 2


def flops_of(node: fx.Node) -> int | None:
    """Floating point operations of a product, a convolution or attention; None: not known."""
    from torch.utils.flop_counter import flop_registry

    if not isinstance(node.target, OpOverload):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    if "scaled_dot_product" in node.target.__name__:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]
        backward = "backward" in node.target.__name__
        query, key = tensors[1:3] if backward else tensors[:2]
        batch, heads, length, width = (hint_of(n) for n in query.size())
        products = 4 * batch * heads * length * hint_of(key.size(2)) * width
        return products * 5 // 2 if backward else products
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return None
    try:
        return int(hint_of(count(*args, **kwargs, out_val=node.meta.get("val"))))
    except (AttributeError, IndexError, TypeError, ValueError, AssertionError):
        return None  # arguments in a way that the counter does not read


def _is_square(node: fx.Node) -> bool:
    """Whether a power is one of a small whole number."""
    exponent = node.args[1] if len(node.args) > 1 else None
    return node.target is aten.pow.Tensor_Scalar and exponent in (0, 1, 2, 3, 4)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.Tensor):
            yield source


def _parts(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)


def elements(value: torch.Tensor) -> int:
    """How many there are; symbolic sizes count as what they were when captured."""
    return math.prod(hint_of(size) for size in value.size())


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of a number."""
    if not isinstance(value, torch.Tensor):
        return NUMBER
    return elements(value) * int(value.dtype.itemsize)


def hint_of(size: Any) -> int:
    """A size as it was when captured, without a promise that it stays so; 1 if data decide."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size_hint(size)
    return 1 if known is None else known
