"""Loops split where choices change, so that no iteration has to choose.

before: stage i: 64   out[i] = within(i, 32, neg(x[i + 32]), x[i - 32])
after:  stage i: 32   out[i] = neg(x[i + 32])
        stage i: 32   out[i + 32] = x[i]

Sizes may be symbols, and then the order of two edges may not be known.  The part that is longest by
the hints, the *main* one, lies between all edges before it and all edges behind it, whatever their
order, and so has no choice left.  A part beside it begins or ends at one edge for sure; what does
not follow from that is still chosen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from stator.loops.access import nodes
from stator.loops.index import ZERO, Axis, Element, Index, Leaf, clamped, is_at_least
from stator.loops.ir import Accumulate, Kernel, Stage, Statement, Store, Within, index_parts
from stator.loops.values import product
from stator.lower.sizes import Sizes
from stator.schedule.rewrite import Condition, settled

MOST_PARTS: Final = 4  # of one loop: each is code of its own
ENOUGH_ROWS: Final = 16  # so that threads still have something to share

# Positions of an axis between which a choice comes out as inside.
Range: TypeAlias = tuple[Index, Index]


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of an axis: `length` positions from `low` on, and what is known of them."""

    low: Index
    length: Index
    reached: tuple[Index, ...] = ()  # they are at least these
    ahead: tuple[Index, ...] = ()  # and below these

    def outcome(self, inside: Range) -> bool | None:
        """How a choice comes out all along the part; None if that is not known."""
        first, end = inside
        if any(_is_ordered(first, edge) for edge in self.reached) and any(
            _is_ordered(edge, end) for edge in self.ahead
        ):
            return True
        if any(_is_ordered(end, edge) for edge in self.reached) or any(
            _is_ordered(edge, first) for edge in self.ahead
        ):
            return False
        return None


def split_choices(kernel: Kernel, sizes: Sizes) -> Kernel:
    """The kernel with its innermost loops split; they move inside of the rows for that."""
    if any(stage.inner for stage in kernel.stages):
        stages = tuple(part for stage in kernel.stages for part in _split(stage, sizes))
        return Kernel(kernel.name, kernel.outer, stages)
    if not kernel.outer or len(kernel.stages) != 1:
        return kernel
    *outer, last = kernel.outer
    if sizes.hint(product([axis.size for axis in outer])) < ENOUGH_ROWS:
        return kernel
    parts = _split(Stage((last,), kernel.stages[0].body), sizes)
    return kernel if len(parts) == 1 else Kernel(kernel.name, tuple(outer), tuple(parts))


def _split(stage: Stage, sizes: Sizes) -> list[Stage]:
    if not stage.inner or stage.in_order:
        return [stage]
    if any(isinstance(s, Accumulate) for s in stage.body):
        return [stage]
    axis = stage.inner[-1]
    ranges = {c: found for s in stage.body for c, found in _ranges(s, axis).items()}
    edges = _edges(ranges, axis.size, sizes)
    if not edges:
        return [stage]
    parts = [_stage(stage, number, part, ranges) for number, part in enumerate(_parts(edges, axis))]
    return [part for part in parts if part is not None]


def _stage(
    stage: Stage, number: int, part: _Part, ranges: Mapping[Condition, Range]
) -> Stage | None:
    """One part of a loop; None if it is empty."""
    *outer, axis = stage.inner
    own = Axis(f"{axis.name}_{number}", part.length)
    if own.size is ZERO:
        return None
    single = own.size.constant == 1
    at: dict[Leaf, Index] = {axis: part.low if single else part.low + own}
    known = {condition: part.outcome(inside) for condition, inside in ranges.items()}
    outcomes = {condition: side for condition, side in known.items() if side is not None}
    body = tuple(_moved(s, outcomes, at) for s in stage.body)
    return Stage(tuple(outer) if single else (*outer, own), body)


def _moved(
    statement: Statement, outcomes: Mapping[Condition, bool], at: Mapping[Leaf, Index]
) -> Statement:
    assert isinstance(statement, Store), "loops that accumulate stay whole"
    value = settled(statement.value, outcomes).replaced(at)
    return Store(statement.buffer, statement.index.replaced(at), value, statement.combine)


# --- edges ---


@dataclass(frozen=True, slots=True)
class _Edges:
    """Where choices change: those before the main part and those behind it, as hints have them."""

    before: tuple[Index, ...]
    behind: tuple[Index, ...]

    def __bool__(self) -> bool:
        return bool(self.before or self.behind)


def _ranges(statement: Statement, axis: Axis) -> dict[Condition, Range]:
    """Choices that change along `axis` alone, with the positions at which they are inside."""
    found = {}
    for node in nodes(statement):
        if not isinstance(node, Within) or node.index.axes != {axis} or node.limit.axes:
            continue
        if any(isinstance(a, Element) for i in (node.index, node.limit) for a in index_parts(i)):
            continue
        factor = node.index.factor_of(axis)
        step = None if factor is None else factor.constant
        if step:
            found[node.index, node.limit] = _range(node, step, node.index - step * Index.of(axis))
    return found


def _range(choice: Within, step: int, start: Index) -> Range:
    """Where 0 <= step*i + start < limit."""
    if step > 0:
        up = step - 1
        return (up - start) // step, (choice.limit + up - start) // step
    return (start - choice.limit) // -step + 1, start // -step + 1


def _edges(ranges: Mapping[Condition, Range], length: Index, sizes: Sizes) -> _Edges:
    """Edges inside of a loop, shared out where by the hints the longest part begins."""
    distinct = dict.fromkeys(edge for pair in ranges.values() for edge in pair)
    edges = [e for e in distinct if not (_is_ordered(e, ZERO) or _is_ordered(length, e))]
    edges.sort(key=sizes.hint)
    end = sizes.hint(length)
    places = [0, *(min(max(sizes.hint(edge), 0), end) for edge in edges), end]
    lengths = [high - low for low, high in pairwise(places)]
    main = lengths.index(max(lengths))
    before, behind = tuple(edges[:main]), tuple(edges[main:])
    if len(edges) < MOST_PARTS:
        return _Edges(before, behind)
    if max(lengths) * MOST_PARTS < end:  # what would still choose is most of it
        return _Edges((), ())
    return _Edges(_ends(before, first=False), _ends(behind, first=True))


def _ends(edges: Sequence[Index], *, first: bool) -> tuple[Index, ...]:
    """The edges that may be the first of them all, or the last."""
    kept: list[Index] = []
    for edge in edges if first else reversed(edges):
        pairs = ((k, edge) if first else (edge, k) for k in kept)
        if not any(_is_ordered(*pair) for pair in pairs):
            kept.append(edge)
    return tuple(kept if first else reversed(kept))


def _parts(edges: _Edges, axis: Axis) -> list[_Part]:
    """All of the axis, cut at the edges: each bound is clamped between its neighbour's and an end.

    In a part that is not empty no bound was clamped to anything else than an edge or an end.
    """
    length = axis.size
    if len(edges.before) + len(edges.behind) >= MOST_PARTS:
        return _three_parts(edges, length)
    parts, low = [], ZERO
    for number, edge in enumerate(edges.before):
        high = clamped(edge, low, length)
        known = (ZERO, *edges.before[:number]), (edge, length)
        parts.append(_Part(low, high - low, *known))
        low = high
    right, high = [], length
    for number, edge in reversed(list(enumerate(edges.behind))):
        bound = clamped(edge, low, high)
        # It is high - bound; written so, a border that is known to be short is seen to be.
        rest = clamped(high - edge, ZERO, high - low)
        later = (*edges.behind[number + 1 :], length)
        right.append(_Part(bound, rest, (ZERO, *edges.before, edge), later))
        high = bound
    return [*parts, _main(edges, low, high, length), *reversed(right)]


def _three_parts(edges: _Edges, length: Index) -> list[_Part]:
    """The main part; what is before it and what is behind it choose as they did."""
    low, high = ZERO, length
    for edge in edges.before:
        low = clamped(edge, low, length)
    for edge in reversed(edges.behind):
        high = clamped(edge, low, high)
    main = _main(edges, low, high, length)
    last = _Part(high, length - high, (ZERO,), (length,))
    return [_Part(ZERO, low, (ZERO,), (length,)), main, last]


def _main(edges: _Edges, low: Index, high: Index, length: Index) -> _Part:
    return _Part(low, high - low, (ZERO, *edges.before), (*edges.behind, length))


def _is_ordered(first: Index, second: Index) -> bool:
    """Whether one size-only index is known not to exceed another."""
    return is_at_least(second - first, 0)
