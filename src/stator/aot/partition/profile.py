"""How long library calls take where they run, in bytes that a copy moves there meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import fx

from stator.aot.partition.weigh import hint_of, is_generated, may_run_again
from stator.torch_api import SYMBOLIC_TYPES, is_view_op, size_hint, unset_fake_temporarily

COPIED: Final = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes of the copy that time is compared with
ROUNDS: Final = 3


def measured(nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """What calls of libraries among `nodes` cost; equal calls are measured once."""
    known: dict[Any, float | None] = {}
    copies: dict[torch.device, float] = {}
    found: dict[fx.Node, float] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for node in nodes:
            if is_generated(node) or is_view_op(node.target) or not may_run_again(node):
                continue
            device = _device_of(node)
            key = (node.target, *map(kind_of, node.args), *map(kind_of, node.kwargs.items()))
            if key not in known:
                known[key] = _seconds_of(node, device)
            seconds = known[key]
            if seconds is not None:
                if device not in copies:
                    copies[device] = _seconds_of_a_byte(device)
                found[node] = seconds / copies[device]
    return found


def _device_of(node: fx.Node) -> torch.device:
    """Where the call runs: a GPU, if one of its tensors is there."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def _seconds_of_a_byte(device: torch.device) -> float:
    count = COPIED[device.type]
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), device) / (2 * count)


def _seconds_of(node: fx.Node, device: torch.device) -> float | None:
    """Seconds of the call on made-up tensors; None if it does not run on those."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: made_up(source.meta["val"]))
    try:
        return _seconds(lambda: node.target(*args, **kwargs), device)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS + 1):  # the first warms up
        _wait_for(device)
        begin = time.perf_counter()
        call()
        _wait_for(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":  # a call only asks for the work
        torch.cuda.synchronize(device)


def made_up(value: Any) -> Any:
    """A tensor like a fake one, with ones in it; numbers as they are, sizes as they were."""
    if not isinstance(value, torch.Tensor):
        return _plain(value)
    size, stride = (list(map(hint_of, numbers)) for numbers in (value.size(), value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).fill_(1)


def kind_of(argument: Any) -> Any:
    """What of an argument the time and the memory of a call depend on."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    if isinstance(value, list | tuple):
        return tuple(map(kind_of, value))
    if isinstance(value, torch.Tensor):
        sizes, strides = value.size(), value.stride()
        return (tuple(map(hint_of, sizes)), tuple(map(hint_of, strides)), value.dtype, value.device)
    return str(_plain(value))


def _plain(number: Any) -> Any:
    """A symbolic number as it was when captured; anything else as it is."""
    if not isinstance(number, SYMBOLIC_TYPES):
        return number
    known = size_hint(number)
    return 1 if known is None else known
