"""The operator table, filled by importing the modules that declare operators."""

from stator.ops import (
    activation,
    compare,
    make,
    norm,
    norm_backward,
    pointwise,
    reduce,
    special,
    views,
)

__all__ = [
    "activation",
    "compare",
    "make",
    "norm",
    "norm_backward",
    "pointwise",
    "reduce",
    "special",
    "views",
]
