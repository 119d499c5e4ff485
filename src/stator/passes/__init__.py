"""Passes over whole graphs, one a file; and the door for those of users'."""

from __future__ import annotations

from typing import Any

from stator.graph.registry import Registered
from stator.graph.registry import register as _register
from stator.graph.rules import Rule, apply_rules
from stator.graph.run import Ctx

__all__ = ["Ctx", "Registered", "register"]


def register(
    stage: str,
    pass_: Any,
    *,
    before: str | None = None,
    after: str | None = None,
    version: str | None = None,
) -> Registered:
    """Have a pass, a rule or patterns run in a stage: before or after a pass, or else last.

    `stage` is "pre_grad", "joint" or "post_grad".  What is compiled from now on has it, until
    `remove()` of what this returns.  `version` goes into cache keys in place of its source.
    """
    given = apply_rules(pass_.name, [pass_]) if isinstance(pass_, Rule) else pass_
    return _register(stage, given, before=before, after=after, version=version)
