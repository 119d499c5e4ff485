"""Roundings stay where they change something."""

from __future__ import annotations

import pytest

from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.schedule.idle_roundings import without_idle_roundings

TEXT = """
kernel example
  buffer x: bf16[8]
  buffer z: f32[8]
  buffer y: bf16[8]
  buffer f: f32[8]
  outer i0: 8
  stage
    {store}
"""


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("f[i0] = to_bf16(x[i0])", "f[i0] = x[i0]"),
        ("f[i0] = to_bf16(max(x[i0], neg(x[i0])))", "f[i0] = max(x[i0], neg(x[i0]))"),
        (
            "f[i0] = to_bf16(within(i0, 3, x[i0], to_bf16(z[i0])))",
            "f[i0] = within(i0, 3, x[i0], to_bf16(z[i0]))",
        ),
        ("y[i0] = to_bf16(mul(x[i0], z[i0]))", "y[i0] = mul(x[i0], z[i0])"),
        ("y[i0] = to_f16(mul(x[i0], z[i0]))", "y[i0] = to_f16(mul(x[i0], z[i0]))"),
        ("f[i0] = to_bf16(z[i0])", "f[i0] = to_bf16(z[i0])"),
        ("f[i0] = to_f16(x[i0])", "f[i0] = to_f16(x[i0])"),
        ("f[i0] = to_bf16(max(x[i0], z[i0]))", "f[i0] = to_bf16(max(x[i0], z[i0]))"),
        ("y[i0] sum= to_bf16(z[i0])", "y[i0] sum= to_bf16(z[i0])"),
    ],
)
def test_what_changes_nothing_goes(given: str, left: str) -> None:
    kernel, expected = (parse(TEXT.format(store=store)) for store in (given, left))

    assert to_text(without_idle_roundings(kernel)) == to_text(expected)
