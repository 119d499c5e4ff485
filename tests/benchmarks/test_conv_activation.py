"""An activation is measured both ways."""

from __future__ import annotations

import pytest

from benchmarks.conv_activation import BEHIND, SHAPES, line, measure
from benchmarks.row import Budget
from stator.ops.libraries import onednn_convolution
from stator.passes.post_grad.fuse_conv_activation import ACTIVATIONS

pytestmark = pytest.mark.skipif(onednn_convolution() is None, reason="torch has no oneDNN here")


def test_all_activations_are_measured() -> None:
    assert len(BEHIND) == len(ACTIVATIONS)
    assert len(set(SHAPES)) == len(SHAPES)


def test_a_convolution_is_measured() -> None:
    milliseconds, ratio = measure((1, 3, 8, 4, 3), "silu", Budget(rounds=2, seconds=1))

    assert milliseconds > 0
    assert ratio.low > 0


def test_a_row_says_what_the_rule_does() -> None:
    assert line((1, 2, 8, 4, 3), Budget(rounds=2, seconds=1))[-1] == "inside"
