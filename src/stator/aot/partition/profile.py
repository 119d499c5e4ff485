"""How long library calls take on this machine, in bytes that a copy moves meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import fx

from stator.aot.partition.weigh import is_generated, may_run_again
from stator.torch_api import is_view_op, unset_fake_temporarily

COPIED: Final = 1 << 24  # bytes of the copy that time is compared with
ROUNDS: Final = 3


def measured(nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """What calls of libraries among `nodes` cost; equal calls are measured once."""
    known: dict[Any, float | None] = {}
    found: dict[fx.Node, float] = {}
    with unset_fake_temporarily(), torch.no_grad():
        source = torch.empty(COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        a_byte = _seconds(lambda: target.copy_(source)) / (2 * COPIED)
        for node in nodes:
            if is_generated(node) or is_view_op(node.target) or not may_run_again(node):
                continue
            key = (node.target, *map(_kind, node.args), *map(_kind, node.kwargs.items()))
            if key not in known:
                known[key] = _seconds_of(node)
            seconds = known[key]
            if seconds is not None:
                found[node] = seconds / a_byte
    return found


def _seconds_of(node: fx.Node) -> float | None:
    """Seconds of the call on made-up tensors; None if it does not run on those."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _made_up(source.meta["val"]))
    try:
        return _seconds(lambda: node.target(*args, **kwargs))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 1):  # the first warms up
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _made_up(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return int(value) if isinstance(value, torch.SymInt) else value
    size = [int(n) for n in value.size()]
    made = torch.empty_strided(size, [int(n) for n in value.stride()], dtype=value.dtype)
    return made.fill_(1)


def _kind(argument: Any) -> Any:
    """What of an argument the time depends on."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor):
        return (tuple(map(str, value.size())), tuple(map(str, value.stride())), value.dtype)
    return str(value)
