"""The lock under which constants are made, and its place among others.

A thread may make constants while it holds the lock of a recorder: what it records may be a program
that reads some.  The other way round two threads could wait for each other, so while constants are
made, whatever that calls runs as usual: see cuda_graphs.py.
"""

from __future__ import annotations

from threading import RLock, get_ident
from types import TracebackType
from typing import Any, Final


class Making:
    """Held by whoever makes constants or gives weights: nobody makes them of old and new ones.

    What a recipe calls may be a program with constants of its own, so that a thread may hold it
    more than once.
    """

    def __init__(self) -> None:
        self._lock: Any = RLock()
        self._owners: list[int] = []  # the same thread, as often as it holds the lock

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it; whether that was done."""
        taken = bool(self._lock.acquire(blocking))
        if taken:
            self._owners.append(get_ident())
        return taken

    def release(self) -> None:
        """Give it back."""
        self._owners.pop()
        self._lock.release()

    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return get_ident() in self._owners

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()


making: Final = Making()
