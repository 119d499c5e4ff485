"""Every switch there is; the only reader of the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from stator.errors import OptionError

# Fields with this metadata do not change what is compiled, so a cache key leaves them out.
UNKEYED: Final[Mapping[str, Any]] = {"keyed": False}

MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "reduce-overhead": {},  # CUDA graphs: nothing to change on a CPU
    "max-autotune": {},  # tuned GPU kernels: nothing to change on a CPU
    "max-autotune-no-cudagraphs": {},
}


EXECUTORS: Final = ("native", "python")


@dataclass(frozen=True, slots=True)
class Options:
    """Every switch there is.  A field marked UNKEYED stays out of the cache key."""

    strict: bool = False  # raise CompileError where a graph would fall back to eager
    kernels: bool = True  # fuse operators into native CPU kernels; off: torch runs them all
    executor: str = "native"  # what runs between kernels: "native" code, or "python" for debugging
    fallback_random: bool = False  # with kernels: eager's own random bits, drawn by torch
    verify: bool = True  # check every graph after every pass
    skip: tuple[str, ...] = ()  # names of passes to leave out
    fuel: int | None = None  # how many rewrites may fire; None: all
    dump_dir: Path | None = field(default=None, metadata=UNKEYED)  # text of every stage goes here


def list_options() -> dict[str, Any]:
    """Every option with its default."""
    defaults = Options()
    return {f.name: getattr(defaults, f.name) for f in fields(Options)}


def read_options(
    mode: str | None = None, options: Mapping[str, Any] | Options | None = None
) -> Options:
    """What `mode` and `options` of torch.compile mean, over what the environment says."""
    if mode is not None and mode not in MODES:
        raise OptionError(f"unknown mode {mode!r}", hint=_suggest(str(mode), tuple(MODES)))
    if isinstance(options, Options):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options cannot be {options!r}", hint="give a dict of names and values")
    given: dict[str, Any] = {**_from_environment(), **MODES[mode or "default"], **(options or {})}
    known = list_options()
    for name in given:
        if name not in known:
            raise OptionError(f"unknown option {name!r}", hint=_suggest(str(name), tuple(known)))
    return replace(Options(), **{name: _checked(name, value) for name, value in given.items()})


def _from_environment() -> dict[str, Any]:
    dump = os.environ.get("STATOR_DUMP")
    return {"dump_dir": dump} if dump else {}


def _suggest(wrong: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"{nearest}there are: {', '.join(sorted(known))}"


def _checked(name: str, value: Any) -> Any:
    """`value` in the type of the field, or an error that says which it wants."""
    if name == "dump_dir":
        if value is None or isinstance(value, str | Path):
            return None if value is None else Path(value)
        raise _wrong_type(name, value, "a path")
    if name == "skip":
        listed = isinstance(value, tuple | list | set | frozenset)
        if not listed or not all(isinstance(item, str) for item in value):
            raise _wrong_type(name, value, "a tuple of pass names")
        return tuple(value)
    if name == "executor":
        if value not in EXECUTORS:
            raise _wrong_type(name, value, " or ".join(map(repr, EXECUTORS)))
        return value
    if name == "fuel":
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise _wrong_type(name, value, "a count, or None")
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")
    return value


def _wrong_type(name: str, value: Any, wanted: str) -> OptionError:
    return OptionError(
        f"option {name!r} cannot be {value!r}",
        hint=f"give {wanted}; the default is {list_options()[name]!r}",
    )
