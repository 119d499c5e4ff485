"""A product is measured both ways, and its verdict judged."""

from __future__ import annotations

from benchmarks.pad_mm import SHAPES, Row, measure, report
from benchmarks.row import Budget
from benchmarks.spread import Spread
from stator.passes.joint.pad_mm import Product


def test_there_are_forty_shapes() -> None:
    assert len(set(SHAPES)) == 40


def test_a_shape_is_measured() -> None:
    row = measure((64, 8, 17), Budget(rounds=2, seconds=1))

    assert row.ratio.low > 0
    assert "64×8×17" in report([row])


def test_verdicts_are_judged_by_what_was_measured() -> None:
    padded, plain = Product(1, 4096, 16, 1001, 4), Product(1, 4096, 1024, 1001, 4)

    def judged(product: Product, gain: float) -> str:
        return Row(product, Spread(gain, gain, gain), 1.0).judged

    assert [judged(padded, 1.2), judged(padded, 0.7)] == ["right", "**wrong**"]
    assert [judged(plain, 0.7), judged(plain, 1.2)] == ["right", "missed"]
