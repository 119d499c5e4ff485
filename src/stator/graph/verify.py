"""Invariants of a graph, checked after every pass."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import fx

from stator.errors import VerifyError
from stator.torch_api import is_mutable_op

_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
# What stands between a program and its operators, and tells nothing: generated code among it.
_MACHINERY: Final = ("<", f"{_TORCH}_dynamo{os.sep}", f"{_TORCH}fx{os.sep}")


def verify(graph: fx.Graph, after: str, *, functional: bool = True) -> None:
    """Raise VerifyError, naming the pass `after` which the graph is broken.

    `functional`: nothing may be written in place.  A program that Dynamo captured may do that.
    """
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise VerifyError(after, f"the graph is malformed: {error}") from error
    for node in graph.nodes if functional else ():
        if node.op == "call_function" and (reason := why_not_functional(node)):
            raise VerifyError(after, f"{node.name}: {reason}", where=user_line(node))


def why_not_functional(node: fx.Node) -> str | None:
    """None unless the node writes to a value that others may read."""
    target = node.target
    if not is_mutable_op(target) or is_input_update(node):
        return None
    if target.namespace != "aten":  # custom operators say what they mutate, and mean it
        return None
    return f"{target} mutates its argument"


def is_input_update(node: fx.Node) -> bool:
    """Whether the node writes the new value of an input back into it."""
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    )


def user_line(node: fx.Node) -> str | None:
    """`file:line` of the user's code that the node came from: the innermost outside of torch."""
    trace = node.meta.get("stack_trace")
    return _innermost(trace) if trace else None


@lru_cache(maxsize=1 << 11)  # nodes of one captured call share its trace
def _innermost(trace: str) -> str | None:
    frames = re.findall(r'File "(.+?)"(?:, line (\d+))?', trace)
    frames = [frame for frame in frames if not frame[0].startswith(_MACHINERY)]
    if not frames:
        return None
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line = (own or frames)[-1]
    return f"{file}:{line}" if line else str(file)


def note_line(error: Exception, node: fx.Node) -> None:
    """Remember on `error` the user's line that `node` came from; the innermost one counts."""
    if getattr(error, "user_line", None) is None:
        error.user_line = user_line(node)  # type: ignore[attr-defined]  # read by core/fallback
