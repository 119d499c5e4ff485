"""Operators of users' that write to their arguments, as graphs hold them: functions of old values.

The trace wraps such an operator: it copies what is written, runs the operator on the copies and
returns them.  `written` does the same, but copies only where somebody else reads the old value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stator.torch_api import run_on_copies


def written(operator: Any, copied: Sequence[int], /, **arguments: Any) -> tuple[Any, ...]:
    """Run `operator`; of the tensors that it writes to, those at `copied` are copied first.

    Returns what the operator returns, then what it wrote.
    """
    return run_on_copies(operator, tuple(copied), arguments)
