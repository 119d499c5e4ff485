"""Every rule there is: what the tests prove, and docs/passes.md lists."""

from __future__ import annotations

from typing import Final

from stator.graph.rules import Rule
from stator.rules.algebra import ALGEBRA
from stator.rules.views import VIEWS

RULES: Final[tuple[Rule, ...]] = (*VIEWS, *ALGEBRA)
