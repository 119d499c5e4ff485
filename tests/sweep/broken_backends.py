"""Backends with one fault each, for the tests that the sweep would find it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Runner = Callable[..., Any]


def _changing_outputs(graph: Runner, change: Callable[[Any], Any]) -> Runner:
    def run(*args: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, change, graph(*args))

    return run


def runs_eagerly(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """No fault."""
    return graph


def loses_accuracy(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Results a thousandth too large."""
    return _changing_outputs(graph, lambda tensor: tensor * (1 + 1e-3))


def loses_strides(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Results laid out contiguously, whatever eager does."""
    return _changing_outputs(graph, lambda tensor: tensor.contiguous())


def loses_gradients(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Results cut off from their inputs."""
    return _changing_outputs(graph, lambda tensor: tensor.detach())


def loses_mutations(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Works on copies, so that inputs stay as they were."""

    def run(*args: Any) -> Any:
        return graph(*pytree.tree_map_only(torch.Tensor, torch.clone, args))

    return run


def draws_twice(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Takes one more random number than eager does."""

    def run(*args: Any) -> Any:
        torch.rand(())
        return graph(*args)

    return run


def refuses(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Cannot compile anything."""
    raise NotImplementedError("a backend that refuses")


def hangs(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Never comes back."""
    while True:
        time.sleep(0.01)


def crashes(graph: Runner, inputs: Sequence[Any]) -> Runner:
    """Takes the process down."""
    os.kill(os.getpid(), signal.SIGKILL)
    return graph
