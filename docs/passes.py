"""Writes docs/passes.md: every pass and every rule, from the registry that runs them.

`python -m docs.passes` (or `make docs`).  A pass is described by its docstring, a rule by its
equation and by what its example becomes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.graph.edit import drop_unread
from stator.graph.rules import Rule, apply_rules
from stator.graph.run import Ctx, GraphPass
from stator.options import Options
from stator.pipeline import FREEZING, JOINT, POST_GRAD, PRE_GRAD
from stator.torch_api import HigherOrderOperator, OpOverload

PAGE: Final = Path(__file__).with_name("passes.md")
STAGES: Final[dict[str, tuple[str, Sequence[GraphPass]]]] = {
    "pre_grad": ("the graph that Dynamo captured, of torch functions, before autograd", PRE_GRAD),
    "joint": ("forward and backward together, functional, of ATen operators", JOINT),
    "freezing": ("a forward without a backward, where weights are to be constants", FREEZING),
    "post_grad": ("each half by itself, after the cut", POST_GRAD),
}
START: Final = "<!-- passes -->\n"
END: Final = "<!-- /passes -->"


def described(page: str) -> str:
    """The page, with its list written anew."""
    head, rest = page.split(START)
    _, tail = rest.split(END)
    return f"{head}{START}{listed()}\n{END}{tail}"


def listed() -> str:
    """All stages."""
    parts = []
    for name, (what, passes) in STAGES.items():
        parts.append(f"## {name}\n\nOver {what}.")
        parts += [_pass_text(number, one) for number, one in enumerate(passes, 1)]
    return "\n\n".join(parts)


def _pass_text(number: int, pass_: GraphPass) -> str:
    rules: Sequence[Rule] = getattr(pass_, "rules", ())
    if not rules:
        doc = inspect.getdoc(pass_) or ""
        first, _, rest = doc.partition("\n")
        body = f"\n\n```text\n{rest.strip()}\n```" if rest.strip() else ""
        return f"### {number}. {pass_.__name__}\n\n{first}{body}"
    texts = "\n\n".join(_rule_text(rule) for rule in rules)
    return f"### {number}. {pass_.__name__}\n\n{len(rules)} rules, until none fires.\n\n{texts}"


def _rule_text(rule: Rule) -> str:
    rejected = f" {len(rule.rejects)} rejections are tested." if rule.rejects else ""
    return f"**{rule.name}**: `{rule.equation}`.{rejected}\n\n```text\n{rule_example(rule)}\n```"


def rule_example(rule: Rule) -> str:
    """What a rule makes of its example: the calls before and after."""
    torch.manual_seed(0)
    module, _ = left_side(rule, rule.example())
    return before_and_after(module.graph, apply_rules(rule.name, [rule]))


def before_and_after(graph: fx.Graph, pass_: GraphPass, options: Options | None = None) -> str:
    """The calls of a graph, and what a pass makes of them."""
    before = calls_text(graph)
    pass_(graph, Ctx(options or Options()))
    return f"before\n{before}\nafter\n{calls_text(graph)}"


def left_side(rule: Rule, arguments: Sequence[Any]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of a rule's left side, and the tensors that it takes."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        full = [next(rest) if isinstance(value, Tensor) else value for value in arguments]
        return rule.function(*full).before

    module = make_fx(call, tracing_mode="fake")(*tensors)
    drop_unread(module.graph)  # the right side, which was computed too
    return module, tensors


def calls_text(graph: fx.Graph, *, own_names: bool = False) -> str:
    """The calls of a graph, a line each, numbered or by their own names; what it returns last."""
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    names = {node: node.name if own_names else f"x{n}" for n, node in enumerate(inputs)}
    names |= {node: node.name if own_names else f"t{n}" for n, node in enumerate(calls)}
    lines = [f"    {names[node]} = {_target(node)}({_arguments(node, names)})" for node in calls]
    return "\n".join([*lines, f"    return {_arguments(graph.output_node(), names)}"])


def _target(node: fx.Node) -> str:
    """An operator by its full name, a method with a dot before it, a function by its own name."""
    if node.op == "call_method":
        return f".{node.target}"
    is_operator = isinstance(node.target, OpOverload | HigherOrderOperator)
    return str(node.target) if is_operator else str(node.target.__name__)


def _arguments(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    def shown(value: Any) -> str:
        match value:
            case fx.Node():
                return names.get(value, value.name)
            case list():
                return f"[{', '.join(map(shown, value))}]"
            case tuple():
                return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
            case str():
                return repr(value)
            case _:
                return str(value)

    named = (f"{name}={shown(value)}" for name, value in node.kwargs.items())
    return ", ".join([*map(shown, node.args), *named])


if __name__ == "__main__":
    PAGE.write_text(described(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
