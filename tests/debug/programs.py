"""Choices made by hand: a curve of five points, and values of all kinds."""

from __future__ import annotations

from typing import Final

from stator.aot.partition.report import Choices, Point, Value

MEBIBYTE: Final = 1 << 20
POINTS: Final = tuple(
    Point(saved * MEBIBYTE, (100 + saved) * MEBIBYTE, time, f"budget {saved / 200:g}")
    for saved, time in ((0, 1.5), (50, 1.25), (100, 1.1), (150, 1.04), (200, 1.0))
)
CHOICES: Final = Choices(
    inputs=80 * MEBIBYTE,
    points=POINTS,
    chosen=POINTS[3],
    values=(
        Value("mm", "aten.mm", 32 * MEBIBYTE, True, "h.0.mlp", "model.py:7", "a product is dear"),
        Value("gelu", "aten.gelu", 16 * MEBIBYTE, False, "h.0.act", "model.py:8", "x < y & free"),
    ),
    holders=("weight 64 MiB", "logits 20 MiB"),
)
