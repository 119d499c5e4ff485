"""A tensor subclass that holds two tensors and does everything to both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class TwoTensor(torch.Tensor):
    """A pair of tensors of one shape, and a label that is no tensor."""

    first: Tensor
    second: Tensor
    label: str

    @staticmethod
    def __new__(
        cls: type[TwoTensor], first: Tensor, second: Tensor, label: str = "pair"
    ) -> TwoTensor:
        outer: TwoTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            first.size(),
            strides=first.stride(),
            storage_offset=first.storage_offset(),
            dtype=first.dtype,
            layout=first.layout,
            device=first.device,
            requires_grad=first.requires_grad,
        )
        return outer

    def __init__(self, first: Tensor, second: Tensor, label: str = "pair") -> None:
        self.first, self.second, self.label = first, second, label

    def __repr__(self) -> str:
        return f"TwoTensor({self.first}, {self.second}, {self.label})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["first", "second"], self.label

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], label: str, size: Sequence[int], stride: Sequence[int]
    ) -> TwoTensor:
        return TwoTensor(inner["first"], inner["second"], label)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        label = next(
            arg.label
            for arg in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(arg, TwoTensor)
        )

        def run_on(part: str) -> Any:
            pick = tree_map_only(TwoTensor, lambda pair: getattr(pair, part), (args, kwargs))
            return torch.utils._pytree.tree_flatten(func(*pick[0], **pick[1]))

        (firsts, spec), (seconds, _) = run_on("first"), run_on("second")
        outs = [
            TwoTensor(a, b, label) if isinstance(a, torch.Tensor) else a
            for a, b in zip(firsts, seconds, strict=True)
        ]
        out = torch.utils._pytree.tree_unflatten(outs, spec)
        return return_and_correct_aliasing(func, args, kwargs, out)


class Halves(torch.autograd.Function):
    """Pack two plain tensors into one pair, with gradients."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> TwoTensor:
        return TwoTensor(first, second)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, Tensor]:
        return (grad.first, grad.second) if isinstance(grad, TwoTensor) else (grad, grad)
