"""A cache that several machines share, on any filesystem that fsspec reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

# So many failures in a row, and the remote is left alone: each may cost as long as the patience.
_FAILURES: Final = 3


@dataclass(slots=True)
class Remote:
    """Entries below `url`, as whole files: `<url>/<2 hex>/<digest>`.

    Nothing here raises; `problem` says what went wrong last.  What is loaded is not checked here,
    and a checksum keeps out damage, not malice: name a place that only trusted people write to.
    """

    url: str
    patience: float = 10.0  # seconds until an operation that does not answer counts as failed
    problem: str | None = None
    failures: int = 0  # in a row

    def load(self, digest: str) -> bytes | None:
        """The file of an entry; None if there is none, or none to be had."""
        return self._attempt(partial(_read, self._address(digest)))

    def save(self, digest: str, data: bytes) -> None:
        """Put the file of an entry there, over any that was."""
        self._attempt(partial(_write, self._address(digest), data))

    def _address(self, digest: str) -> str:
        slash = "" if self.url.endswith("/") else "/"
        return f"{self.url}{slash}{digest[:2]}/{digest}"

    def _attempt(self, work: Callable[[], T]) -> T | None:
        if self.failures >= _FAILURES:
            return None
        try:
            result = _within(self.patience, work)
        except (
            Exception
        ) as error:  # each filesystem has its own kinds, and none stops a compilation
            self.failures += 1
            reason = str(error) or f"no answer within {self.patience:g} s"
            last = "; it is left alone from now on" if self.failures == _FAILURES else ""
            self.problem = f"the remote cache failed: {type(error).__name__}: {reason}{last}"
            return None
        self.failures = 0
        return result


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, or TimeoutError; then the thread is left behind, and dies at exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # handed on: whoever waits for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="stator remote cache", daemon=True).start()
    return future.result(timeout=seconds)


# The filesystem is looked up for each file: fsspec keeps its instances, and knows of forks.
def _read(url: str) -> bytes | None:
    import fsspec  # type: ignore[import-untyped]  # ships no py.typed

    files, path = fsspec.url_to_fs(url)
    try:
        return bytes(files.cat_file(path))
    except FileNotFoundError:
        return None


def _write(url: str, data: bytes) -> None:
    import fsspec

    files, path = fsspec.url_to_fs(url)
    try:
        files.pipe_file(path, data)
    except FileNotFoundError:  # the folder is missing; where there are none, asking costs a trip
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, data)
