"""What a library is written of."""

from __future__ import annotations

from dataclasses import dataclass

from stator.graph.recipe import Constants
from stator.runtime.memory import Memory
from stator.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph without a backward, planned."""

    plan: Plan
    memory: Memory
    constants: Constants
