"""What identifies a compilation: the captured graph, its inputs, the state around it, the machine.

Names, not addresses: the same program gives the same parts in every process, for every user, from
every folder.  Where the graph calls what its text does not tell (a function of the user's), there
is no key, and the reason says so.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from stator.cache.key import Key
from stator.graph.verify import user_line
from stator.options import Options
from stator.torch_api import (
    SYMBOLIC_TYPES,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    compile_state,
    is_traceable_wrapper_subclass,
    size_range,
)

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCHS: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MODULES: Final = ("torch", "math", "operator", "_operator", "builtins")
_OPERATORS: Final = ("aten", "prims", "prim", "mkldnn", "higher_order", "inductor", "profiler")
# Operators around graphs that the trace looks into: nothing of them is left.
_WRAPPERS: Final = (
    "autograd_function_apply",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
)


class NoKey(Exception):  # noqa: N818  says what it is
    """A program that its text does not identify."""


def fingerprint(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Key:
    """The key of compiling a captured graph; NoKey where there is none."""
    keyed = [part for part in fields(Options) if part.metadata.get("keyed", True)]
    return Key.of(
        {
            "graph": _digest(graph_text(module)),
            "inputs": _digest(input_text(module, inputs)),
            "state": compile_state(),
            "options": ", ".join(f"{part.name}={getattr(options, part.name)!r}" for part in keyed),
            "stator": _own_code(),
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "llvmlite": version("llvmlite"),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "machine": _machine(),
        }
    )


def user_lines(module: fx.GraphModule) -> list[str]:
    """The lines of the user's program that the graph came from, in their order."""
    found = (user_line(node) for graph in _modules(module) for node in graph.graph.nodes)
    return list(dict.fromkeys(line for line in found if line is not None))


def _modules(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (part for part in module.modules() if isinstance(part, fx.GraphModule))


# --- the graph ---


def graph_text(module: fx.GraphModule) -> Iterator[str]:
    """A line for each node, the graphs inside of graphs included."""
    for node in module.graph.nodes:
        target = _target(module, node)
        yield f"{node.name} = {node.op} {target}({_text(node.args)}, {_text(node.kwargs)})"
        if node.op == "get_attr":
            held = _attribute(module, str(node.target))
            if isinstance(held, fx.GraphModule):
                if held.meta:  # a policy of the user's for checkpoints, say
                    raise NoKey(f"{node.name} has notes: {', '.join(map(str, held.meta))}")
                yield from (f"  {line}" for line in graph_text(held))
            elif isinstance(held, torch.Tensor):
                yield f"  {_tensor(held)}"
            else:
                raise NoKey(f"{node.name} holds a {type(held).__name__}")


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        raise NoKey(f"{node.name} calls a module, whose code the graph does not show")
    return _function(node.target) if node.op == "call_function" else str(node.target)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _function(target: Any) -> str:
    """A function's name, if that tells what it does."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        space = str(target).partition(".")[0] if isinstance(target, OpOverload) else ""
        name = target.name() if isinstance(target, OpOverload) else str(target)
        if (space or name.partition(".")[0]) not in _OPERATORS:
            raise NoKey(f"{name} is an operator of the user's")
        return name
    if isinstance(target, HigherOrderOperator):
        if target.name() not in _WRAPPERS:
            raise NoKey(f"{target.name()} may hold more than its text shows")
        return f"higher_order {target.name()}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None and type(target).__name__ in (
        "builtin_function_or_method",
        "method_descriptor",
    ):
        module = "builtins"  # torch's C functions name no module
    if not isinstance(module, str) or module.split(".")[0] not in _MODULES or name is None:
        raise NoKey(f"{name or target} is a function of the user's")
    return f"{module}.{name}"


def _text(value: Any) -> str:
    """An argument, unambiguously."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, SYMBOLIC_TYPES):
        return f"symbolic {value}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, _TORCHS):
        return str(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())})"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if callable(value):
        return _function(value)
    raise NoKey(f"an argument is a {type(value).__name__}")


# --- the inputs ---


def input_text(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """A line for each input: its type, and for a tensor how it lies."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, inputs, strict=True):
        value = node.meta.get("example_value", given)
        if isinstance(value, torch.Tensor):
            leaf = f"{type(given).__name__} leaf={given.is_leaf} grad={given.requires_grad}"
            yield f"{_tensor(value)} {leaf} inference={given.is_inference()}"
        elif isinstance(value, SYMBOLIC_TYPES):
            yield f"symbolic {value} {size_range(value)}"
        else:
            yield _text(value)


def _tensor(value: torch.Tensor) -> str:
    if is_traceable_wrapper_subclass(value):
        raise NoKey(f"a tensor is a {type(value).__name__}")
    if value.layout is not torch.strided:
        return f"{value.layout} {value.dtype} {tuple(value.size())} {value.device}"
    numbers = [*value.size(), *value.stride(), value.storage_offset()]
    ranges = [size_range(n) for n in numbers if isinstance(n, SYMBOLIC_TYPES)]
    flags = f"conj={value.is_conj()} neg={value.is_neg()}"
    return (
        f"{value.dtype} {value.dim()} {[str(n) for n in numbers]} {ranges} {value.device} {flags}"
    )


# --- the rest of the world ---


@cache
def _own_code() -> str:
    """All of our own source: any change may change what is compiled."""
    folder = Path(__file__).parent.parent
    files = sorted((*folder.rglob("*.py"), *folder.rglob("*.ll")))
    return _digest(f"{file.relative_to(folder)}\n{file.read_text()}" for file in files)


@cache
def _machine() -> str:
    """What machine code is for: the processor and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    told = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return f"{sys.platform} {platform.machine()} {_digest(told)[:16]}"


def _digest(lines: Iterator[str] | Sequence[str] | dict[str, Any]) -> str:
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode())
        total.update(b"\0")
    return total.hexdigest()
