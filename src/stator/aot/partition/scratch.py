"""Memory that a library takes for itself within a call, and gives back: convolutions most of all.

How much that is depends on the library, the processor and the number of threads, and nobody tells.
So the call itself is asked: it runs once on made-up tensors while torch's allocator is watched.
That is done only for calls that might set the highest mark, once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from stator.aot.partition.profile import kind_of, made_up
from stator.aot.partition.weigh import bytes_of
from stator.torch_api import (
    MEMORY_WATCH,
    OpOverload,
    autocast_off,
    begin_watch,
    end_watch,
    is_mutable_op,
    is_random_op,
    is_view_op,
    pytree,
    unset_fake_temporarily,
)

TIMES: Final = 4  # what a call reads: no library was seen to take more for itself
WORTH_ASKING: Final = 1 << 20  # bytes that it might take

_known: dict[Hashable, int] = {}


class Calling(NamedTuple):
    """A call of a library's, with nodes for what it reads."""

    target: Any
    args: Any
    kwargs: Mapping[str, Any]

    @property
    def most(self) -> int:
        """Bytes that it may take for itself; 0 if it takes none, or cannot be asked.

        Numbers that are made up would not do as indices.
        """
        values = [one.meta.get("val") for one in self._nodes()]
        if not values or not isinstance(self.target, OpOverload):
            return 0
        if self.target.namespace != "aten" or _may_not_run(self.target):
            return 0
        if not all(isinstance(value, torch.Tensor) and _is_plain(value) for value in values):
            return 0
        most = TIMES * sum(map(bytes_of, values))
        return most if most >= WORTH_ASKING else 0

    def scratch(self) -> int:
        """Bytes that it does take."""
        threads = torch.get_num_threads()
        key = (self.target, threads, *map(kind_of, self.args), *map(kind_of, self.kwargs.items()))
        if key not in _known:
            taken = self._asked()
            if taken is None:
                return 0
            _known[key] = taken
        return _known[key]

    def _asked(self) -> int | None:
        """The same, from a call; None if somebody else watches."""
        with unset_fake_temporarily(), torch.no_grad(), autocast_off():
            args, kwargs = fx.map_arg(
                (self.args, self.kwargs), lambda source: made_up(source.meta["val"])
            )
            try:
                begin_watch(MEMORY_WATCH)
            except RuntimeError:
                return None
            try:
                made = self.target(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError, TypeError):
                made = None
            finally:
                threads = end_watch()
        events = (event for thread in threads for event in thread)
        changes = [int(one.cpu_memory_usage()) for one in events if one.kind() == "memory_alloc"]
        return max(0, max(accumulate(changes, initial=0)) - _bytes_made(made))

    def _nodes(self) -> Iterator[fx.Node]:
        for one in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(one, fx.Node):
                yield one


def highest(held: Sequence[int], calls: Mapping[int, Calling]) -> int:
    """The most bytes of torch's at once; `calls` are by the step of `held` at which they run."""
    most = max(held, default=0)
    for step in sorted(calls, key=lambda step: -held[step]):
        if held[step] + calls[step].most > most:
            most = max(most, held[step] + calls[step].scratch())
    return most


def _may_not_run(target: OpOverload) -> bool:
    return is_view_op(target) or is_mutable_op(target) or is_random_op(target)


def _is_plain(value: torch.Tensor) -> bool:
    on_cpu = value.device.type == "cpu" and value.layout is torch.strided
    return on_cpu and value.is_floating_point()


def _bytes_made(made: Any) -> int:
    """Bytes of results."""
    tensors = [one for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())
