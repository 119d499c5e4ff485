"""The constants of a library in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from stator.package.program import Constant
from stator.package.tables import Held

ALIGNMENT: Final = 64  # of constants


@dataclass(slots=True)
class Blob:
    """Constants in the order that they were added, their bytes handed on at once."""

    put: Callable[[Any], object]  # takes bytes, piece after piece; each keeps its tensor alive
    held: list[Held] = field(default_factory=list)
    size: int = 0
    numbers: dict[str, int] = field(default_factory=dict)  # by name

    def add(self, constants: Sequence[Constant]) -> list[int]:
        """Their numbers; what shares memory shares it here, and what is known stays."""
        fresh = [constant for constant in constants if constant.name not in self.numbers]
        spans: dict[int, tuple[int, int]] = {}  # of storages: first and last byte that is needed
        for constant in fresh:
            start, end = _span(constant.value)
            low, high = spans.get(_storage(constant), (start, end))
            spans[_storage(constant)] = (min(low, start), max(high, end))
        places: dict[int, int] = {}
        for constant in fresh:
            value, key = constant.value, _storage(constant)
            if key not in places:
                places[key] = self._place(value.untyped_storage(), *spans[key])
            start, end = _span(value)
            offset = places[key] + start - spans[key][0]
            place = (tuple(value.size()), tuple(value.stride()), offset, end - start)
            self.numbers[constant.name] = len(self.held)
            held = Held(constant.name, value.dtype, constant.kind, *place, device=constant.device)
            self.held.append(held)
        return [self.numbers[constant.name] for constant in constants]

    def _place(self, storage: torch.UntypedStorage, low: int, high: int) -> int:
        place = self.size
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if high > low:
            self.put(whole[low:high].cpu().numpy())
            self.size += high - low
            self.pad(ALIGNMENT)
        return place

    def pad(self, alignment: int) -> int:
        """Go on at a multiple of something: how many bytes there are then."""
        self.put(bytes(-self.size % alignment))
        self.size += -self.size % alignment
        return self.size


def _storage(constant: Constant) -> int:
    return int(constant.value.untyped_storage().data_ptr())


def _span(value: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    start = value.storage_offset() * value.itemsize
    if not value.numel():
        return start, start
    pairs = zip(value.size(), value.stride(), strict=True)
    return start, start + (1 + sum((n - 1) * step for n, step in pairs)) * value.itemsize
