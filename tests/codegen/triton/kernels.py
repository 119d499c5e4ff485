"""Kernels of every shape that is written in Triton, as text of the loop IR."""

from __future__ import annotations

from typing import Final

POINTWISE: Final = """
kernel pointwise
  buffer x: bf16[100003]
  buffer y: bf16[100003]
  outer i0: 100003
  stage
    y[i0] = mul(x[i0], normal_cdf(x[i0]))
"""

TURNED: Final = """
kernel turned
  buffer x: f32[30000]
  buffer y: f32[30000]
  outer i0: 150, i1: 200
  stage
    y[200*i0 + i1] = add(x[i0 + 150*i1], 1.0:f32)
"""

SOFTMAX: Final = """
kernel softmax
  buffer x: f32[{rows}*{columns}]
  buffer y: f32[{rows}*{columns}]
  outer i0: {rows}
  stage i1: {columns}
    acc0 max= x[{columns}*i0 + i1]
  stage i2: {columns}
    acc1 sum= exp(sub(x[{columns}*i0 + i2], acc0))
  stage i3: {columns}
    y[{columns}*i0 + i3] = div(exp(sub(x[{columns}*i0 + i3], acc0)), acc1)
"""

COLUMNS: Final = """
kernel columns
  buffer x: f32[60000]
  buffer y: f32[200]
  outer i0: 200
  stage i1: 300
    acc0 sum= x[i0 + 200*i1]
  stage
    y[i0] = acc0
"""

SCAN: Final = """
kernel scan
  buffer x: f64[{columns}*7]
  buffer y: f64[{columns}*7]
  outer i0: 7
  scan i1: {columns}
    acc0 sum= x[{columns}*i0 + i1]
    y[{columns}*i0 + i1] = acc0
"""

OF_ANY_SIZE: Final = """
kernel of_any_size
  size s0
  buffer x: f32[33*s0]
  buffer y: f32[33]
  outer i0: 33
  stage i1: s0
    acc0 max= x[i0*s0 + i1]
  stage
    y[i0] = acc0
"""


def softmax(rows: int, columns: int) -> str:
    """Rows of a length."""
    text = SOFTMAX.format(rows=rows, columns=columns)
    return text.replace(f"[{rows}*{columns}]", f"[{rows * columns}]")


def scan(columns: int) -> str:
    """Running sums of a length."""
    return SCAN.format(columns=columns).replace(f"[{columns}*7]", f"[{columns * 7}]")


TEXTS: Final = {
    "pointwise": POINTWISE,
    "turned": TURNED,
    "short rows": softmax(700, 40),
    "rows": softmax(5, 3000),
    "rows in several blocks": softmax(3, 40000),
    "columns": COLUMNS,
    "scan": scan(500),
    "scan in several blocks": scan(20000),
    "of any size": OF_ANY_SIZE,
}
