"""What the partitioner has to know of a joint graph, whoever traced it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stator.aot.metadata import Mutation
from stator.aot.subclasses import width
from stator.aot.trace import Traced

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Joint:
    """A graph that computes values, updates and gradients, and which node is which."""

    graph: fx.Graph
    primals: Sequence[fx.Node]
    tangents: Sequence[fx.Node]
    values: Sequence[Any]  # what the forward returns: nodes and constants
    updates: Sequence[tuple[fx.Node, Any]]  # primals that the forward writes to, and with what
    grads: Sequence[Any]  # nodes and None
    # Primals that hold something else after the forward, and what keeps their old value.
    keepers: Mapping[fx.Node, Any] = field(default_factory=dict)

    @staticmethod
    def of(traced: Traced) -> Joint:
        """The same of a trace."""
        return Joint(
            traced.module.graph,
            traced.primals,
            traced.tangents,
            traced.values,
            traced.updates,
            traced.grads,
            _keepers(traced),
        )


def _keepers(traced: Traced) -> dict[fx.Node, Any]:
    keepers: dict[fx.Node, Any] = {}
    position = 0
    for fact in traced.program.inputs:
        for node in traced.primals[position : position + width(fact.layout)]:
            if fact.mutation in (Mutation.METADATA, Mutation.STORAGE):
                keepers[node] = aten.alias.default
            elif fact.mutation is not Mutation.NONE and fact.bumps:
                keepers[node] = aten.clone.default
        position += width(fact.layout)
    return keepers
