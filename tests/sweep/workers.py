"""Processes that judge units, so that a crash or a hang costs one case and not the sweep."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

import torch

from tests.sweep.cases import NoSamplesError, Unit, samples
from tests.sweep.judge import BOTH_FAIL, Judge, Outcome
from tests.sweep.observe import Case
from tests.sweep.results import UnitResult

_MAKING_SAMPLES: Final = "making samples"
_DEVICE_BROKE: Final = 3  # exit code of a worker whose GPU takes no more work


@dataclass(frozen=True, slots=True)
class Setup:
    """How the cases are run."""

    backend: str
    peer: str
    samples: int
    workers: int
    limit: float  # seconds, for one run of one case
    memory: int  # bytes of address space a worker may use; 0: any, as drivers of a GPU reserve it
    logs: Path  # folder for what the workers print
    bits: bool = False  # every bit of a value counts
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Task:
    """A unit to judge, or the rest of one whose worker died."""

    unit: Unit
    outcomes: list[Outcome] = field(default_factory=list)  # of the samples before
    cause_of_death: str | None = None  # what the backend did to the next sample's first worker


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker's word that it begins something it may not survive."""

    phase: str
    sample: int = -1


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker's word that the sweep itself, and not what it tests, has failed."""

    traceback: str


class SweepError(Exception):
    """The sweep itself has a fault; its verdicts would mean nothing."""


def judge_units(units: Sequence[Unit], setup: Setup) -> Iterator[UnitResult]:
    """Judge units in worker processes; yield each as it is finished."""
    waiting = deque(Task(unit) for unit in units)
    setup.logs.mkdir(parents=True, exist_ok=True)
    workers = [_Worker(setup, number) for number in range(min(setup.workers, len(units)))]
    try:
        while waiting or any(worker.task for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.hand(waiting.popleft())
            busy = {worker.connection: worker for worker in workers if worker.task}
            ready = wait(list(busy), timeout=1.0)
            for connection, worker in busy.items():
                news = worker.listen(connection in ready)
                if isinstance(news, UnitResult):
                    yield news
                elif news:
                    waiting.appendleft(news)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """One process, seen from the parent."""

    def __init__(self, setup: Setup, number: int) -> None:
        self._setup, self._number = setup, number
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # On a GPU no daemon: those may not have the processes that compile kernels.
        is_daemon = self._setup.device == "cpu"
        self._process = context.Process(
            target=_serve, args=(theirs, self._setup, self._number), daemon=is_daemon
        )
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self.task: Task | None = None
        self._begun = Begun(_MAKING_SAMPLES)
        self._heard = time.monotonic()

    def hand(self, task: Task) -> None:
        """Give the idle worker a task."""
        self.task, self._begun = task, Begun(_MAKING_SAMPLES)
        self._heard = time.monotonic()
        self.connection.send(task)

    def listen(self, has_spoken: bool) -> UnitResult | Task | None:
        """The finished unit; or, after a death, what is left to do; or nothing yet."""
        if not has_spoken:
            # The worker's own alarm rings first, unless native code never returns to Python.
            silence = time.monotonic() - self._heard
            return self._bury("hung") if silence > 3 * self._setup.limit + 60 else None
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._bury("died")
        self._heard = time.monotonic()
        assert self.task is not None, "a worker speaks only about its task"
        if isinstance(message, Begun):
            self._begun = message
        elif isinstance(message, Outcome):
            self.task = Task(self.task.unit, [*self.task.outcomes, message])
        elif isinstance(message, Broken):
            raise SweepError(f"{self.task.unit}: {message.traceback}")
        else:
            self.task = None
            result: UnitResult = message
            return result
        return None

    def _bury(self, how: str) -> UnitResult | Task:
        """Replace the process; blame the case it was at."""
        if how == "died":
            self._process.join(timeout=10.0)  # it has closed the pipe; how it ended comes later
        self.stop()
        task, begun = self.task, self._begun
        assert task is not None, "an idle worker is not listened to"
        cause = f"the process {how} ({_end_of(self._process.exitcode)})"
        self._start()
        if begun.phase == _MAKING_SAMPLES:
            return UnitResult(task.unit, why_none=f"{begun.phase}: {cause}")
        if begun.phase == self._setup.backend and self._setup.backend != self._setup.peer:
            return replace(task, cause_of_death=cause)
        difference = {"raises": f"{cause} in {begun.phase}"}
        return Task(task.unit, [*task.outcomes, Outcome(begun.sample, BOTH_FAIL, difference)])

    def stop(self) -> None:
        """End the process: an idle one by hanging up, a busy one at once."""
        self.connection.close()
        self._process.join(timeout=10.0 if self.task is None else 0.0)
        self._process.kill()
        self._process.join()


def _end_of(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _serve(connection: Connection, setup: Setup, number: int) -> None:
    """The life of a worker process: judge what is handed to it, say how it goes."""
    log = os.open(setup.logs / f"worker{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if setup.memory:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory, setup.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            task: Task = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send(_judge_task(task, setup, connection))
        except Exception:  # nothing of the cases: those are caught where they run
            _leave_if_broken(setup.device)
            connection.send(Broken(traceback.format_exc()))


def _leave_if_broken(device: str) -> None:
    """End the process if a kernel's fault broke the device, so that it is blamed on its case."""
    if device == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(_DEVICE_BROKE)


def _judge_task(task: Task, setup: Setup, connection: Connection) -> UnitResult:
    try:
        made = samples(task.unit, setup.samples, setup.device)
    except NoSamplesError as error:
        return UnitResult(task.unit, why_none=f"{_MAKING_SAMPLES}: {error}")
    if not made.chosen:
        return UnitResult(task.unit, why_none="the database has no samples")
    outcomes = list(task.outcomes)
    cause = task.cause_of_death
    for index, sample in made.chosen[len(outcomes) :]:
        outcome = _judge_sample(Case.of(task.unit, index, sample), setup, connection, cause)
        connection.send(outcome)
        outcomes.append(outcome)
        cause = None
    return UnitResult(task.unit, made.available, outcomes)


def _judge_sample(
    case: Case, setup: Setup, connection: Connection, cause_of_death: str | None
) -> Outcome:
    def announce(phase: str) -> None:
        _leave_if_broken(setup.device)  # by what began before
        connection.send(Begun(phase, case.index))

    judge = Judge(setup.backend, setup.peer, setup.limit, announce, setup.bits)
    return judge(case, cause_of_death)
