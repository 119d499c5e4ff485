"""`stator minify`: from a script to the smallest graph of it that fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stator.debug.minify.minifier import Minified, Tell, Wishes, minimise, resume
from stator.debug.minify.watch import watch


def minify_script(command: Sequence[str], output: Path, timeout: float, tell: Tell) -> Minified:
    """Run a script with its arguments, and minimise the first graph that fails in `output`."""
    with tempfile.TemporaryDirectory() as folder:
        found = watch(command, Path(folder), timeout)
        shutil.rmtree(output / "state", ignore_errors=True)  # of another search
        how = found.scripted.how
        wishes = Wishes(
            options=how.options,
            dynamic=how.dynamic,
            folder=output,
            failure=found.failure,
            # One that took its process with it is looked at from outside.
            isolate=True if found.failure is None else None,
            tell=tell,
        )
        return minimise(found.scripted.case, None, wishes)


def resumed(output: Path, tell: Tell) -> Minified:
    """Go on with a search that was interrupted."""
    return resume(output, tell=tell)
