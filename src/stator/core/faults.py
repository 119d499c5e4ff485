"""Hooks by which a test puts a bug into the compiler, at places that have names.

A debugger is tested with bugs, and the compiler should have none.  So a test brings its own: a
function of what passes through a place, which returns what goes on from there, raises or never
ends.  It triggers on what it finds there (an operator, a pattern, a symbol), like a bug would.

Places, and what the function is given beside the value that passes:

    pass     how many changes a pass made; its name, the graph, the fuel for rewrites
    rule     the right side of a rule that matched; its name, the builder, what was bound
    lower    the value that an operator became; its node
    layout   strides and type of a tensor that kernels write; its node
    kernel   the LLVM text of a kernel; the kernel

A place costs one question while no fault is set: `if faults.SET`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from stator.options import wanted_fault

PLACES: Final = ("pass", "rule", "lower", "layout", "kernel")

Fault = Callable[..., Any]

_LATER: Final = "from the environment"  # as a place: whatever is named there is not loaded yet
SET: Final[dict[str, list[Fault]]] = {}  # by place; empty: nobody asks any further

if wanted_fault() is not None:
    SET[_LATER] = []


def strike(place: str, value: Any, *about: Any) -> Any:
    """What goes on from a place: `value`, or what the faults that are set there make of it."""
    if _LATER in SET:
        _load()
    for fault in SET.get(place, ()):
        value = fault(value, *about)
    return value


def set_fault(place: str, fault: Fault) -> None:
    """Let a fault strike at a place for the rest of the process."""
    if place not in PLACES:
        raise ValueError(f"there is no place {place!r}; there are: {', '.join(PLACES)}")
    SET.setdefault(place, []).append(fault)


@contextmanager
def fault(place: str, function: Fault) -> Iterator[None]:
    """Let a fault strike at a place meanwhile."""
    set_fault(place, function)
    try:
        yield
    finally:
        SET[place].remove(function)
        if not SET[place]:
            del SET[place]


def _load() -> None:
    """Call the function that the environment names: it sets faults.

    Not before something asks: the module that it is in may import the compiler.
    """
    del SET[_LATER]
    module, _, rest = str(wanted_fault()).partition(":")
    name, *arguments = rest.split(":")
    getattr(import_module(module), name)(*arguments)
