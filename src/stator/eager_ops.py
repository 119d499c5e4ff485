"""Eager mode through compiled operators: `stator.eager_ops.enable("aten", ["add.Tensor"])`.

Torch calls what is registered for the CPU: a builtin that finds a kernel by the arguments, in
native code.  Where there is none yet, one is taken from the disk or compiled; what cannot be
compiled runs as before, and is not tried again.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.library import Library, get_kernel

from stator.ahead import aot_compile
from stator.errors import OptionError, StatorWarning, Unsupported
from stator.options import cache_folder, read_options
from stator.package.archive import LIBRARY, read_package
from stator.package.lookup import Operator
from stator.package.native import Container
from stator.package.operators import OperatorCache, described
from stator.torch_api import (
    argument_types,
    is_mutable_op,
    is_random_op,
    operator_named,
    pytree,
    returns_alias,
    unregister,
)

_LEVELS: Final = {"AVX512": 4, "AVX2": 3}
_NUMBER: Final = (bool, int, float, complex)
_KINDS: Final = (torch.dtype, torch.device, torch.layout)  # no arguments of an exported program
MOST_KERNELS: Final = 1024  # of an operator: whoever has more kinds of arguments gains nothing


def aoti_compile_with_persistent_cache(
    ns: str,
    op_func_name_with_overload: str,
    device_type: str,
    dynamic: bool,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    remove_runtime_assertions: bool = False,
    disable_constraint_solver: bool = False,
) -> str:
    """Compile an operator for such arguments, once for all processes; the path of its package.

    Shapes are static.  `remove_runtime_assertions` and `disable_constraint_solver` speak of sizes
    that vary, and so have nothing to do here.
    """
    if dynamic or dynamic_shapes is not None:
        raise Unsupported(
            "package", "a cached operator has fixed sizes", hint="give dynamic=False, no shapes"
        )
    if device_type != "cpu":
        raise OptionError(f"device_type cannot be {device_type!r}", hint="give 'cpu'")
    wishes = dict(options or {})
    meta = described(args, kwargs)
    cache = _cache(ns, op_func_name_with_overload, device_type, wishes)
    found = cache.find(meta, wishes)
    if found is not None:
        return str(found)
    with cache.locked():
        found = cache.find(meta, wishes)  # by somebody else, meanwhile
        if found is None:
            found = cache.folder / "lib" / f"{cache.key(meta, wishes)}.pt2"
            levels = (_LEVELS.get(torch.backends.cpu.get_cpu_capability(), 1),)
            chosen = {"levels": levels, **wishes, "output_path": found}
            fixed = {name: value for name, value in kwargs.items() if isinstance(value, _KINDS)}
            asked = {name: value for name, value in kwargs.items() if name not in fixed}
            aot_compile(_Called(partial(f, **fixed)), tuple(args), asked, options=chosen)
            cache.add(meta, wishes, found)
        return str(found)


def _cache(ns: str, name: str, device: str, wishes: Mapping[str, Any]) -> OperatorCache:
    known = {key: value for key, value in wishes.items() if key in ("cache_dir",)}
    folder = cache_folder(read_options(None, known))
    return OperatorCache(folder / "aoti_eager" / ns / device, name)


class _Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class _Enabled:
    """An operator that is registered."""

    name: str  # with its namespace
    target: Any
    original: Any
    options: Mapping[str, Any]
    operator: Operator = field(init=False)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.operator = Operator(self.miss)

    def miss(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Arguments that the table does not have: find or compile their kernel, and run it."""
        given = self._with_tensors(args)
        if given is args and not _busy.now:
            self._find(args, kwargs)
        return self.original.call_boxed(keys, *given, **kwargs)

    def _with_tensors(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Numbers that stand for tensors, as in `x + 1`, as tensors that promote no further.

        There is no kernel for each number: those run as before.
        """
        kinds = argument_types(self.target)[: len(args)]
        numbers = [
            kind == "Tensor" and isinstance(arg, _NUMBER)
            for kind, arg in zip(kinds, args, strict=True)
        ]
        if not any(numbers):
            return args
        (first, *_) = (arg for arg in args if isinstance(arg, torch.Tensor))
        return tuple(
            torch.tensor(arg, dtype=torch.result_type(first, arg)) if is_number else arg
            for arg, is_number in zip(args, numbers, strict=True)
        )

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(self.operator.entries) < MOST_KERNELS and not _has_tensors(kwargs.values()):
            container = self._container(args, kwargs)
            if container is not None:
                self.operator.add(args, kwargs, container)

    def _container(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Container | None:
        try:
            key = repr(described(args, kwargs))
        except TypeError:
            return None
        if key in self.refused:
            return None
        space, _, name = self.name.partition("::")
        try:
            with _busy.at_work(), torch.no_grad():
                path = Path(
                    aoti_compile_with_persistent_cache(
                        space, name, "cpu", False, self.target, args, kwargs, options=self.options
                    )
                )
                package = read_package(path)
        except Exception as error:
            self.refused.add(key)
            warnings.warn(
                f"{self.name} runs as before for these arguments: {error}",
                StatorWarning,
                stacklevel=2,
            )
            return None
        count = sum(isinstance(place, int) for place in package.manifest["outputs"])
        if count != len(package.manifest["outputs"]):
            return None
        return Container(package.files, LIBRARY, (package.file, package.start), count)


def _has_tensors(values: Iterable[Any]) -> bool:
    """Whether a tensor is among named arguments: the table has those of numbers."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(list(values)))


class _Busy(threading.local):
    """Whether this thread compiles: what it calls meanwhile runs as before."""

    now = False

    @contextmanager
    def at_work(self) -> Any:
        """For a while."""
        self.now = True
        try:
            yield
        finally:
            self.now = False


_busy: Final = _Busy()
_enabled: Final[dict[str, tuple[_Enabled, Library]]] = {}
_lock: Final = threading.Lock()


def enable(
    ns: str,
    operators: Sequence[str],
    device: str = "cpu",
    *,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Let eager mode run operators by kernels that are compiled for their arguments and kept."""
    if device != "cpu":
        raise OptionError(f"device cannot be {device!r}", hint="give 'cpu'")
    targets = {name: _checked(ns, name) for name in operators}
    with _lock:
        for name, target in targets.items():
            full = f"{ns}::{name}"
            if full in _enabled:
                continue
            one = _Enabled(full, target, get_kernel(target, "CPU"), dict(options or {}))
            library = Library(ns, "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that torch's kernel is overridden
                library.impl(name, one.operator.function, "CPU", with_keyset=True)
            _enabled[full] = (one, library)


def disable() -> None:
    """Let eager mode run as before."""
    with _lock:
        for _, library in _enabled.values():
            unregister(library)
        _enabled.clear()


def _checked(ns: str, name: str) -> Any:
    try:
        target = operator_named(f"{ns}::{name}")
    except AttributeError as error:
        raise OptionError(
            f"there is no operator {ns}::{name}", hint='name its overload, as in "add.Tensor"'
        ) from error
    if is_mutable_op(target) or returns_alias(target) or is_random_op(target):
        raise OptionError(
            f"{ns}::{name} writes to its arguments, returns one, or draws random numbers",
            hint="operators that compute new tensors of their arguments alone can be compiled",
        )
    return target
