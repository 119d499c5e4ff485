"""Those that are compared: how each compiles a program, and how long its part of that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.case import Kind, Program
from benchmarks.others import converted, installed
from benchmarks.record import EAGER, FROZEN, INDUCTOR, STATOR, STATOR_FROZEN

# Strict: a fallback to eager would pass for a result.
STATOR_OPTIONS: Final = {"strict": True, "cache": False}  # compile times are cold


class Watch:
    """Time spent in a backend, and how many graphs it was given."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.graphs = 0
        self._depth = 0

    def around(self, compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, watched; what it calls of itself is not counted again."""

        def watched(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return compile_graph(*arguments, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - begin
                    self.graphs += 1

        return watched


def contenders(kind: Kind, peer: bool) -> list[str]:
    """Who takes part: freezing is for inference, and for programs that have weights."""
    peers = [INDUCTOR, FROZEN] if kind == "infer" else [INDUCTOR]
    ours = [STATOR, STATOR_FROZEN] if kind == "infer" else [STATOR]
    others = installed() if kind == "infer" else []
    return [EAGER, *ours, *([*peers, *others] if peer else [])]


def compiled(name: str, program: Program, watch: Watch) -> Program:
    """`program` as contender `name` runs it; it compiles at the first call, in `compiling`."""
    result: Program
    match name:
        case "stator" | "stator_frozen":
            # Here, so that a Stator that does not even import leaves the others their times.
            from stator.backend import compile_fx

            backend = watch.around(compile_fx)
            freezing = {"freezing": True} if name == STATOR_FROZEN else {}
            result = torch.compile(program, backend=backend, options=STATOR_OPTIONS | freezing)
        case "inductor":
            result = torch.compile(program, backend="inductor")
        case "frozen":
            # The option keeps Dynamo from taking this one for the one above; what makes it freeze
            # is the setting, in `compiling`, which Dynamo reads too.
            result = torch.compile(program, backend="inductor", options={"freezing": True})
        case "onnx_runtime" | "openvino":
            result = converted(name, program)
        case _:
            result = program
    return result


@contextmanager
def compiling(name: str, watch: Watch) -> Iterator[None]:
    """What has to hold while a contender compiles: Inductor's caches are empty, it is watched."""
    with ExitStack() as stack:
        if name in (INDUCTOR, FROZEN):
            # Here, for it is slow to import, and not needed without the peer.
            from torch._inductor import compile_fx as inductor
            from torch._inductor import config
            from torch._inductor.utils import fresh_cache

            stack.enter_context(fresh_cache())
            stack.enter_context(config.patch(freezing=name == FROZEN))
            watched = watch.around(inductor.compile_fx)
            stack.enter_context(mock.patch.object(inductor, "compile_fx", watched))
        yield
