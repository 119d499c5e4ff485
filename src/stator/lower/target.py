"""Where a graph's kernels run, and what they are written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """The device of a graph's kernels."""

    device: torch.device = CPU
    uses_triton: bool = False  # for a GPU; on CPU tensors its interpreter runs them

    @property
    def on_gpu(self) -> bool:
        """Whether there is a card: to measure on, say."""
        return bool(self.device.type == "cuda")


ON_THE_CPU: Final = Target()


def target_of(graph: fx.Graph, codegen: str = "auto") -> Target:
    """The first GPU that holds a tensor of the graph; without one the CPU.

    `codegen` is `Options.codegen`: "triton" means its interpreter where there is no GPU.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                return Target(tensor.device, uses_triton=True)
    return Target(uses_triton=codegen == "triton")
