"""What a program's backward keeps, and what other choices there were: data for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One way to cut a program in two."""

    saved: int  # bytes that the backward keeps of the forward, beyond inputs
    peak: int  # bytes that a step holds at most, inputs and gradients included
    time: float  # of a step, against the quickest cut's
    label: str  # how it was found, in words


@dataclass(frozen=True, slots=True)
class Value:
    """A forward value that the backward needs, and how it gets it."""

    name: str
    operator: str
    bytes: int
    saved: bool  # or computed again
    layer: str  # of the module that computed it; "" if unknown
    line: str  # of the user's program; "" if unknown
    why: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The curve of one joint graph, from least memory to least time, and where it was cut."""

    inputs: int  # bytes of parameters, buffers and arguments
    points: tuple[Point, ...]  # by rising peak and falling time
    chosen: Point
    values: tuple[Value, ...]  # under the chosen cut, largest first
    holders: tuple[str, ...]  # what is alive at the least reachable peak, largest first, in words
