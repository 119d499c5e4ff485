"""Every switch there is; the only reader of the environment."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from stator.errors import OptionError

# Fields with this metadata do not change what is compiled, so a cache key leaves them out.
UNKEYED: Final[Mapping[str, Any]] = {"keyed": False}

MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True, "tune": True},
    "max-autotune-no-cudagraphs": {"tune": True},
}


CODEGENS: Final = ("auto", "triton")
EXECUTORS: Final = ("native", "python")
CHECKS: Final = ("graphs", "values")  # what is verified after a pass
FUELS: Final = ("fuel", "pass_fuel", "kernel_fuel")  # what can be counted and stopped
NUMERICS: Final = ("fast", "eager")  # whose bits kernels give
COSTS: Final = ("flops", "profile")  # where costs of recomputing come from
KNAPSACKS: Final = ("dp", "ilp", "greedy")  # what fills a memory budget
# Subjects of the log, each with a logger of its own: stator.stages, …
LOGS: Final = (
    *("stages", "passes", "partition", "fusion", "calls", "kernels", "memory", "cache"),
    "recordings",
)


@dataclass(frozen=True, slots=True)
class Options:
    """Every switch there is.  A field marked UNKEYED stays out of the cache key."""

    strict: bool = False  # raise CompileError where a graph would fall back to eager
    kernels: bool = True  # fuse operators into native CPU kernels; off: torch runs them all
    codegen: str = "auto"  # "triton": kernels as for a GPU, by its interpreter where there is none
    executor: str = "native"  # what runs between kernels: "native" code, or "python" for debugging
    numerics: str = "fast"  # "eager": eager's own bits; operators whose kernels differ are calls
    fallback_random: bool = False  # with kernels: eager's own random bits, drawn by torch
    cuda_graphs: bool = False  # on a GPU: calls are recorded, and replayed without starting kernels
    tune: bool = False  # on a GPU: kernels in the shapes that are measured to be the quickest
    verify: bool | str = True  # check graphs after passes; "kernels": each kernel beside eager too
    verify_passes: str = "graphs"  # "values": also run each graph before and after each pass
    skip: tuple[str, ...] = ()  # names of passes and rules to leave out
    fuel: int | None = None  # how many rewrites may fire; None: all
    pass_fuel: int | None = None  # how many passes may run; None: all
    kernel_fuel: int | None = None  # how many operators may become kernels; None: all
    fuel_log: Path | None = field(default=None, metadata=UNKEYED)  # each rewrite is written here
    freezing: bool = False  # inference: weights are constants, folded and packed once
    discard_parameters: bool = False  # with freezing: weights are given back once they are packed
    pack_weights: bool = True  # inference: weights are packed at their first use, and when changed
    memory_budget: float = 1.0  # share of the usual that the backward may keep of the forward
    memory_limit: int | str | None = None  # bytes that a step may hold at once, or "8GiB"
    aggressive_recomputation: bool = False  # compute all again that kernels can
    save_policy: Callable[..., str | None] | None = None  # of a node: "save", "recompute" or None
    recompute_costs: str = "flops"  # of library calls: by "flops", or by "profile", measured
    knapsack: str = "dp"  # what fills a budget: "dp", "ilp" (exact) or "greedy"
    explain_memory: bool = False  # note on the record what the backward keeps, and what else
    cache: bool = field(default=True, metadata=UNKEYED)  # keep programs for other processes
    cache_dir: Path | None = field(default=None, metadata=UNKEYED)  # where; None: the user's folder
    cache_limit: int = field(default=2 << 30, metadata=UNKEYED)  # bytes it may take
    remote_cache: str | None = field(default=None, metadata=UNKEYED)  # URL of a shared folder
    dump_dir: Path | None = field(default=None, metadata=UNKEYED)  # text of every stage goes here
    explain: bool = field(default=False, metadata=UNKEYED)  # note all that an explanation tells
    profile_ranges: bool = False  # torch.profiler sees each kernel and call, with the user's line
    logs: tuple[str, ...] = field(default=(), metadata=UNKEYED)  # subjects to log: "fusion", …
    progress: bool = field(default=True, metadata=UNKEYED)  # a bar while compiling takes long

    @property
    def has_eager_bits(self) -> bool:
        """Whether results are to be eager's, bit for bit."""
        return self.numerics == "eager"

    @property
    def draws_as_eager(self) -> bool:
        """Whether random numbers are eager's own."""
        return self.fallback_random or not self.kernels or self.has_eager_bits

    @property
    def saves_memory(self) -> bool:
        """Whether less memory is asked for, rather than less time."""
        return self.memory_budget < 1 or self.memory_limit is not None


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
        return _checked_whole(options)
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options cannot be {options!r}", hint="give a dict of names and values")
    given: dict[str, Any] = {**_from_environment(), **MODES[mode or "default"], **(options or {})}
    known = list_options()
    for name in given:
        if name not in known:
            raise OptionError(f"unknown option {name!r}", hint=_suggest(str(name), tuple(known)))
    chosen = replace(Options(), **{name: _checked(name, value) for name, value in given.items()})
    refuse_contradictions(chosen)
    if "memory_budget" in given or not chosen.kernels or _other_wishes(chosen):
        return chosen
    return replace(chosen, memory_budget=torchs_budget())


def _checked_whole(options: Options) -> Options:
    """Options that somebody made: whoever made them checked nothing."""
    given = {field.name: getattr(options, field.name) for field in fields(Options)}
    checked = {name: _checked(name, value) for name, value in given.items()}
    chosen = options if checked == given else replace(options, **checked)
    refuse_contradictions(chosen)
    return chosen


def torchs_budget() -> float:
    """What torch's own setting lets a backward keep, as a share of the usual."""
    from stator.torch_api import functorch_config  # whoever looks into a cache needs no torch

    budget = functorch_config.activation_memory_budget
    return float(_checked("memory_budget", budget))


def refuse_contradictions(options: Options) -> None:
    """Raise where of two options one would have to be ignored."""
    wishes = _other_wishes(options)
    if options.memory_budget < 1:
        wishes = (f"memory_budget={options.memory_budget}", *wishes)
    if len(wishes) > 1:
        raise OptionError(
            f"{' and '.join(wishes)} contradict each other",
            hint="say how much memory a step may take in one way: a share, a limit, or as "
            "little as kernels allow",
        )
    if wishes and not options.kernels:
        raise OptionError(
            f"{wishes[0]} without kernels",
            hint="kernels=False keeps what eager keeps; leave one of the two out",
        )


def _other_wishes(options: Options) -> tuple[str, ...]:
    """What is asked of memory beside a budget."""
    limit = (f"memory_limit={options.memory_limit}",) if options.memory_limit is not None else ()
    return (*limit, "aggressive_recomputation") if options.aggressive_recomputation else limit


def _from_environment() -> dict[str, Any]:
    """STATOR_DUMP, _CACHE (0: off), _CACHE_DIR, _REMOTE_CACHE, _…FUEL, _EXPLAIN…, _LOGS, …"""
    names = {"STATOR_DUMP": "dump_dir", "STATOR_CACHE_DIR": "cache_dir"}
    names |= {"STATOR_REMOTE_CACHE": "remote_cache", "STATOR_FUEL_LOG": "fuel_log"}
    told: dict[str, Any] = {
        option: os.environ[name] for name, option in names.items() if os.environ.get(name)
    }
    for option in FUELS:
        if fuel := os.environ.get(f"STATOR_{option.upper()}"):
            told[option] = int(fuel) if fuel.isdecimal() else fuel  # the latter is refused
    if executor := os.environ.get("STATOR_EXECUTOR"):
        told["executor"] = executor
    for option in ("explain", "explain_memory"):
        if os.environ.get(f"STATOR_{option.upper()}") == "1":
            told[option] = True
    if logs := os.environ.get("STATOR_LOGS"):
        told["logs"] = tuple(name.strip() for name in logs.split(",") if name.strip())
    return {**told, "cache": False} if os.environ.get("STATOR_CACHE") == "0" else told


def environment_for(
    fuel: int | None, log: Path, limits: Mapping[str, int | str] | None = None
) -> dict[str, str]:
    """The environment of a process whose rewrites are limited, and written down.

    `limits` are further options that the environment can say, by name.
    """
    told = {name: None for name in (*FUELS, "executor")} | {"fuel": fuel, **(limits or {})}
    names = {f"STATOR_{name.upper()}": value for name, value in told.items()}
    others = {name: value for name, value in os.environ.items() if name not in names}
    limit = {name: str(value) for name, value in names.items() if value is not None}
    return {**others, **limit, "STATOR_FUEL_LOG": str(log), "STATOR_CACHE": "0"}


def explaining_environment() -> dict[str, str]:
    """The environment of a process whose compilations note all that an explanation tells."""
    return {**os.environ, "STATOR_EXPLAIN": "1"}


def eager_environment() -> dict[str, str]:
    """The environment of a process in which torch.compile leaves programs as they are."""
    return {**os.environ, "TORCH_COMPILE_DISABLE": "1"}


def wanted_fault() -> str | None:
    """STATOR_FAULT: `module:function:arguments`, by which a test puts a bug into the compiler."""
    return os.environ.get("STATOR_FAULT") or None


def level_limit(best: int) -> int:
    """The level of x86-64 that kernels may be for; libraries read it themselves, when loaded."""
    asked = os.environ.get("STATOR_LEVEL", "")
    return min(best, int(asked)) if asked.isdigit() else best


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
    if name in ("skip", "logs"):
        return tuple(value)
    if name == "memory_limit" and isinstance(value, str):
        return read_bytes(value)
    return Path(value) if name in _PATHS and value is not None else value


def read_bytes(text: str) -> int | None:
    """Bytes from words like "512 MiB", "8GiB" or "2e9"; None if they are no such thing."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None or found[1].count(".") > 1 or (found[3] and not found[2]):
        return None
    number, prefix, binary = found.groups()
    scale = (1024 if binary else 1000) ** " kmgt".index(prefix or " ")
    size = float(number) * scale if number != "." else math.inf
    return int(size) if math.isfinite(size) else None


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_limit(value: Any) -> bool:
    size = read_bytes(value) if isinstance(value, str) else value
    return value is None or (_is_count(size) and size != 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_names(value: Any) -> bool:
    listed = isinstance(value, tuple | list | set | frozenset)
    return listed and all(isinstance(item, str) for item in value)


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, str | Path)


# What an option wants, in words, and whether a value is that; the others are switches.
_WANTED: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "codegen": (" or ".join(map(repr, CODEGENS)), lambda value: value in CODEGENS),
    "executor": (" or ".join(map(repr, EXECUTORS)), lambda value: value in EXECUTORS),
    "verify": (
        "True, False or 'kernels'",
        lambda value: isinstance(value, bool) or value == "kernels",
    ),
    "verify_passes": (" or ".join(map(repr, CHECKS)), lambda value: value in CHECKS),
    "numerics": (" or ".join(map(repr, NUMERICS)), lambda value: value in NUMERICS),
    "skip": ("a tuple of pass names", _are_names),
    "memory_budget": ("a number from 0 (keep inputs alone) to 1 (the quickest way)", _is_share),
    "memory_limit": ('bytes: a count above 0, or words like "8GiB" or "512 MiB"', _is_limit),
    "save_policy": (
        "a function of a node, or None",
        lambda value: value is None or callable(value),
    ),
    "recompute_costs": (" or ".join(map(repr, COSTS)), lambda value: value in COSTS),
    "knapsack": (" or ".join(map(repr, KNAPSACKS)), lambda value: value in KNAPSACKS),
    "fuel": ("a count, or None", lambda value: value is None or _is_count(value)),
    "pass_fuel": ("a count, or None", lambda value: value is None or _is_count(value)),
    "kernel_fuel": ("a count, or None", lambda value: value is None or _is_count(value)),
    "cache_dir": ("a path", _is_path),
    "cache_limit": ("a count of bytes", _is_count),
    "remote_cache": ("a URL, or None", lambda value: value is None or _is_url(value)),
    "dump_dir": ("a path", _is_path),
    "logs": (
        f"a tuple of some of {', '.join(LOGS)}",
        lambda value: _are_names(value) and set(value) <= set(LOGS),
    ),
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
