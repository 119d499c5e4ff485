"""Operators registered with torch.library, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType

notes: list[str] = []  # what the operators with effects wrote down, in order


@torch.library.custom_op("stator_test::scaled_sin", mutates_args=())
def scaled_sin(x: Tensor, scale: float) -> Tensor:
    """scale * sin(x), computed by numpy: nothing here can be traced."""
    return torch.from_numpy(scale * torch.sin(x).numpy())


@scaled_sin.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _scaled_sin_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _scaled_sin_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * ctx.scale * x.cos(), None


scaled_sin.register_autograd(_scaled_sin_backward, setup_context=_scaled_sin_setup)


@torch.library.custom_op("stator_test::no_gradient", mutates_args=())
def no_gradient(x: Tensor) -> Tensor:
    """An operator whose author wrote no backward."""
    return x.clone()


@no_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("stator_test::min_and_max", mutates_args=())
def min_and_max(xs: Sequence[Tensor], cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Smallest and largest element over all tensors, the latter at most `cap`."""
    flat = torch.cat([x.flatten() for x in xs])
    high = flat.max()
    return flat.min(), high if cap is None else high.clamp(max=cap)


@min_and_max.register_fake
def _(xs: Sequence[Tensor], cap: float | None = None) -> tuple[Tensor, Tensor]:
    return xs[0].new_empty(()), xs[0].new_empty(())


@torch.library.custom_op("stator_test::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    """total += x"""
    total.add_(x)


@torch.library.custom_op("stator_test::swap_and_sum", mutates_args=("a", "b"))
def swap_and_sum(a: Tensor, b: Tensor) -> Tensor:
    """Exchange the contents of two tensors and return their sum."""
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return a + b


@swap_and_sum.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("stator_test::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """The elements above zero: how many depends on data."""
    return x[x > 0].clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size)


@torch.library.custom_op("stator_test::note", mutates_args=())
def note(x: Tensor, text: str) -> Tensor:
    """Return a copy, and write the text down."""
    notes.append(text)
    return x.clone()


@note.register_fake
def _(x: Tensor, text: str) -> Tensor:
    return torch.empty_like(x)


note.register_autograd(
    lambda ctx, grad: (note(grad, f"{ctx.text} back"), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "text", inputs[1]),
)
note.register_effect(EffectType.ORDERED)


@torch.library.custom_op("stator_test::write_down", mutates_args=())
def write_down(text: str, x: Tensor) -> None:
    """Write the sum of a tensor down; returns nothing."""
    notes.append(f"{text} {x.sum().item():g}")


@write_down.register_fake
def _(text: str, x: Tensor) -> None:
    return None


write_down.register_effect(EffectType.ORDERED)
