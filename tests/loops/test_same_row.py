"""Whether a row may store over what rows have read: held against all pairs of points."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from stator.loops.index import Atom, Axis, Index, Symbol
from stator.loops.same_row import stays_in_row
from stator.loops.values import flat, unflat
from tests.loops.test_index import evaluate

SIZE: Final = Symbol("n")
LENGTHS: Final = (1, 2, 3, 5)  # that it stands for

Point = dict[Atom, int]
seeds = st.integers(0, 1 << 32)


def points(axes: Sequence[Axis], known: Point) -> Iterator[Point]:
    """All places that axes can stand at."""
    lengths = [evaluate(axis.size, known) for axis in axes]
    for values in product(*map(range, lengths)):
        yield {**known, **dict(zip(axes, values, strict=True))}


@dataclass
class Drawn:
    """Rows that lie in memory somehow, a loop that stores all of them, and loops that read."""

    seed: int
    random: random.Random = field(init=False)
    outer: list[Axis] = field(init=False)
    inner: list[Axis] = field(init=False)
    stored: Index = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.outer = self.axes("i", self.random.randint(1, 2))
        self.inner = self.axes("r", self.random.randint(0, 2))
        self.stored = self.dense([*self.outer, *self.inner])

    def axes(self, letter: str, count: int) -> list[Axis]:
        sizes = [Index.of(self.random.choice((1, 2, 3, 4, SIZE))) for _ in range(count)]
        return [Axis(f"{letter}{number}", size) for number, size in enumerate(sizes)]

    def dense(self, axes: Sequence[Axis]) -> Index:
        """All elements once, in some order."""
        order = self.random.sample(list(axes), len(axes))
        return flat([Index.of(axis) for axis in order], [axis.size for axis in order])

    def anew(self) -> tuple[list[Axis], Index]:
        """A loop over the same row, cut or joined otherwise."""
        sizes = [axis.size for axis in self.inner]
        is_known = all(size.constant is not None for size in sizes)
        if len(sizes) == 2 and is_known and self.random.random() < 0.5:
            axes = [Axis("q0", sizes[0] * sizes[1])]
            at = [*unflat(Index.of(axes[0]), sizes)]
        else:
            axes = [Axis(f"q{number}", size) for number, size in enumerate(sizes)]
            at = [Index.of(axis) for axis in axes]
            for axis, place in zip(axes, range(len(at)), strict=True):
                if axis.size.constant is not None and self.random.random() < 0.3:
                    at[place] = axis.size - 1 - at[place]  # backwards
        self.random.shuffle(axes)
        return axes, self.stored.replaced(dict(zip(self.inner, at, strict=True)))

    def anyhow(self) -> tuple[list[Axis], Index]:
        """A loop that reads at places of any kind."""
        axes, index = self.anew()
        match self.random.randrange(6):
            case 0:  # other axes take their places
                turned = self.random.sample([*self.outer, *axes], len(self.outer) + len(axes))
                places = zip([*self.outer, *axes], map(Index.of, turned), strict=True)
                return axes, index.replaced(dict(places))
            case 1:
                return axes, index + self.random.randint(-3, 3)
            case 2:
                return axes, index * self.random.randint(1, 3)
            case 3:
                by = Index.of(self.random.choice((2, 3, 4, 6, SIZE)))
                return axes, self.random.choice((index // by, index % by, index - index % by))
            case 4:
                steps = [self.random.choice((0, 1, 2, 3, 4, 6, 12)) for _ in range(9)]
                pairs = zip([*self.outer, *axes], steps, strict=False)
                return axes, sum((Index.of(axis) * step for axis, step in pairs), Index.of(0))
            case _:
                return axes, index

    def rows_apart(self, axes: Sequence[Axis], index: Index, length: int) -> bool:
        """Whether no row stores what another row reads, tried at all points."""
        home: dict[int, set[tuple[int, ...]]] = {}
        for point in points([*self.outer, *self.inner], {SIZE: length}):
            row = tuple(point[axis] for axis in self.outer)
            home.setdefault(evaluate(self.stored, point), set()).add(row)
        return all(
            home.get(evaluate(index, point), row) == row
            for point in points([*self.outer, *axes], {SIZE: length})
            for row in [{tuple(point[axis] for axis in self.outer)}]
        )


@settings(max_examples=400, deadline=None)
@given(seeds)
def test_rows_that_are_said_to_stay_apart_do(seed: int) -> None:
    drawn = Drawn(seed)
    axes, index = drawn.anyhow()
    if stays_in_row(drawn.outer, drawn.stored, [index]):
        assert all(drawn.rows_apart(axes, index, length) for length in LENGTHS)


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_a_row_may_be_read_in_any_order_and_in_any_cut(seed: int) -> None:
    drawn = Drawn(seed)
    _, index = drawn.anew()
    assert stays_in_row(drawn.outer, drawn.stored, [index])
