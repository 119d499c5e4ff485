"""Every value that a graph computes in eager mode, kept in memory or on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx

from stator.debug.minify.case import Case
from stator.torch_api import pytree


class Recorded:
    """Values of a graph's nodes, by name: nodes keep their names when a graph is cut."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        """A copy of the node's value; KeyError if there is none."""
        value = self._kept[node.name]
        return torch.load(value, weights_only=True) if isinstance(value, Path) else value

    def keep(self, node: fx.Node, value: Any) -> None:
        """Remember a node's value as it is now."""
        copied = pytree.tree_map_only(torch.Tensor, copy_of, value)
        if self._folder is None or not isinstance(copied, torch.Tensor):
            self._kept[node.name] = copied
        else:
            file = self._folder / f"{len(self._kept)}.pt"
            torch.save(copied, file)
            self._kept[node.name] = file


def record(case: Case, folder: Path | None = None) -> Recorded:
    """Run a graph in eager mode and keep what every node computes; in files, given a folder."""
    found = Recorded(folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "output":
                found.keep(n, result)
            return result

    Recorder(case.module).run(*fresh(case.inputs))
    return found


def fresh(inputs: Any) -> list[Any]:
    """Copies of inputs: a graph may write to them."""
    return [copy_of(value) if isinstance(value, torch.Tensor) else value for value in inputs]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, without its history."""
    wants = tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    plain = tensor.detach()
    if tensor.layout is not torch.strided or type(plain) not in (torch.Tensor, torch.nn.Parameter):
        return plain.clone().requires_grad_(wants)
    reach = 1 + sum(max(0, n - 1) * s for n, s in zip(plain.size(), plain.stride(), strict=True))
    room = torch.empty(max(1, reach), dtype=plain.dtype, device=plain.device)
    if plain.numel():
        # Elements that share a place are equal, so that the order of writing does not matter.
        room.copy_(plain.as_strided((reach,), (1,)))
    return room.as_strided(plain.size(), plain.stride()).requires_grad_(wants)
