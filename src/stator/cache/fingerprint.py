"""What identifies a compilation: the captured graph, its inputs, the state around it, the machine.

Names, not addresses: the same program gives the same parts in every process, for every user, from
every folder, whatever its variables are called.  Where the graph calls what its text does not tell
(a function of the user's), there is no key, and the reason says so.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx

from stator.cache.key import Key
from stator.graph.registry import registered_versions
from stator.graph.verify import user_line
from stator.options import Options
from stator.torch_api import (
    SYMBOLIC_TYPES,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TracingContext,
    compile_state,
    fake_inputs,
    is_traceable_wrapper_subclass,
    size_range,
)

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCHS: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MODULES: Final = ("torch", "math", "operator", "_operator", "builtins")
_OPERATORS: Final = (
    "aten",
    "prims",
    "prim",
    "mkldnn",
    "higher_order",
    "inductor",
    "profiler",
    "quantized_decomposed",
)
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


def fingerprint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    lines: Mapping[fx.Node, str],
    weights: Iterable[int] = (),
) -> Key:
    """The key of compiling a captured graph, whose nodes have `lines`; NoKey if there is none."""
    return Key.of(
        {
            "graph": _digest(graph_text(module, lines)),
            "inputs": _digest([*input_text(module, inputs), f"weights {sorted(weights)}"]),
            "state": compile_state(),
            "options": _options_text(options),
            "passes": _passes_text(),
            "stator": own_code(),
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "llvmlite": _llvmlite(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "machine": _machine(),
            "gpu": _gpus(inputs),
        }
    )


def user_lines(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The line of the user's program that each node came from, where that is known."""
    parts = (part for part in module.modules() if isinstance(part, fx.GraphModule))
    found = ((node, user_line(node)) for part in parts for node in part.graph.nodes)
    return {node: line for node, line in found if line is not None}


# --- the graph ---


def graph_text(module: fx.GraphModule, lines: Mapping[fx.Node, str]) -> Iterator[str]:
    """A line for each node, the graphs inside of graphs included.

    Of the user's lines it tells which nodes share one: what is stored names them by number.
    """
    numbers = {line: number for number, line in enumerate(dict.fromkeys(lines.values()))}
    return _graph_text(module, {node: numbers[line] for node, line in lines.items()})


def _graph_text(module: fx.GraphModule, lines: Mapping[fx.Node, int]) -> Iterator[str]:
    names = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    held: dict[str, int] = {}  # attributes, in the order in which they are read
    for node in module.graph.nodes:
        given = f"({_text(node.args, names)}, {_text(node.kwargs, names)})"
        yield f"{names[node]} = {node.op} {_target(node, held)}{given} line {lines.get(node)}"
        if node.op == "get_attr":
            yield from (f"  {line}" for line in _held_text(module, node, lines))


def _held_text(
    module: fx.GraphModule, node: fx.Node, lines: Mapping[fx.Node, int]
) -> Iterator[str]:
    """What stands under an attribute of the graph's."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if isinstance(value, fx.GraphModule):
        if value.meta:  # a policy of the user's for checkpoints, say
            raise NoKey(f"{node.name} has notes: {', '.join(map(str, value.meta))}")
        yield from _graph_text(value, lines)
    elif isinstance(value, torch.Tensor):
        yield f"{_tensor(value)} {_history(value)}"
    else:
        raise NoKey(f"{node.name} holds a {type(value).__name__}")


def _target(node: fx.Node, held: dict[str, int]) -> str:
    match node.op:
        case "call_module":
            raise NoKey(f"{node.name} calls a module, whose code the graph does not show")
        case "call_function":
            return _function(node.target)
        case "call_method":
            return str(node.target)
        case "get_attr":
            return str(held.setdefault(str(node.target), len(held)))
        case _:
            return ""  # the name of an input is the user's


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
    name = _place_of(target)
    if name is None:
        raise NoKey(f"{getattr(target, '__qualname__', target)} is a function of the user's")
    return name


def _place_of(target: Any) -> str | None:
    """Where torch or Python has a function; None if it is a function of somebody else's.

    What a function says of itself is not enough: functools.wraps copies it, and those that a
    function of torch's made all say the same (max_pool1d, max_pool2d).
    """
    own = target.__globals__["__name__"] if isinstance(target, FunctionType) else "builtins"
    module = getattr(target, "__module__", None)
    if module is None:  # a method of a class in C
        module = getattr(getattr(target, "__objclass__", None), "__module__", None)
    if not isinstance(module, str) or not _is_known(own) or not _is_known(module):
        return None
    for name in (getattr(target, "__qualname__", None), getattr(target, "__name__", None)):
        if isinstance(name, str) and _stands_at(target, module, name):
            return f"{module}.{name}"
    if isinstance(target, FunctionType) and target.__closure__ is None:
        return f"{own}.{target.__code__.co_qualname}"  # made inside of a function, knows nothing
    return None


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _MODULES


def _stands_at(target: Any, module: str, name: str) -> bool:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return type(value) is type(target) and bool(value == target)


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument, unambiguously."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, SYMBOLIC_TYPES):
        return f"symbolic {value}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, _TORCHS):
        return str(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_text(item, names) for item in value)})"
    if isinstance(value, dict):
        pairs = (f"{_text(key, names)}: {_text(item, names)}" for key, item in value.items())
        return f"dict({', '.join(pairs)})"
    if isinstance(value, slice):
        return f"slice({_text((value.start, value.stop, value.step), names)})"
    if callable(value):
        return _function(value)
    raise NoKey(f"an argument is a {type(value).__name__}")


# --- the inputs ---


def input_text(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """A line for each input: its type, and for a tensor how it lies.  Then what sizes obey."""
    conditions: list[str] = []
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, inputs, strict=True):
        value = node.meta.get("example_value", given)
        if isinstance(given, torch.Tensor):
            yield f"{_tensor(_as_it_came(module, given, value))} {_history(given)}"
        elif isinstance(value, SYMBOLIC_TYPES):
            yield f"symbolic {value} {size_range(value)}"
            conditions = conditions or _conditions(value)  # all sizes have one environment
        else:
            yield _text(value, {})
    yield from conditions


def _conditions(size: Any) -> list[str]:
    """What Dynamo found sizes to obey: the compiler may build on it."""
    return sorted({str(guard.expr) for guard in size.node.shape_env.guards})


def _as_it_came(module: fx.GraphModule, given: torch.Tensor, example: Any) -> Any:
    """The tensor with its symbolic sizes.

    Dynamo's example has seen the whole program, and may lie otherwise by now (`x.data = y`).
    """
    context = TracingContext.try_get()
    known = None if context is None else context.tensor_to_context.get(given)
    dynamic = () if known is None else getattr(known, "dynamic_sizes", ())
    if all(size.name == "STATIC" for size in dynamic) and not _symbolic_numbers(example):
        return given
    (fresh,), _ = fake_inputs([given])
    return fresh


def _symbolic_numbers(value: Any) -> list[Any]:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    numbers = [*value.size(), *value.stride(), value.storage_offset()] if strided else []
    return [number for number in numbers if isinstance(number, SYMBOLIC_TYPES)]


def _history(value: torch.Tensor) -> str:
    leaf = f"{type(value).__name__} leaf={value.is_leaf} grad={value.requires_grad}"
    return f"{leaf} inference={value.is_inference()}"


def _tensor(value: torch.Tensor) -> str:
    if is_traceable_wrapper_subclass(value):
        raise NoKey(f"a tensor is a {type(value).__name__}")
    if value.layout is not torch.strided:
        return f"{value.layout} {value.dtype} {tuple(value.size())} {value.device}"
    numbers = [*value.size(), *value.stride(), value.storage_offset()]
    ranges = [size_range(n) for n in _symbolic_numbers(value)]
    flags = f"conj={value.is_conj()} neg={value.is_neg()}"
    return (
        f"{value.dtype} {value.dim()} {[str(n) for n in numbers]} {ranges} {value.device} {flags}"
    )


# --- the rest of the world ---


@cache
def own_code() -> str:
    """All of our own source: any change may change what is compiled."""
    folder = Path(__file__).parent.parent
    files = sorted(file for kind in ("*.py", "*.ll") for file in folder.rglob(kind))
    texts = ((str(file.relative_to(folder)), file.read_bytes()) for file in files if file.is_file())
    return _digest(f"{name} {hashlib.sha256(text).hexdigest()}" for name, text in texts)


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


def _gpus(inputs: Sequence[Any]) -> str:
    """The cards that hold inputs, and what compiles for them."""
    devices = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda}
    if not devices:
        return "none"
    try:
        compiler = version("triton")
    except PackageNotFoundError:
        compiler = "none"
    cards = (f"{d}: {torch.cuda.get_device_properties(d)}" for d in sorted(devices, key=str))
    return f"{'; '.join(cards)}; triton {compiler}"


def _llvmlite() -> str:
    try:
        return version("llvmlite")
    except PackageNotFoundError as error:
        raise NoKey("llvmlite is not installed") from error


def _options_text(options: Options) -> str:
    keyed = [part.name for part in fields(Options) if part.metadata.get("keyed", True)]
    values = {name: getattr(options, name) for name in keyed}
    values["skip"] = sorted({*options.skip})  # the order of names has no meaning
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _passes_text() -> str:
    versions = registered_versions()
    if versions is None:
        raise NoKey("a registered pass has no source; register it with a version")
    return "; ".join(versions)


def _digest(lines: Iterable[str]) -> str:
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode())
        total.update(b"\0")
    return total.hexdigest()
