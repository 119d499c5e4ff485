"""What lowering leaves: loops that compute one buffer each, and calls that stay with torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import fx

from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Combine, Expr, loads_of


@dataclass(frozen=True, eq=False)
class Compute:
    """One buffer, element by element: `buffer[store] = value` or an accumulation over `inner`."""

    buffer: Buffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    outer: tuple[Axis, ...]  # one for each dimension of the buffer
    inner: tuple[Axis, ...]  # reduced
    combine: Combine | None
    value: Expr

    @property
    def name(self) -> str:
        """Its buffer's name."""
        return self.buffer.name

    @property
    def total(self) -> int:
        """Elements that it computes."""
        return prod(self.size)

    @property
    def work(self) -> int:
        """Points that its loops visit."""
        return self.total * prod(axis.size.constant or 1 for axis in self.inner)

    @property
    def store(self) -> Index:
        """Where an element lies."""
        place = Index.of(0)
        for axis, stride in zip(self.outer, self.stride, strict=True):
            place = place + Index.of(axis) * stride
        return place

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def reads(self) -> set[str]:
        """Names of the buffers it loads from."""
        return {load.buffer.name for load in loads_of(self.value)}


@dataclass(frozen=True, eq=False)
class Extern:
    """A node that torch executes."""

    node: fx.Node
    reason: str | None = None  # why it is no loop; None: it is not meant to be one
