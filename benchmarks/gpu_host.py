"""The host's time of a call that does next to nothing on the device: `x + 1` on eight elements.

A call through torch.compile pays Dynamo's guards and then the backend.  *dynamo* has nothing behind
Dynamo; a contender *alone* is its compiled graph, called without Dynamo.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.gpu_cases import HOST
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_measure import Announce, Settings, in_words, own_code
from benchmarks.gpu_record import ALONE, DYNAMO, EAGER, STATOR, GpuOutcome, GpuRow

ELEMENTS: Final = 8
CALLS: Final = 100  # of a contender in a round; the queue holds several times as many
ROUNDS: Final = 200

Host = Callable[[Tensor], Any]


def plus_one(x: Tensor) -> Tensor:
    """The whole program."""
    return x + 1


def _backend(name: str, kept: list[Host]) -> Callable[..., Host]:
    """A backend that keeps the function it makes of a graph."""

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Host:
        made: Host
        if name == STATOR:
            from stator.backend import compile_fx

            made = compile_fx(graph, inputs, options=STATOR_OPTIONS)
        else:
            from torch._inductor.compile_fx import compile_fx as inductor

            made = inductor(graph, inputs)
        kept.append(made)
        return made

    return compile_graph


def hosts(name: str, x: Tensor) -> dict[str, Host]:
    """A contender's ways to be called, by the name of the outcome; compiled."""
    program = own_code(plus_one, name)
    if name == EAGER:
        dynamo: Host = torch.compile(own_code(plus_one, DYNAMO), backend="eager")
        dynamo(x)
        return {EAGER: program, DYNAMO: dynamo}
    kept: list[Host] = []
    whole: Host = torch.compile(program, backend=_backend(name, kept))
    whole(x)
    kept[0](x)
    return {name: whole, name + ALONE: kept[0]}


def host_seconds(call: Host, x: Tensor, clock: Clock) -> float:
    """What the host needs for one call; the device follows on its own."""
    clock.wait()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    return (time.perf_counter() - begin) / CALLS


def measure_host(clock: Clock, settings: Settings, announce: Announce) -> GpuRow:
    """The row; times are under "whole"."""
    torch._dynamo.reset()
    x = torch.ones(ELEMENTS, device=clock.device)
    row = GpuRow(HOST, "host", f"x + 1 on {ELEMENTS} elements")
    calls: dict[str, Host] = {}
    for name in settings.contenders:
        announce(f"{name} compiles")
        try:
            calls |= hosts(name, x)
            clock.wait()
        except Exception as error:
            traceback.print_exc()
            row.outcomes[name] = GpuOutcome(error=in_words(error))
    announce("calls are timed")
    row.outcomes |= {name: GpuOutcome() for name in calls}
    for call in calls.values():
        host_seconds(call, x, clock)  # once before
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    try:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                row.outcomes[name].whole.append(host_seconds(call, x, clock))
            if time.perf_counter() > begin + settings.seconds:
                break
    finally:
        gc.enable()
    return row
