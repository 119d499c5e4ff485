"""Eager mode through compiled operators: `stator.eager_ops.enable("aten", ["add.Tensor"])`.

Torch calls what is registered for the CPU: a builtin that finds a kernel by the arguments, in
native code.  Where there is none yet, one is taken from the disk or compiled; what cannot be
compiled runs as before, and is not tried again.
"""

from __future__ import annotations

import ctypes
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.library import Library, get_kernel

from stator.ahead import aot_compile
from stator.codegen.llvm.libraries import library_function
from stator.errors import OptionError, StatorWarning, Unsupported
from stator.options import cache_folder, level_limit, read_options
from stator.package.archive import LIBRARY, read_package
from stator.package.lookup import MOST_OUTPUTS, Operator
from stator.package.native import Container
from stator.package.operators import OperatorCache, described
from stator.package.tables import LEVELS
from stator.torch_api import (
    BEGIN_NUMBERS,
    END_NUMBERS,
    argument_types,
    is_composite,
    is_mutable_op,
    is_random_op,
    operator_named,
    pytree,
    result_types,
    returns_alias,
    unregister,
)

_LEVELS: Final = {"AVX512": 4, "AVX2": 3}
_NAME: Final = re.compile(r"\w+(\.\w+)*")
_NUMBER: Final = (bool, int, float, complex)
_TENSOR: Final = ("Tensor", "Optional[Tensor]")
_KINDS: Final = (torch.dtype, torch.device, torch.layout)  # no arguments of an exported program
# What operators call that torch has no derivatives of.
_CALLED: Final = {
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "batch_norm": "native_batch_norm",
    "linear": "addmm and mm",
    "matmul": "mm and bmm",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "conv3d": "convolution",
}
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
    # For one processor, so that compiling is short; others that share the folder have their own.
    best = level_limit(_LEVELS.get(torch.backends.cpu.get_cpu_capability(), 1))
    levels = (max((level for level in LEVELS if level <= best), default=min(LEVELS)),)
    wishes = {"levels": levels, **(options or {})}
    meta = described(args, kwargs)
    cache = _cache(ns, op_func_name_with_overload, device_type, wishes)
    found = cache.find(meta, wishes)
    if found is not None:
        return str(found)
    with cache.locked():
        found = cache.find(meta, wishes)  # by somebody else, meanwhile
        if found is None:
            found = cache.library(meta, wishes)
            chosen = {**wishes, "output_path": found}
            fixed = {name: value for name, value in kwargs.items() if isinstance(value, _KINDS)}
            asked = {name: value for name, value in kwargs.items() if name not in fixed}
            apart, named = pytree.tree_map(_apart, (tuple(args), asked))
            aot_compile(_Called(partial(f, **fixed)), apart, named, options=chosen)
            cache.add(meta, wishes, found)
        return str(found)


def _cache(ns: str, name: str, device: str, wishes: Mapping[str, Any]) -> OperatorCache:
    if _NAME.fullmatch(ns) is None or _NAME.fullmatch(name) is None:  # they become names of files
        raise OptionError(f"no operator is called {ns}::{name}", hint='as in "aten", "add.Tensor"')
    known = {key: value for key, value in wishes.items() if key in ("cache_dir",)}
    folder = cache_folder(read_options(None, known))
    return OperatorCache(folder / "aoti_eager" / ns / device, name)


def _apart(value: Any) -> Any:
    """A tensor as an object of its own: torch.export merges one that is given twice.

    The kernel of `op(x, x)` is that of `op(x, y)` too.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


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
    tried: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.operator = Operator(self.miss)

    def miss(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Arguments that the table does not have: find or compile their kernel, and run it."""
        if self._has_numbers(args):  # there is no kernel for each number: those run as before
            with _numbers_as_tensors():
                return self.original.call_boxed(keys, *args, **kwargs)
        result = self.original.call_boxed(keys, *args, **kwargs)  # or its error, and no more
        if not _busy.now:
            self._find(args, kwargs)
        return result

    def _has_numbers(self, args: tuple[Any, ...]) -> bool:
        """Whether numbers stand for tensors, as in `x + 1`."""
        kinds = argument_types(self.target)[: len(args)]
        return any(
            kind in _TENSOR and isinstance(arg, _NUMBER)
            for kind, arg in zip(kinds, args, strict=True)
        )

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Put a kernel for such arguments into the table, unless that was tried before."""
        if len(self.tried) >= MOST_KERNELS or _has_tensors(kwargs.values()):
            return
        try:
            key = repr((torch.get_default_dtype(), described(args, kwargs)))
        except TypeError:
            return
        if key in self.tried:
            return
        self.tried.add(key)
        try:
            container = self._container(args, kwargs)
            if container is not None:
                self.operator.add(args, kwargs, container)
        except Exception as error:
            warnings.warn(
                f"{self.name} runs as before for these arguments: {error}",
                StatorWarning,
                stacklevel=2,
            )

    def _container(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Container | None:
        """The kernel; None where not all that it returns is a tensor."""
        space, _, name = self.name.partition("::")
        with _busy.at_work(), torch.no_grad():
            path = aoti_compile_with_persistent_cache(
                space, name, "cpu", False, self.target, args, kwargs, options=self.options
            )
        package = read_package(Path(path))
        if self.target.name() in package.manifest["calls"]:  # it would come back to us, for ever
            raise Unsupported("package", "there is no kernel for them but torch's own")
        count = sum(isinstance(place, int) for place in package.manifest["outputs"])
        if count != len(package.manifest["outputs"]):
            return None
        return Container(package.files, LIBRARY, (package.file, package.start), count)


@contextmanager
def _numbers_as_tensors() -> Iterator[None]:
    """Let boxed calls make of numbers what eager makes of them: tensors that promote no further."""
    begin, end = _guard()
    guard = ctypes.c_bool()  # holds what was before
    begin(ctypes.byref(guard), True)
    try:
        yield
    finally:
        end(ctypes.byref(guard))


@cache
def _guard() -> tuple[Any, Any]:
    begin = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)
    end = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
    return begin(library_function(BEGIN_NUMBERS)), end(library_function(END_NUMBERS))


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
    if isinstance(operators, str):
        raise OptionError(f"operators cannot be {operators!r}", hint=f"give [{operators!r}]")
    targets = {name: _checked(ns, name) for name in operators}
    wishes = dict(options or {})
    with _lock:
        for name in targets:
            if f"{ns}::{name}" in _enabled and _enabled[f"{ns}::{name}"][0].options != wishes:
                raise OptionError(
                    f"{ns}::{name} is enabled with other options",
                    hint="call stator.eager_ops.disable() first",
                )
        for name, target in targets.items():
            full = f"{ns}::{name}"
            if full in _enabled:
                continue  # with the same options
            one = _Enabled(full, target, get_kernel(target, "CPU"), wishes)
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
        only_calls = is_composite(target)
    except (AttributeError, RuntimeError) as error:  # torch's, of one that is not dispatched
        raise OptionError(
            f"there is no operator {ns}::{name}", hint='name its overload, as in "add.Tensor"'
        ) from error
    if is_mutable_op(target) or returns_alias(target) or is_random_op(target):
        raise OptionError(
            f"{ns}::{name} writes to its arguments, returns one, or draws random numbers",
            hint="operators that compute new tensors of their arguments alone can be compiled",
        )
    if only_calls:
        raise OptionError(
            f"{ns}::{name} only calls other operators, whose derivatives autograd knows",
            hint=f"enable {_CALLED.get(name.partition('.')[0], 'those that it calls')} instead",
        )
    results = result_types(target)
    if set(results) != {"Tensor"} or len(results) > MOST_OUTPUTS:
        raise OptionError(
            f"{ns}::{name} returns {', '.join(results) or 'nothing'}",
            hint=f"operators that return 1 to {MOST_OUTPUTS} tensors, in no list, can be compiled",
        )
    return target
