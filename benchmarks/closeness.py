"""How far a result is from eager's."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Programs here are float32 and deep; what is wrong is wrong by far more.
TOLERANCE: Final = 1e-3
# A gradient that is zero but for rounding has no digits to compare: it is measured against this
# share of the largest result beside it.
FLOOR: Final = 1e-3


def tensors(result: Any) -> list[Tensor]:
    """Every tensor of a nested result."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def relative_error(expected: Any, actual: Any) -> float:
    """The largest error of a tensor over its norm; infinite if the two do not even look alike."""
    ours, theirs = tensors(actual), tensors(expected)
    shapes = [(t.shape, t.dtype) for t in ours]
    if shapes != [(t.shape, t.dtype) for t in theirs]:
        return math.inf
    norms = [_norm(t) for t in theirs]
    floor = FLOOR * max(norms, default=0.0)
    errors = [
        _norm(a.float() - e.float()) / (norm + floor) if norm + floor else float(a.any())
        for a, e, norm in zip(ours, theirs, norms, strict=True)
    ]
    worst = max(errors, default=0.0)
    return math.inf if any(math.isnan(error) for error in errors) else worst


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float()))


def dropout_error(expected: Any, actual: Any) -> float:
    """Masks differ by right; what both kept has to agree, and how much was dropped."""
    (theirs,), (ours,) = tensors(expected), tensors(actual)
    kept = (theirs != 0) & (ours != 0)
    share = abs(float((theirs == 0).float().mean() - (ours == 0).float().mean()))
    return share + relative_error(theirs[kept], ours[kept])
