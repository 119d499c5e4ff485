"""A graph that cannot be compiled runs in eager mode, and the user is told once."""

from __future__ import annotations

import warnings

from stator.core.events import Compilation
from stator.errors import CompileError, OptionError, StatorError, StatorWarning


def explained(error: Exception, record: Compilation) -> StatorError:
    """`error` as one of ours, with the stage that was running."""
    if isinstance(error, StatorError):
        return error
    return CompileError(
        record.running,
        f"{type(error).__name__}: {error}",
        where=getattr(error, "user_line", None),
        hint="the program runs in eager mode unless Options.strict is set; please report this",
    )


def note_fallback(error: Exception, record: Compilation, strict: bool) -> None:
    """Warn that a graph runs in eager mode, naming the stage; under `strict`, raise instead.

    A wrong option is raised in any case: it is the user's to mend, and eager mode would hide it.
    """
    reason = explained(error, record)
    if strict or isinstance(reason, OptionError):
        raise reason from error
    stage = reason.stage if isinstance(reason, CompileError) else record.running
    record.fallback = str(reason)
    warnings.warn(
        f"stator runs a graph in eager mode: stage {stage!r} failed with {reason.what} "
        "(Options.strict raises instead)",
        StatorWarning,
        stacklevel=3,
    )
