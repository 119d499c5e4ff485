"""Every switch there is; the only reader of the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
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
CHECKS: Final = ("graphs", "values")  # what is verified after a pass


@dataclass(frozen=True, slots=True)
class Options:
    """Every switch there is.  A field marked UNKEYED stays out of the cache key."""

    strict: bool = False  # raise CompileError where a graph would fall back to eager
    kernels: bool = True  # fuse operators into native CPU kernels; off: torch runs them all
    executor: str = "native"  # what runs between kernels: "native" code, or "python" for debugging
    fallback_random: bool = False  # with kernels: eager's own random bits, drawn by torch
    verify: bool = True  # check every graph after every pass
    verify_passes: str = "graphs"  # "values": also run each graph before and after each pass
    skip: tuple[str, ...] = ()  # names of passes and rules to leave out
    fuel: int | None = None  # how many rewrites may fire; None: all
    fuel_log: Path | None = field(default=None, metadata=UNKEYED)  # each rewrite is written here
    cache: bool = field(default=True, metadata=UNKEYED)  # keep programs for other processes
    cache_dir: Path | None = field(default=None, metadata=UNKEYED)  # where; None: the user's folder
    cache_limit: int = field(default=2 << 30, metadata=UNKEYED)  # bytes it may take
    remote_cache: str | None = field(default=None, metadata=UNKEYED)  # URL of a shared folder
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
    """STATOR_DUMP, STATOR_CACHE (0: off), _CACHE_DIR, _REMOTE_CACHE, _FUEL, _FUEL_LOG."""
    names = {"STATOR_DUMP": "dump_dir", "STATOR_CACHE_DIR": "cache_dir"}
    names |= {"STATOR_REMOTE_CACHE": "remote_cache", "STATOR_FUEL_LOG": "fuel_log"}
    told: dict[str, Any] = {
        option: os.environ[name] for name, option in names.items() if os.environ.get(name)
    }
    if fuel := os.environ.get("STATOR_FUEL"):
        told["fuel"] = int(fuel) if fuel.isdecimal() else fuel  # the latter is refused
    return {**told, "cache": False} if os.environ.get("STATOR_CACHE") == "0" else told


def environment_for(fuel: int | None, log: Path) -> dict[str, str]:
    """The environment of a process whose rewrites are limited, and written down."""
    others = {name: value for name, value in os.environ.items() if name != "STATOR_FUEL"}
    limit = {} if fuel is None else {"STATOR_FUEL": str(fuel)}
    return {**others, **limit, "STATOR_FUEL_LOG": str(log), "STATOR_CACHE": "0"}


def cache_folder(options: Options) -> Path:
    """Where compiled programs are kept."""
    if options.cache_dir is not None:
        return options.cache_dir
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stator"


def _suggest(wrong: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"{nearest}there are: {', '.join(sorted(known))}"


def _checked(name: str, value: Any) -> Any:
    """`value` in the type of the field, or an error that says which it wants."""
    wanted, accepts = _WANTED.get(name, ("True or False", lambda given: isinstance(given, bool)))
    if not accepts(value):
        raise _wrong_type(name, value, wanted)
    if name == "skip":
        return tuple(value)
    return Path(value) if name in _PATHS and value is not None else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_names(value: Any) -> bool:
    listed = isinstance(value, tuple | list | set | frozenset)
    return listed and all(isinstance(item, str) for item in value)


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, str | Path)


# What an option wants, in words, and whether a value is that; the others are switches.
_WANTED: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "executor": (" or ".join(map(repr, EXECUTORS)), lambda value: value in EXECUTORS),
    "verify_passes": (" or ".join(map(repr, CHECKS)), lambda value: value in CHECKS),
    "skip": ("a tuple of pass names", _are_names),
    "fuel": ("a count, or None", lambda value: value is None or _is_count(value)),
    "cache_dir": ("a path", _is_path),
    "cache_limit": ("a count of bytes", _is_count),
    "remote_cache": ("a URL, or None", lambda value: value is None or _is_url(value)),
    "dump_dir": ("a path", _is_path),
    "fuel_log": ("a path", _is_path),
}
_PATHS: Final = ("dump_dir", "cache_dir", "fuel_log")


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _wrong_type(name: str, value: Any, wanted: str) -> OptionError:
    return OptionError(
        f"option {name!r} cannot be {value!r}",
        hint=f"give {wanted}; the default is {list_options()[name]!r}",
    )
