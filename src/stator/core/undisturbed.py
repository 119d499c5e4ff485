"""Nothing of Python's own work gets in the way while the compiler works."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Words of the operand stack of a frame, of which a page or less is ever touched.  CPython asks for
# twice as many bytes at least, so frames of callees find 128 KiB behind it.
_ROOM: Final = 1 << 14


def with_room(function: _Function) -> _Function:
    """`function` with room for its callees' frames.

    CPython keeps frames in pieces of 16 KiB, and unmaps a piece when the last frame leaves it.
    Where a piece ends between a loop and what it calls, each call maps and unmaps memory: it was
    how deep in the user's program we were called that decided whether a stage took three times as
    long.  A frame that fits no usual piece gets a larger one, with room behind it.
    """

    def roomy(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_ROOM)
    return functools.wraps(function)(roomy)  # type: ignore[return-value]  # takes what it takes


def undisturbed(function: _Function) -> _Function:
    """`function` with room for frames, and without collections inside.

    A collection walks all of torch's objects: a tenth of a compilation.  What is left behind is
    collected as ever, once it is done.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return with_room(call)  # type: ignore[return-value]  # takes what it takes
