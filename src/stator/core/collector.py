"""Python's garbage collector, out of the way while the compiler works."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """No collections inside: each would walk all of torch's objects, a tenth of a compilation.

    What a compilation leaves behind is collected as ever, once it is done.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
