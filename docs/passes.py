"""Writes docs/passes.md: every pass and every rule, from the registry that runs them.

`python -m docs.passes` (or `make docs`).  A pass is described by its docstring, a rule by its
equation and by what its example becomes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.graph.edit import drop_unread
from stator.graph.rules import Rewriter, Rule
from stator.graph.run import Ctx, GraphPass
from stator.pipeline import JOINT, POST_GRAD, PRE_GRAD

PAGE: Final = Path(__file__).with_name("passes.md")
STAGES: Final[dict[str, tuple[str, Sequence[GraphPass]]]] = {
    "pre_grad": ("the graph that Dynamo captured, of torch functions, before autograd", PRE_GRAD),
    "joint": ("forward and backward together, functional, of ATen operators", JOINT),
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
    torch.manual_seed(0)
    module, _ = left_side(rule, rule.example())
    before = _calls(module.graph)
    Rewriter(module.graph, Ctx(), [rule]).run()
    after = _calls(module.graph)
    rejected = f" {len(rule.rejects)} rejections are tested." if rule.rejects else ""
    return (
        f"**{rule.name}**: `{rule.equation}`.{rejected}\n\n"
        f"```text\nbefore\n{before}\nafter\n{after}\n```"
    )


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


def _calls(graph: fx.Graph) -> str:
    """The calls of a graph, a line each; what it returns last."""
    lines = []
    for node in graph.nodes:
        arguments = ", ".join(
            [*(str(arg) for arg in node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
        )
        if node.op == "call_function":
            lines.append(f"    {node.name} = {node.target}({arguments})")
        elif node.op == "output":
            lines.append(f"    return {arguments}")
    text = "\n".join(lines)
    names = dict.fromkeys(re.findall(r"^ +(\w+) =", text, re.MULTILINE))
    for number, name in enumerate(names):
        text = re.sub(rf"\b{name}\b(?!\.)", f"t{number}", text)
    return re.sub(r"\barg(\d+)_1\b", r"x\1", text)


if __name__ == "__main__":
    PAGE.write_text(described(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
