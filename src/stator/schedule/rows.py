"""Rows: the outer iterations that loops share, and which axes of each loop count them.

Reductions and scans give their rows: all of their axes but the one they run along.  Other loops
follow whom they read, or who reads them: batch norm's last loop counts rows along its channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from stator.loops.index import Axis, Index, only_atom
from stator.loops.ir import Load
from stator.loops.values import flat, product
from stator.lower.items import Compute

Rows: TypeAlias = Mapping[str, tuple[Axis, ...]]  # name of a loop -> its axes that count the rows


def position(axis: Axis) -> Index:
    """Where an axis stands; one of a single position stands at 0."""
    return Index.of(axis) if axis.size.constant != 1 else Index.of(0)


def row_number(axes: Sequence[Axis]) -> Index:
    """The number of the row that axes stand at."""
    return flat([position(axis) for axis in axes], [axis.size for axis in axes])


def coordinates(index: Index, writer: Compute) -> list[Index] | None:
    """The point of `writer` that stores at `index`; None if its elements leave gaps."""
    order = _by_stride(writer)
    if order is None:
        return None
    found = [Index.of(0)] * len(writer.size)
    for place, dim in enumerate(order):
        steps = index // writer.stride[dim]
        found[dim] = steps if place == len(order) - 1 else steps % writer.size[dim]
    return found


def _by_stride(writer: Compute) -> list[int] | None:
    """Dimensions from the one whose elements lie closest; None if they are not dense."""
    order: list[int] = []
    left = [d for d, n in enumerate(writer.size) if n.constant != 1]
    expected = Index.of(1)
    while left:
        dim = next((d for d in reversed(left) if writer.stride[d] is expected), None)
        if dim is None:
            return None
        order.append(dim)
        left.remove(dim)
        expected = expected * writer.size[dim]
    return order


def own_rows(member: Compute) -> tuple[Axis, ...]:
    """Axes of a loop that are not those it reduces or scans along."""
    return tuple(axis for axis in member.outer if axis is not member.scan)


def assign(members: Sequence[Compute]) -> tuple[Rows | None, str]:
    """Axes that count the rows of each member; or None and the reason why there are none."""
    leaders = [member for member in members if member.leads] or list(members)
    first = leaders[0]
    rows = {member.name: own_rows(member) for member in leaders}
    count = product([axis.size for axis in rows[first.name]])
    for member in leaders:
        if product([axis.size for axis in rows[member.name]]) is not count:
            return None, f"{member.name} has other rows than {first.name}: {count}"
    waiting = [member for member in members if member.name not in rows]
    makers = {member.name: member for member in members}
    while waiting:
        linked = [(m, axes) for m in waiting if (axes := _follow(m, makers, rows)) is not None]
        if not linked:
            break
        rows |= {member.name: axes for member, axes in linked}
        waiting = [member for member in waiting if member.name not in rows]
    for member in waiting:
        leading = _leading(member, count)
        if leading is None:
            return None, f"{member.name} does not fall into {count} rows"
        rows[member.name] = leading
    for member in members:
        if product([axis.size for axis in rows[member.name]]) is not count:
            return None, f"{member.name} does not fall into {count} rows"
    return rows, why_other_row(members, rows)


def _follow(member: Compute, makers: Mapping[str, Compute], rows: Rows) -> tuple[Axis, ...] | None:
    """Axes that stand where those of a neighbour stand, whose rows are settled."""
    for load in member.loads:
        maker = makers.get(load.buffer.name)
        if maker is not None and maker.name in rows:
            axes = _read_along(load, maker, rows[maker.name])
            if axes is not None:
                return axes
    for name, reader in makers.items():
        if name not in rows or member.name not in reader.reads:
            continue
        for load in reader.loads:
            if load.buffer.name == member.name:
                axes = _written_along(load, member, rows[name])
                if axes is not None:
                    return axes
    return None


def _read_along(load: Load, maker: Compute, rows: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    point = coordinates(load.index, maker)
    if point is None:
        return None
    at = [point[maker.outer.index(axis)] for axis in rows if axis.size.constant != 1]
    axes = [_axis(index) for index in at]
    found = tuple(axis for axis in axes if axis is not None)
    return found if len(found) == len(axes) == len(set(found)) else None


def _written_along(load: Load, member: Compute, rows: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    point = coordinates(load.index, member)
    if point is None:
        return None
    axes = [axis for axis in rows if axis.size.constant != 1]
    found = tuple(
        member.outer[point.index(Index.of(axis))] for axis in axes if Index.of(axis) in point
    )
    return found if len(found) == len(axes) else None


def _axis(index: Index) -> Axis | None:
    """The axis that an index is, if it is one."""
    atom = only_atom(index)
    return atom if isinstance(atom, Axis) else None


def _leading(member: Compute, count: Index) -> tuple[Axis, ...] | None:
    for length in range(len(member.outer), -1, -1):
        if product(member.size[:length]) is count:
            return member.outer[:length]
    return None


def why_other_row(members: Sequence[Compute], rows: Rows) -> str:
    """Empty if each member reads of the others what the same row wrote; else the reason."""
    makers = {member.name: member for member in members}
    for reader in members:
        row = row_number(rows[reader.name])
        for load in reader.loads:
            maker = makers.get(load.buffer.name)
            if maker is None:
                continue
            point = coordinates(load.index, maker)
            if point is None:
                return f"{maker.name} does not lie in rows"
            axes = rows[maker.name]
            at = [point[maker.outer.index(axis)] for axis in axes]
            if flat(at, [axis.size for axis in axes]) is not row:
                return f"{reader.name} reads {maker.name} in another row than it is written in"
    return ""
