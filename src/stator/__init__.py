"""Stator: a compiler for PyTorch programs.  `torch.compile(model, backend="stator")`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stator.ahead import aot_compile as aot_compile
    from stator.ahead import aot_compile_joint as aot_compile_joint
    from stator.ahead import compile_fx_aot as compile_fx_aot
    from stator.backend import compile as compile
    from stator.backend import compile_fx as compile_fx
    from stator.core.events import last_compilation as last_compilation
    from stator.debug.compilers import backend_of as backend_of
    from stator.debug.compilers import check_compile as check_compile
    from stator.debug.compilers import debug_compile as debug_compile
    from stator.debug.compilers import draw_compile as draw_compile
    from stator.debug.compilers import draw_graph as draw_graph
    from stator.debug.compilers import dump_compile as dump_compile
    from stator.debug.compilers import nop as nop
    from stator.debug.compilers import print_compile as print_compile
    from stator.debug.explain import explain as explain
    from stator.debug.memory_plan import memory_plan as memory_plan
    from stator.debug.minify.minifier import minifier as minifier
    from stator.debug.torchscript import ts_compile as ts_compile
    from stator.eager_ops import (
        aoti_compile_with_persistent_cache as aoti_compile_with_persistent_cache,
    )
    from stator.freezing import freeze as freeze
    from stator.freezing import fw_compiler_freezing as fw_compiler_freezing
    from stator.freezing import update_weights as update_weights
    from stator.functions import aot_function as aot_function
    from stator.functions import aot_module as aot_module
    from stator.graph.rules import Rewrite as Rewrite
    from stator.graph.rules import rule as rule
    from stator.options import Options as Options
    from stator.options import list_options as list_options
    from stator.package.load import load as load
    from stator.partitioners import choose_saved_values_set as choose_saved_values_set
    from stator.partitioners import (
        min_cut_rematerialization_partition as min_cut_rematerialization_partition,
    )
    from stator.runtime.native.prelude import memory as memory
    from stator.runtime.native.prelude import trim as trim

__version__ = "0.1.0"

# Where each public name lives.  They load when first used, so that `import stator` costs nothing.
_HOMES: Final[dict[str, str]] = {
    "Options": "stator.options",
    "aot_compile": "stator.ahead",
    "aot_compile_joint": "stator.ahead",
    "aot_function": "stator.functions",
    "aot_module": "stator.functions",
    "aoti_compile_with_persistent_cache": "stator.eager_ops",
    "choose_saved_values_set": "stator.partitioners",
    "compile": "stator.backend",
    "compile_fx": "stator.backend",
    "compile_fx_aot": "stator.ahead",
    "backend_of": "stator.debug.compilers",
    "check_compile": "stator.debug.compilers",
    "debug_compile": "stator.debug.compilers",
    "draw_compile": "stator.debug.compilers",
    "draw_graph": "stator.debug.compilers",
    "dump_compile": "stator.debug.compilers",
    "nop": "stator.debug.compilers",
    "print_compile": "stator.debug.compilers",
    "ts_compile": "stator.debug.torchscript",
    "explain": "stator.debug.explain",
    "freeze": "stator.freezing",
    "fw_compiler_freezing": "stator.freezing",
    "last_compilation": "stator.core.events",
    "list_options": "stator.options",
    "Rewrite": "stator.graph.rules",
    "load": "stator.package.load",
    "memory": "stator.runtime.native.prelude",
    "memory_plan": "stator.debug.memory_plan",
    "minifier": "stator.debug.minify.minifier",
    "min_cut_rematerialization_partition": "stator.partitioners",
    "rule": "stator.graph.rules",
    "trim": "stator.runtime.native.prelude",
    "update_weights": "stator.freezing",
}

_MODULES: Final = ("cache", "eager_ops", "passes", "patterns")  # public as they are

__all__ = [*sorted(_HOMES), "__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"stator.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'stator' has no attribute {name!r}; it has {sorted(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
