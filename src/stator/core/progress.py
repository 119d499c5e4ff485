"""A bar on the terminal while a compilation takes its time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Final

from stator.core.events import Compilation

PATIENCE: Final = 2.0  # seconds before anything is shown
REFRESH: Final = 0.1

_one: Final = Lock()  # a terminal has room for one bar


@contextmanager
def progress_shown(record: Compilation, expected: int, *, wanted: bool = True) -> Iterator[None]:
    """Show how many of `expected` stages are done, if it takes long and stderr is a terminal."""
    if not (wanted and _is_terminal()) or not _one.acquire(blocking=False):
        yield
        return
    done = Event()
    thread = Thread(target=_show, args=(record, expected, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _one.release()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _show(record: Compilation, expected: int, done: Event) -> None:
    before = len(record.stages)
    if done.wait(PATIENCE):
        return
    # Imported when something is shown: most compilations are through before that.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), "stator", BarColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(record.running, total=expected)
        progress.tasks[0].start_time = progress.get_time() - PATIENCE
        while not done.wait(REFRESH):
            count = min(len(record.stages) - before, expected)
            progress.update(task, description=record.running, completed=count)
