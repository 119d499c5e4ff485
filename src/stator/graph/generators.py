"""torch's own random generators: the CPU's, and one for each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from stator.torch_api import pytree


def gpus_of(nodes: Iterable[fx.Node]) -> tuple[torch.device, ...]:
    """GPUs that results of the nodes lie on, each once."""
    leaves = (leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    devices = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    return tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))


def gpus_in_use() -> tuple[torch.device, ...]:
    """GPUs whose generators this process may have moved: none before it has come to use one."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", number) for number in range(count))


def states(gpus: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """The states of the CPU's generator and of these."""
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus))


def restore(gpus: Sequence[torch.device], taken: Sequence[torch.Tensor]) -> None:
    """Give the generators the states that `states` took."""
    torch.set_rng_state(taken[0])
    for gpu, state in zip(gpus, taken[1:], strict=True):
        torch.cuda.set_rng_state(state, gpu)


def preserved(gpus: Sequence[torch.device]) -> AbstractContextManager[Any]:
    """A context behind which the generators are as they were before it."""
    kept: AbstractContextManager[Any] = torch.random.fork_rng(
        devices=[gpu.index for gpu in gpus], device_type="cuda"
    )
    return kept
