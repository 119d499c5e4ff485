"""A recorder without a GPU: a recorded call is done again, from memory to memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from stator.core.torch_types import Boxed
from stator.runtime.cuda_graphs import Pool, Recordable, flat, with_cuda_graphs
from stator.torch_api import BELOW_AUTOGRAD, below_autograd


@dataclass(frozen=True)
class Place:
    """A tensor as a recording knows it: by its address, whoever has it."""

    address: int
    bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Place:
        room = flat(tensor)
        address = tensor.data_ptr()
        return Place(address, room.nbytes, tensor.size(), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        """What lies there now."""
        if not self.bytes:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        memory = (ctypes.c_byte * self.bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.size, self.stride)


def _known(value: Any) -> Any:
    return Place.of(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value


@dataclass(eq=False)
class Again:
    """Does recorded calls again.  Programs ask it what a GPU would not do while it records."""

    lock: Any = field(default_factory=RLock)
    is_live: bool = True  # what runs now is done; otherwise it is only recorded
    busy: bool = False  # somebody else records
    fails: str | None = None
    pools: int = 0
    orders: int = 0
    stream: Any = None  # the current one

    def new_pool(self) -> object:
        self.pools += 1
        return object()

    def is_recording(self) -> bool:
        return self.busy

    def order(self) -> Any:
        self.orders += 1
        return self.stream

    def record(
        self, pool: Any, run: Boxed, arguments: list[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        if self.fails is not None:
            raise RuntimeError(self.fails)
        given = [_known(value) for value in arguments]
        self.is_live = False
        others, results = run(list(arguments)), run(list(arguments))
        self.is_live = True
        places = [
            _known(one)  # of a result that is an argument there is nothing to be done
            if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr()
            else None
            for one, other in zip(results, others, strict=True)
        ]
        for place in (place for place in places if isinstance(place, Place)):
            ctypes.memset(place.address, 0xFF, place.bytes)  # NaN: nothing is computed yet

        def replay() -> None:
            found = run([one.tensor() if isinstance(one, Place) else one for one in given])
            for place, result in zip(places, found, strict=True):
                if isinstance(place, Place):
                    ctypes.memmove(place.address, result.data_ptr(), place.bytes)

        return replay, results


@dataclass
class Program:
    """A function as a compiled graph, which counts how often it ran."""

    function: Callable[..., Sequence[Any]]
    recorder: Again = field(default_factory=Again)
    runs: int = 0

    def run(self, arguments: list[Any]) -> Sequence[Any]:
        given = list(arguments)
        arguments.clear()
        self.runs += 1
        return tuple(self.function(*given))

    def recorded(self, pool: Pool | None = None, name: str = "forward", **facts: Any) -> Call:
        self.pool = pool or Pool(self.recorder)
        return Call(
            with_cuda_graphs(self.run, Recordable(torch.device("cpu"), **facts), self.pool, name)
        )


@dataclass
class Call:
    """Calls a graph as wrappers do: autograd is above."""

    graph: Any

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        with below_autograd(BELOW_AUTOGRAD):
            results: Sequence[Any] = self.graph(arguments)
        return results

    @property
    def sizes(self) -> list[Any]:
        """What is known of calls of each size."""
        return [size for sizes in self.graph.sizes.values() for size in sizes.values()]
