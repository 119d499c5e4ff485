"""Graphs that Dynamo captured, as flat programs that can be traced."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from stator.errors import OptionError
from stator.graph.verify import note_line, user_line
from stator.torch_api import (
    HigherOrderOperator,
    autograd_function_apply,
    detect_fake_mode,
    pytree,
    rebind_unbacked,
    sets_grad_mode,
)

# Folders of code that is not the user's: this package and torch.
_NOT_THE_USERS: Final = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)

# Torch makes oneDNN's LSTM of one whose input asks for no gradient, as if no weight did: without
# gradients being recorded that keeps nothing for a backward.
_LSTM: Final = frozenset({torch.lstm, torch.ops.aten.lstm.input})
_BUDGET: Final = "_region_activation_memory_budget"  # where torch notes it, from 2.13 on


def attribute_tensors(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants that the graph reads from the module, by name."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor):
            found[str(node.target)] = value
    return found


def annotated_budget(nodes: Iterable[fx.Node]) -> float | None:
    """What torch's annotation of a graph lets the backward keep, as a share of the usual.

    There is one cut for a graph, so what is annotated has to be all of its forward.
    """
    calls = [node for node in nodes if node.op.startswith("call")]
    noted = {(node.meta.get("custom") or {}).get(_BUDGET): node for node in calls}
    if len(noted) > 1:
        raise OptionError(
            "region_activation_memory_budget holds for a part of a graph, or there are several",
            where=user_line(noted[None]) if None in noted else None,
            hint="annotate all of it, or set parts apart with torch._dynamo.graph_break()",
        )
    return next(iter(noted), None)


def nodes_inside(module: fx.GraphModule) -> Iterator[fx.Node]:
    """All nodes of a graph, and of those that its operators take."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def take_callers_line(graph: fx.Graph) -> None:
    """Give nodes that came from no code of the user's the line that called the compiled program.

    A module of torch's own, compiled by itself, has no other.
    """
    bare = [n for n in graph.nodes if n.op.startswith("call") and user_line(n) is None]
    frame = inspect.currentframe() if bare else None
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return
    code = frame.f_code
    trace = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'
    for node in bare:
        node.meta["stack_trace"] = trace


@dataclass(frozen=True, slots=True)
class GraphRunner:
    """A program that runs a graph, taking the tensors named in `lifted` as further arguments."""

    module: fx.GraphModule
    lifted: list[str]

    def __call__(self, *arguments: Any) -> list[Any]:
        count = len(arguments) - len(self.lifted)
        runner = _Runner(self.module, dict(zip(self.lifted, arguments[count:], strict=True)))
        result = runner.run(*arguments[:count])
        return list(result) if isinstance(result, tuple | list) else [result]

    def may_run_again(self) -> bool:
        """Whether it can be broken off anywhere, by a trace that nobody looks at.

        Operators that take functions may look; transforms such as vmap leave their level behind.
        """
        targets = [node.target for node in self.module.graph.nodes if node.op == "call_function"]
        places = [str(getattr(target, "__module__", "")) for target in targets]
        takes_functions = any(isinstance(target, HigherOrderOperator) for target in targets)
        return not takes_functions and not any("_functorch" in place for place in places)


class _Runner(fx.Interpreter):
    """Interpreter in which lifted attributes are arguments, and the user's functions are whole."""

    def __init__(self, module: fx.GraphModule, lifted: dict[str, Any]) -> None:
        super().__init__(module)
        self.lifted = lifted

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; an error remembers the user's line."""
        try:
            result = super().run_node(n)
        except Exception as error:
            note_line(error, n)
            raise
        if n.meta.get("unbacked_bindings"):
            mode = detect_fake_mode()
            if mode is not None and mode.shape_env is not None:
                rebind_unbacked(mode.shape_env, n, result)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The argument that stands for the attribute, or the attribute."""
        if target in self.lifted:
            return self.lifted[target]
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A torch.autograd.Function of the user's keeps what it saves differentiable."""
        if target in _LSTM and _asks_for_gradients(args):
            args = (args[0].detach().requires_grad_(), *args[1:])
        if target is not autograd_function_apply:
            return super().call_function(target, args, kwargs)
        forward, backward, *arguments = args
        return _UserFunction.apply(forward, _in_any_grad_mode(backward), kwargs, *arguments)


def _asks_for_gradients(arguments: tuple[Any, ...]) -> bool:
    """Whether some tensor behind the first asks for a gradient, and the first does not."""
    leaves = pytree.tree_leaves(arguments[1:])
    asks = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    return asks and torch.is_grad_enabled() and not arguments[0].requires_grad


def _in_any_grad_mode(backward: fx.GraphModule) -> fx.GraphModule:
    """`backward` without the frame of `no_grad` that Dynamo puts around it.

    Autograd runs it without grad anyway, unless it is to be differentiated again.
    """
    graph = copy.deepcopy(backward.graph)
    switches = [node for node in graph.nodes if sets_grad_mode(node.target)]
    if len(switches) >= 2 and switches[0].args == (False,) and switches[-1].args == (True,):
        for node in (switches[0], switches[-1]):
            graph.erase_node(node)
    return fx.GraphModule(backward, graph)


class _UserFunction(torch.autograd.Function):
    """A captured torch.autograd.Function: two graphs, and what one saves for the other."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, about: Any, *arguments: Any) -> Any:
        """Run the forward graph, which returns outputs and saved values."""
        outputs, saved = fx.Interpreter(forward).run(*arguments)
        outs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        ctx.graph = backward
        ctx.mark_dirty(*(outs[i] for i in about.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(outs[i] for i in about["non_differentiable_idx"]))
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in saved]
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.others = [value for value in saved if not isinstance(value, torch.Tensor)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Run the backward graph."""
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        saved = [next(tensors if is_tensor else others) for is_tensor in ctx.is_tensor]
        found = fx.Interpreter(ctx.graph).run(*grads, *saved)
        return (None, None, None, *(found if isinstance(found, tuple | list) else (found,)))
