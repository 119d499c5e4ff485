"""Collections and frames of Python's stack stay out of a compilation's way."""

from __future__ import annotations

import gc
import platform
import resource
import sys
from collections.abc import Callable

import pytest

from stator.core.undisturbed import undisturbed, with_room

CALLS = 2000
FRAME = 110  # words, about a kilobyte
DEPTHS = 24  # of such frames: more than CPython's piece of 16 KiB holds


def called_often() -> int:
    """Pages that are faulted in by a loop of calls."""

    def nothing() -> None:
        pass

    nothing.__code__ = nothing.__code__.replace(co_stacksize=FRAME)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(count: int, function: Callable[[], int]) -> int:
    """What `function` gives below so many frames of a kilobyte each."""
    return function() if count == 0 else at_depth(count - 1, function)


at_depth.__code__ = at_depth.__code__.replace(co_stacksize=FRAME)


@pytest.mark.skipif(platform.python_implementation() != "CPython", reason="of CPython's frames")
def test_at_no_depth_of_the_caller_do_calls_map_memory() -> None:
    roomy = [at_depth(count, with_room(called_often)) for count in range(DEPTHS)]

    assert max(roomy) < CALLS / 10


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="later Pythons may keep their pieces")
@pytest.mark.skipif(platform.python_implementation() != "CPython", reason="of CPython's frames")
def test_without_room_they_do_at_some_depth() -> None:
    assert max(at_depth(count, called_often) for count in range(DEPTHS)) >= CALLS


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_behind(was_on: bool) -> None:
    @undisturbed
    def fails() -> None:
        assert not gc.isenabled()
        raise ValueError("inside")

    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="inside"):
            fails()
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_it_is_called_as_the_function_is() -> None:
    @undisturbed
    def product(x: int, *, by: int = 2) -> int:
        """x * by"""
        return x * by

    assert (product(3), product(3, by=5), product.__doc__) == (6, 15, "x * by")
