"""Graphs that are judged in processes of their own, so that one may crash or hang.

A worker has imported everything, has run nothing, and forks for each graph: that takes
milliseconds, and whatever happens to the copy, the worker is as it was.

`python -m stator.debug.minify.worker` is the worker: it reads a line of JSON for each script.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from stator.debug.minify.case import Case
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How, judge
from stator.debug.minify.script import read_script, write_script
from stator.errors import StatorError

POLL: Final = 0.003  # seconds between two looks at a child
WINDOW: Final = 0.2  # seconds, over which it is asked whether a child computes
IDLE: Final = 0.05  # of a window: whoever computes less does nothing
STILL: Final = 1.5  # seconds of doing nothing: no compilation waits for anything that long
NOBODY: Final = Failure("crash")


@dataclass(slots=True)
class Worker:
    """Judges cases elsewhere, with a limit of time for each."""

    folder: Path
    process: subprocess.Popen[str]
    seconds: float = 0.0  # of processor time that the last one took

    def judge(self, case: Case, how: How, timeout: float) -> list[Failure]:
        """As `judge` does; a graph that does not end in time hangs."""
        return self.judge_script(write_script(self.folder / "case", case, NOBODY, how), timeout)

    def judge_script(self, file: Path, timeout: float) -> list[Failure]:
        """What is wrong with the graph of a script."""
        sent, received = self.process.stdin, self.process.stdout
        assert sent is not None, "it has pipes"
        assert received is not None, "it has pipes"
        sent.write(json.dumps({"file": str(file), "timeout": timeout}) + "\n")
        sent.flush()
        line = received.readline()
        if not line:
            raise StatorError("the process that judges graphs has ended", where=str(self.folder))
        answer = json.loads(line)
        self.seconds = answer["seconds"]
        return [Failure.read(one) for one in answer["found"]]


@contextlib.contextmanager
def started_worker() -> Iterator[Worker]:
    """A worker; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "stator.debug.minify.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Worker(Path(folder), process)
        finally:
            assert process.stdin is not None, "it has pipes"
            assert process.stdout is not None, "it has pipes"
            process.stdin.close()
            process.wait()
            process.stdout.close()


def main() -> None:
    """Judge one script after another, each in a child."""
    _import_all()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a graph prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = _in_child(asked["file"], asked["timeout"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"found": found, "seconds": seconds}), file=answers, flush=True)


def _import_all() -> None:
    """Import what is otherwise imported with the first compilation, once for all children."""
    for name in ("llvmlite.binding", "sympy", "stator.pipeline"):
        import_module(name)


def _in_child(file: str, timeout: float) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _judge_and_end(file, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        status = _wait(child, timeout)
        if status is None:
            return [Failure("hang", detail=f"no end after {timeout:.1f} s").stored()]
        return _answer(pipe, status)


def _judge_and_end(file: str, writing: int) -> None:
    """The whole life of a child."""
    try:
        scripted = read_script(Path(file))
        found = [one.stored() for one in judge(scripted.case, scripted.how)]
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _wait(child: int, timeout: float) -> int | None:
    """The child's exit status; None if it had to be killed.

    Counted is the time that it computes, so that other work of the machine makes nobody hang, and
    the time in which it does nothing at all.
    """
    idle, seen, looked = 0.0, 0.0, time.perf_counter()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = time.perf_counter()
        if now - looked > WINDOW:
            spent = _computed(child, seen + now - looked)
            idle = idle + now - looked if spent - seen < IDLE * (now - looked) else 0.0
            seen, looked = spent, now
        if seen > timeout or idle > min(timeout, STILL):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(POLL)


def _computed(child: int, otherwise: float) -> float:
    """Seconds of processor time that a child has used; where the system does not tell, all."""
    try:
        text = Path(f"/proc/{child}/stat").read_text(encoding="utf-8")
    except OSError:
        return otherwise
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _answer(pipe: IO[str], status: int) -> list[dict[str, Any]]:
    if status == 0:
        found: list[dict[str, Any]] = json.loads(pipe.read())
        return found
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return [replace(NOBODY, message=how, detail=how).stored()]


if __name__ == "__main__":
    main()
