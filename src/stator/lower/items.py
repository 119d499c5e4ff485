"""What lowering leaves, in order: loops that compute one buffer each, and calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import fx

from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Combine, Expr, Load, loads_of
from stator.loops.values import product


@dataclass(frozen=True, eq=False)
class Compute:
    """One buffer, element by element: a value, a reduction over `inner`, or a scan along `scan`."""

    buffer: Buffer
    size: tuple[Index, ...]
    stride: tuple[Index, ...]
    outer: tuple[Axis, ...]  # one for each dimension of the buffer
    inner: tuple[Axis, ...]  # reduced
    combine: Combine | None
    value: Expr
    scan: Axis | None = None  # the one of `outer` along which `combine` runs

    @property
    def name(self) -> str:
        """Its buffer's name."""
        return self.buffer.name

    @cached_property
    def total(self) -> Index:
        """Elements that it computes."""
        return product(self.size)

    @cached_property
    def work(self) -> Index:
        """Points that its loops visit."""
        return self.total * product([axis.size for axis in self.inner])

    @cached_property
    def store(self) -> Index:
        """Where an element lies."""
        return place_of([Index.of(axis) for axis in self.outer], self.stride)

    @property
    def leads(self) -> bool:
        """Whether its rows are given: it reduces or scans."""
        return bool(self.inner) or self.scan is not None

    @cached_property
    def loads(self) -> list[Load]:
        """What it loads."""
        return loads_of(self.value)

    @cached_property
    def reads(self) -> set[str]:
        """Names of the buffers it loads from."""
        return {load.buffer.name for load in self.loads}


@dataclass(frozen=True, eq=False)
class Scatter:
    """Values that go to computed places of a buffer that an earlier item made."""

    buffer: Buffer
    axes: tuple[Axis, ...]
    index: Index
    value: Expr
    combine: Combine | None

    @property
    def name(self) -> str:
        """Its buffer's name."""
        return self.buffer.name

    @cached_property
    def reads(self) -> set[str]:
        """Names of the buffers that it needs, its own included."""
        loads = [*loads_of(self.value), *loads_of(Load(self.value.dtype, self.buffer, self.index))]
        return {load.buffer.name for load in loads}

    @cached_property
    def work(self) -> Index:
        """Points that its loops visit."""
        return product([axis.size for axis in self.axes])


@dataclass(frozen=True, eq=False)
class Check:
    """Raise `error` if the number in `flag` is not zero."""

    flag: str
    error: type[Exception]
    message: str

    @property
    def name(self) -> str:
        """A name of its own."""
        return f"{self.flag}_checked"

    @property
    def reads(self) -> set[str]:
        """The flag."""
        return {self.flag}


@dataclass(frozen=True, eq=False)
class Size:
    """A size that a call of torch's takes, from the symbols of the graph."""

    name: str
    index: Index

    @property
    def reads(self) -> set[str]:
        """Nothing: symbols come with the inputs."""
        return set()


@dataclass(frozen=True, eq=False)
class Extern:
    """A node that torch executes."""

    node: fx.Node
    reason: str | None = None  # why it is no loop; None: it is not meant to be one

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node.name)

    @cached_property
    def reads(self) -> set[str]:
        """Names of what it takes."""
        return {source.name for source in self.node.all_input_nodes}


Item: TypeAlias = Compute | Scatter | Check | Size | Extern


def without_unread(items: list[Item], returned: set[str]) -> list[Item]:
    """`items` without loops whose results nobody reads: rules make all that they might return."""
    needed, kept = set(returned), []
    for item in reversed(items):
        if isinstance(item, Compute | Scatter) and item.name not in needed:
            continue
        needed |= item.reads
        kept.append(item)
    return kept[::-1]


def place_of(point: list[Index] | tuple[Index, ...], stride: tuple[Index, ...]) -> Index:
    """Where the element at a point lies."""
    place = Index.of(0)
    for index, step in zip(point, stride, strict=True):
        place = place + index * step
    return place
