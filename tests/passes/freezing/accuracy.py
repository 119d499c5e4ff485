"""Folded graphs compute what they did, and as exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stator.graph.run import GraphPass
from tests.passes.freezing.graphs import rewritten, run_with_constants


def folded(
    fn: Callable[..., Any],
    arguments: tuple[Tensor, ...],
    *passes: GraphPass,
    changing: tuple[int, ...] = (0,),
) -> tuple[list[str], list[str]]:
    """The calls that are left once constants are taken out, and the notes.

    All arguments are weights but those at `changing`.  Results agree with eager's, and are at most
    twice as far from those of float64.
    """
    weights = tuple(n for n in range(len(arguments)) if n not in changing)
    module, ctx = rewritten(fn, arguments, weights, *passes)
    found, _ = run_with_constants(module, arguments)
    plain, exact = fn(*arguments), fn(*(value.double() for value in arguments))
    plain, exact = ([one] if isinstance(one, Tensor) else list(one) for one in (plain, exact))
    for ours, eager, right in zip(found, plain, exact, strict=True):
        assert (ours.dtype, ours.size(), ours.stride()) == (
            eager.dtype,
            eager.size(),
            eager.stride(),
        )
        assert is_as_exact(ours, eager, right)
    calls = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return calls, ctx.record.notes


def is_as_exact(ours: Tensor, eager: Tensor, right: Tensor) -> bool:
    """Whether a result is at most twice as far from that of float64 as eager's, and a digit."""
    if not right.numel():
        return True
    one_digit = torch.finfo(eager.dtype).eps * right.abs().max()
    return bool(_distance(ours, right) <= 2 * _distance(eager, right) + one_digit)


def _distance(value: Tensor, right: Tensor) -> Tensor:
    return (value.double() - right).abs().max()
