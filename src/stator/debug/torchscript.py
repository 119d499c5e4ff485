"""A graph through TorchScript: another compiler, for comparison, on the CPU and on GPUs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from stator.core.torch_types import Boxed
from stator.errors import CompileError
from stator.torch_api import (
    OpOverload,
    is_fake,
    pytree,
    remove_script_mutation,
    script_autocast,
)

aten: Final = torch.ops.aten


def boxed(function: Callable[..., Any]) -> Boxed:
    """`function` of arguments in a list, which it empties, so that they can die inside."""

    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return function(*given)

    run._boxed_call = True  # type: ignore[attr-defined]  # how torch knows such functions
    return run


def ts_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
    """A function that runs the graph through TorchScript; its arguments come in a list.

    The graph is scripted, frozen and optimized for inference, and run once on copies of `inps`
    unless they are fake.  `fx_g` itself stays as it is.
    """
    try:
        frozen = _frozen(scriptable(fx_g))
    except Exception as error:
        raise CompileError(
            "torchscript",
            f"{type(error).__name__}: {error}",
            hint="TorchScript does not take every graph; stator.nop runs this one as it is",
        ) from error
    if not any(isinstance(value, torch.Tensor) and is_fake(value) for value in inps):
        # Copies: a graph may write to its inputs.
        frozen(*pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, list(inps)))
    return boxed(frozen)


def scriptable(fx_g: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph in words that TorchScript knows."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(fx_g.graph, {}))
    module = fx.GraphModule(fx_g, graph, "Scriptable")
    for node in list(graph.nodes):
        if node.op == "placeholder":
            node.type = _type_of(node.meta.get("val"))
        elif node.op == "call_function":
            _spell(node)
            with graph.inserting_before(node):
                node.args = _finite(graph, node.args)
                node.kwargs = _finite(graph, node.kwargs)
    graph.lint()
    module.recompile()
    return module


def _type_of(value: Any) -> Any:
    """What TorchScript is told of an argument; it takes the others for tensors."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | torch.SymInt):
        return int
    return float if isinstance(value, float | torch.SymFloat) else None


def _spell(node: fx.Node) -> None:
    """An operator without its overload, devices as strings, plain casts as `to`."""
    if isinstance(node.target, OpOverload):
        if _is_plain_cast(node):
            node.target = aten.to
        else:
            node.target = node.target.overloadpacket
    node.kwargs = {
        name: str(value) if isinstance(value, torch.device) else value
        for name, value in node.kwargs.items()
    }


def _is_plain_cast(node: fx.Node) -> bool:
    """Whether it only changes the type, and does: `to` gives its argument back otherwise."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(source, torch.Tensor) and source.dtype is not node.kwargs["dtype"]


def _finite(graph: fx.Graph, arguments: Any) -> Any:
    """Arguments without infinities and NaN, for which a script has no literals."""

    def spelled(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return graph.call_function(float, (str(value),))
        return value

    return fx.node.map_aggregate(arguments, spelled)


@contextmanager
def _autocast_off() -> Iterator[None]:
    """The casts of autocast are in the graph already."""
    before = script_autocast(False)
    try:
        yield
    finally:
        script_autocast(before)


def _frozen(module: fx.GraphModule) -> Any:
    with _autocast_off(), warnings.catch_warnings():
        # TorchScript is deprecated, and has words about annotations of every graph module.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="The TorchScript type system")
        scripted = torch.jit.script(module)
        remove_script_mutation(scripted.graph)
        return torch.jit.optimize_for_inference(torch.jit.freeze(scripted.eval()))
