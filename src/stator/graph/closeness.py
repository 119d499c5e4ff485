"""Whether a result is as near to the truth as eager's: at most twice its error, and an ulp.

The truth is the same computation in float64.  Errors count relative to the larger one of an
element and the tensor's usual size, and eager's is the largest of the tensor: that it hit an
element exactly by luck is no measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Worst:
    """The element that is furthest off."""

    place: tuple[int, ...]
    ours: Any
    eager: Any
    exact: Any  # in float64
    reason: str

    def __str__(self) -> str:
        spot = f"[{', '.join(map(str, self.place))}]"
        return f"{self.reason} at {spot}: {self.ours!r}, eager {self.eager!r}, exact {self.exact!r}"


def worst_element(ours: Tensor, eager: Tensor, exact: Tensor, ulps: int = 1) -> Worst | None:
    """None if `ours` is near enough; otherwise the element that is furthest off.

    `ulps` are allowed beyond twice eager's error.
    """
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        kinds = f"{ours.dtype} {tuple(ours.shape)} where eager has {eager.dtype}"
        return Worst((), None, None, None, f"{kinds} {tuple(eager.shape)}")
    if ours.numel() == 0:
        return None
    if ours.is_complex():
        parts = [torch.view_as_real(one.resolve_conj()) for one in (ours, eager, exact)]
        return worst_element(parts[0], parts[1], parts[2], ulps)
    if not ours.is_floating_point():
        wrong = (ours != eager) & (ours != exact.to(ours.dtype))
        return _at(wrong.int(), ours, eager, exact, "another value") if wrong.any() else None
    return _furthest(ours, eager, exact, ulps)


def _furthest(ours: Tensor, eager: Tensor, exact: Tensor, ulps: int) -> Worst | None:
    mine, theirs, exact = ours.double(), eager.double(), exact.double()
    told = theirs.isfinite() & exact.isfinite()
    # Where eager has no number although there is one, or the other way round, nothing is asked.
    agreed = ~theirs.isfinite() & ~exact.isfinite()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if bool((agreed & ~same).any()):
        return _at((agreed & ~same).int(), ours, eager, exact, "not eager's infinity or NaN")
    if not bool(told.any()):
        return None
    usual = exact[told].square().mean().sqrt()
    scale = torch.maximum(exact.abs(), usual).clamp(min=torch.finfo(ours.dtype).smallest_normal)
    theirs_off = ((theirs - exact).abs() / scale)[told].max()
    allowed = 2 * theirs_off + ulps * _ulp(ours.dtype)
    off = torch.where(told, (mine - exact).abs() / scale, 0.0)
    off = torch.where(off.isnan(), torch.inf, off)
    if not bool((off > allowed).any()):
        return None
    reason = f"off by {float(off.max()):.2g} of its size, {float(allowed):.2g} allowed"
    return _at(off, ours, eager, exact, reason)


def _ulp(dtype: torch.dtype) -> float:
    """The spacing of numbers; of float64, which has nothing more exact to compare with, many."""
    return 1e-11 if dtype is torch.float64 else torch.finfo(dtype).eps


def _at(measure: Tensor, ours: Tensor, eager: Tensor, exact: Tensor, reason: str) -> Worst:
    flat = int(measure.flatten().argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), measure.shape))
    return Worst(place, ours[place].item(), eager[place].item(), exact[place].item(), reason)
