"""Compiled graphs whose calls are recorded: as data, and as functions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stator.core.events import Held
from stator.core.torch_types import Boxed
from stator.runtime.cuda_graphs import Pool, Recordable, with_cuda_graphs
from stator.runtime.cuda_recorder import recorder_of
from stator.runtime.native.image import Image


@dataclass(frozen=True, slots=True)
class Recorded:
    """A compiled graph whose calls are recorded, as data: recordings are made anew."""

    image: Image
    facts: Recordable

    @property
    def held(self) -> Held:
        """Bytes that a call was foreseen to hold."""
        return self.image.held


@dataclass(frozen=True, slots=True)
class Recordings:
    """What those of a compilation share."""

    notes: list[str]  # of its record
    pools: dict[torch.device, Pool] = field(default_factory=dict)

    def of(self, run: Boxed, facts: Recordable, name: str) -> Boxed:
        """`run`, recorded and replayed where that can be."""
        if facts.device not in self.pools:
            self.pools[facts.device] = Pool(recorder_of(facts.device), self.notes)
        return with_cuda_graphs(run, facts, self.pools[facts.device], name)
