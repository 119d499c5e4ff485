"""Casts to a wider type and back, with nothing but moves in between, go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.edit import drop_unread
from stator.graph.rules import why_not_same
from stator.graph.run import Ctx
from stator.passes.freezing.affine import CAST, is_cast, writer_between

aten = torch.ops.aten

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VIEWS: Final = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.detach.default,
    }
)
# They move values or choose among them, or change signs: rounding before or after is the same.
MOVES: Final = VIEWS | {
    aten.clone.default,
    aten.relu.default,
    aten.neg.default,
    aten.abs.default,
    aten.flip.default,
}


@dataclass(frozen=True, slots=True)
class Trip:
    """A cast, moves of its result, and a cast of those."""

    out: fx.Node
    moves: tuple[fx.Node, ...]
    back: fx.Node

    @staticmethod
    def to(back: fx.Node) -> Trip | None:
        """The trip that ends with a cast, if it is one."""
        moves: list[fx.Node] = []
        node: Any = back.args[0]
        while isinstance(node, fx.Node) and node.target in MOVES:
            moves.append(node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or not is_cast(node):
            return None
        return Trip(node, tuple(reversed(moves)), back)

    @property
    def source(self) -> fx.Node:
        """What is cast."""
        source = self.out.args[0]
        assert isinstance(source, fx.Node), "a cast has an operand"
        return source

    def why_not_dropped(self) -> str | None:
        """None if the first cast may go; otherwise the reason, for the log."""
        first, second, third = (
            node.meta["val"].dtype for node in (self.source, self.out, self.back)
        )
        if not all(dtype in FLOATS for dtype in (first, second, third)):
            return f"of {first}, {second} and {third}, one is no usual floating-point type"
        if torch.promote_types(first, second) != second:
            return f"{self.out.name} rounds {first} to {second}"
        for node in (self.out, *self.moves):
            if len(node.users) > 1:
                return f"others read {node.name}, too"
        writer = writer_between(self.out, self.back)
        return None if writer is None else f"{writer.name} writes in between"


def drop_casts(graph: fx.Graph, ctx: Ctx) -> int:
    """Let moves have the values that casts would round-trip; return how many casts went.

    before: y = cast(relu(view(cast(x, f32), [6])), bf16)             x: bf16
    after:  y = relu(view(x, [6]))

    Where a view comes last, a clone takes the place of the cast: drop_noops, which sees the whole
    graph, drops it where nobody can tell.
    """
    dropped = 0
    for node in graph.find_nodes(op="call_function", target=CAST):
        trip = Trip.to(node) if is_cast(node) else None
        if trip is None:
            continue
        reason = trip.why_not_dropped() or drop(trip, ctx)
        said = "is dropped" if reason is None else f"not dropped: {reason}"
        ctx.record.notes.append(f"{node.name} {said}")
        dropped += reason is None
    drop_unread(graph)
    return dropped


def drop(trip: Trip, ctx: Ctx) -> str | None:
    """Write the moves anew, without casts around them; the reason, if they may not."""
    builder = Builder(trip.back.graph, trip.back)
    dtype = trip.back.meta["val"].dtype
    arguments = [(node.args[1:], dict(node.kwargs)) for node in trip.moves]  # sizes may be nodes

    def moved(value: Any, arguments: list[Any]) -> Any:
        for node, (args, kwargs) in zip(trip.moves, arguments, strict=True):
            value = node.target(value, *args, **kwargs)
        if value.dtype != dtype:
            return CAST(value, dtype=dtype)
        is_fresh = trip.moves and trip.moves[-1].target not in VIEWS
        return value if is_fresh else aten.clone.default(value)

    new = builder.run(moved, trip.source, arguments)
    reason = why_not_same(trip.back, new)
    if reason is None and not ctx.fuel.spend(f"drop_casts: {trip.back.name}"):
        reason = "there is no fuel left"
    if reason is not None:
        builder.take_back()
        return reason
    trip.back.replace_all_uses_with(new)
    return None
