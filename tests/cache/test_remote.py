"""A shared cache through fsspec: used when it works, forgotten when it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # ships no py.typed
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]  # the same

from stator.cache import Key, Store
from stator.cache.remote import Remote

KEY = Key.of({"graph": "a1", "options": "b2"})
OTHER = Key.of({"graph": "a1", "options": "c3"})
DIGEST = KEY.digest
PAYLOAD = b"\x00code\n\xff" * 50
ROOMY = 1 << 20


class Broken(MemoryFileSystem):  # its files are those of memory://
    """A filesystem that does what the test says, and counts how often it is asked."""

    protocol = "broken"
    cachable = False
    asked = 0
    fault: Callable[[], Any] = staticmethod(lambda: None)

    def cat_file(self, path: str, **_: Any) -> bytes:
        Broken.asked += 1
        Broken.fault()
        return bytes(super().cat_file(path))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        Broken.asked += 1
        Broken.fault()
        super().pipe_file(path, value)


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture(autouse=True)
def _fresh_filesystems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in memory, and a filesystem that works until it is told to break."""
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(Broken, "asked", 0)
    monkeypatch.setattr(Broken, "fault", staticmethod(lambda: None))
    yield
    MemoryFileSystem.store.clear()


def break_with(monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Any]) -> None:
    monkeypatch.setattr(Broken, "fault", staticmethod(fault))


@pytest.fixture(params=["memory://", "memory://shared/cache", "file", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    below, name = tmp_path / "remote" / "deep", str(request.param)
    return {"file": f"file://{below}/", "folder": str(below)}.get(name, name)


def test_what_is_saved_is_loaded(url: str) -> None:
    Remote(url).save(DIGEST, PAYLOAD)
    remote = Remote(url)

    assert remote.load(DIGEST) == PAYLOAD
    assert remote.problem is None


def test_what_was_never_saved_is_missing_and_that_is_no_failure(url: str) -> None:
    remote = Remote(url)
    for _ in range(5):
        assert remote.load(DIGEST) is None

    assert (remote.problem, remote.failures) == (None, 0)


def test_the_cache_is_imported_without_torch_and_fsspec() -> None:
    script = "import sys, stator.cache; print({'torch', 'fsspec'} & sys.modules.keys())"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert done.stdout.strip() == b"set()"


def test_a_file_lies_below_the_first_two_digits(tmp_path: Path) -> None:
    Remote(f"file://{tmp_path}").save(DIGEST, PAYLOAD)

    assert (tmp_path / DIGEST[:2] / DIGEST).read_bytes() == PAYLOAD


def test_a_slash_at_the_end_of_the_address_changes_nothing() -> None:
    Remote("memory://shared/cache/").save(DIGEST, PAYLOAD)

    assert Remote("memory://shared/cache").load(DIGEST) == PAYLOAD


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("forbidden"),
        ConnectionError("no route"),
        RuntimeError("its own kind"),
        TimeoutError(),
    ],
)
def test_every_failure_is_swallowed_and_kept(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    break_with(monkeypatch, raising(error))
    remote = Remote("broken://cache")

    remote.save(DIGEST, PAYLOAD)

    assert remote.load(DIGEST) is None
    assert type(error).__name__ in (remote.problem or "")


@pytest.mark.parametrize("url", ["nonsense://cache", "memory:://", "file:///nul\0inside"])
def test_an_address_that_leads_nowhere_is_a_problem(url: str) -> None:
    remote = Remote(url)

    remote.save(DIGEST, PAYLOAD)

    assert remote.load(DIGEST) is None
    assert remote.problem is not None


def test_a_remote_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    break_with(monkeypatch, lambda: answer.wait(timeout=30))
    remote = Remote("broken://cache", patience=0.05)

    assert remote.load(DIGEST) is None
    assert "no answer within 0.05 s" in (remote.problem or "")
    answer.set()


def test_after_three_failures_in_a_row_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(monkeypatch, raising(ConnectionError("no route")))
    remote = Remote("broken://cache")
    for _ in range(3):
        remote.load(DIGEST)
    break_with(monkeypatch, lambda: None)

    remote.save(DIGEST, PAYLOAD)

    assert remote.load(DIGEST) is None
    assert Broken.asked == 3
    assert "left alone" in (remote.problem or "")


def test_a_success_in_between_starts_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("broken://cache")
    for _ in range(4):
        break_with(monkeypatch, raising(ConnectionError("no route")))
        remote.load(DIGEST)
        remote.load(DIGEST)
        break_with(monkeypatch, lambda: None)
        remote.save(DIGEST, PAYLOAD)

    assert remote.load(DIGEST) == PAYLOAD


def test_a_store_finds_at_the_remote_what_another_saved(url: str, tmp_path: Path) -> None:
    Store(tmp_path / "one", ROOMY, Remote(url)).save(KEY, PAYLOAD)
    other = Store(tmp_path / "other", ROOMY, Remote(url))

    assert other.load(KEY) == PAYLOAD
    assert other.problem is None


def test_what_came_from_the_remote_is_kept_here(tmp_path: Path) -> None:
    Store(tmp_path / "one", ROOMY, Remote("memory://cache")).save(KEY, PAYLOAD)
    Store(tmp_path / "other", ROOMY, Remote("memory://cache")).load(KEY)

    assert Store(tmp_path / "other", ROOMY).load(KEY) == PAYLOAD


def test_an_entry_that_is_here_is_not_asked_for_there(tmp_path: Path) -> None:
    store = Store(tmp_path, ROOMY, Remote("broken://cache"))
    store.save(KEY, PAYLOAD)
    asked = Broken.asked

    assert store.load(KEY) == PAYLOAD
    assert Broken.asked == asked


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data * 2]
)
def test_a_damaged_entry_of_the_remote_is_missing_and_is_mended_by_a_save(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    remote = Remote("memory://cache")
    store = Store(tmp_path / "cache", ROOMY, remote)
    store.save(KEY, PAYLOAD)
    whole = remote.load(DIGEST)
    assert whole is not None
    remote.save(DIGEST, damage(whole))
    store.clear()

    assert store.load(KEY) is None
    assert store.entries() == []
    assert "remote" in (store.problem or "")

    store.save(KEY, PAYLOAD)
    assert remote.load(DIGEST) == whole


def test_a_sound_entry_of_another_key_is_missing(tmp_path: Path) -> None:
    remote = Remote("memory://cache")
    store = Store(tmp_path / "cache", ROOMY, remote)
    store.save(OTHER, PAYLOAD)
    remote.save(DIGEST, remote.load(OTHER.digest) or b"")

    assert store.load(KEY) is None


def test_without_a_usable_folder_the_remote_still_serves(tmp_path: Path) -> None:
    Store(tmp_path / "one", ROOMY, Remote("memory://cache")).save(KEY, PAYLOAD)
    (tmp_path / "taken").write_text("a file")
    store = Store(tmp_path / "taken", ROOMY, Remote("memory://cache"))

    assert store.load(KEY) == PAYLOAD
    assert "taken" in (store.problem or "")


def test_a_failing_remote_leaves_the_folder_working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(monkeypatch, raising(ConnectionError("no route")))
    store = Store(tmp_path, ROOMY, Remote("broken://cache"))

    assert store.load(KEY) is None
    store.save(KEY, PAYLOAD)

    assert store.load(KEY) == PAYLOAD
    assert "no route" in (store.problem or "")


def test_an_old_failure_of_the_remote_does_not_hide_a_newer_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, 1000, Remote("broken://cache"))
    break_with(monkeypatch, raising(ConnectionError("no route")))
    store.load(KEY)
    break_with(monkeypatch, lambda: None)

    store.save(KEY, bytes(2000))

    assert "exceeds" in (store.problem or "")


def test_clearing_leaves_the_remote_as_it_is(tmp_path: Path) -> None:
    store = Store(tmp_path, ROOMY, Remote("memory://cache"))
    store.save(KEY, PAYLOAD)

    store.clear()

    assert store.load(KEY) == PAYLOAD
