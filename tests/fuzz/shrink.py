"""What fails, made simpler as long as it still fails: decisions first, then the kernel itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stator.loops.ir import Kernel, Stage

MOST_TRIES: Final = 500  # a try takes some 50 ms


@dataclass(slots=True)
class _Search:
    best: list[int]
    fails: Callable[[list[int]], bool]
    left: int = MOST_TRIES

    def accepts(self, candidate: list[int]) -> bool:
        """Whether the candidate is simpler and still fails; it is the best one then."""
        is_simpler = (len(candidate), candidate) < (len(self.best), self.best)
        if self.left == 0 or not is_simpler:
            return False
        self.left -= 1
        if not self.fails(candidate):
            return False
        self.best = candidate
        return True

    def leave_out(self) -> bool:
        """Try without stretches, the long ones first."""
        found, length = False, max(len(self.best) // 2, 1)
        while length:
            start = 0
            while start + length <= len(self.best):
                if self.accepts(self.best[:start] + self.best[start + length :]):
                    found = True
                else:
                    start += max(length // 2, 1)
            length //= 2
        return found

    def lower(self) -> bool:
        """Try smaller numbers."""
        found = False
        for place in range(len(self.best)):
            for smaller in (0, self.best[place] // 2, self.best[place] - 1):
                if place < len(self.best) and 0 <= smaller < self.best[place]:
                    changed = [*self.best[:place], smaller, *self.best[place + 1 :]]
                    found |= self.accepts(changed)
        return found


def shrunk(decisions: Sequence[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """The shortest, smallest list found with which `fails` is still true."""
    search = _Search(list(decisions), fails)
    while search.leave_out() | search.lower():
        pass
    return search.best


def trimmed(kernel: Kernel, fails: Callable[[Kernel], bool]) -> Kernel:
    """The kernel without the statements that it does not need to fail."""
    for smaller in _without_one(kernel):
        if fails(smaller):
            return trimmed(smaller, fails)
    return kernel


def _without_one(kernel: Kernel) -> Iterator[Kernel]:
    for number, stage in enumerate(kernel.stages):
        for place in range(len(stage.body)):
            body = stage.body[:place] + stage.body[place + 1 :]
            kept = [Stage(stage.inner, body, stage.in_order)] if body else []
            stages = (*kernel.stages[:number], *kept, *kernel.stages[number + 1 :])
            if stages:
                yield replace(kernel, stages=stages)
