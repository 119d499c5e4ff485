"""Whatever happens to the folder, a load gives the right payload or none, and nothing raises."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stator.cache import Key, Store
from stator.cache.store import MAGIC

KEY = Key.of({"graph": "a1", "options": "b2"})
OTHER = Key.of({"graph": "a1", "options": "c3"})
PAYLOAD = bytes(range(256)) * 8
ROOMY = 1 << 24

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds one entry."""
    store = Store(tmp_path / "cache", ROOMY)
    store.save(KEY, PAYLOAD)
    return store


def file_of(store: Store, key: Key = KEY) -> Path:
    return store.folder / key.digest


def failing(code: int) -> Callable[..., NoReturn]:
    """A function that fails as the system does with this error."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


class HalfWritten:
    """A file on a disk that fills up halfway through a write."""

    def __init__(self, handle: int, _mode: str) -> None:
        self.handle = handle

    def __enter__(self) -> HalfWritten:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def write(self, data: bytes) -> None:
        os.write(self.handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def head_length(data: bytes) -> int:
    return data.index(b"\n", len(MAGIC)) + 1


# A damaged entry


def test_an_entry_cut_short_anywhere_is_missing_and_removed(store: Store) -> None:
    whole = file_of(store).read_bytes()
    head = head_length(whole)
    around = {0, 1, len(MAGIC) - 1, len(MAGIC), head - 2, head - 1, head, head + 1}
    for length in sorted(around | set(range(0, len(whole), 97)) | {len(whole) - 1}):
        file_of(store).write_bytes(whole[:length])

        assert store.load(KEY) is None, length
        assert not file_of(store).exists()
        assert "damaged" in (store.problem or "")


def corrupted(whole: bytes, chance: random.Random) -> bytes:
    """`whole` after one to three accidents."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at = chance.choice([chance.randrange(len(data) + 1), chance.randrange(head_length(whole))])
        match chance.randrange(5):
            case 0:
                data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                del data[max(at, 1) :]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case 3:
                del data[at : at + chance.randint(1, 9)]
            case 4:
                data[at : at + 16] = bytes(16)
        data = data or bytearray(1)
    return bytes(data)


def test_a_thousand_corruptions_give_the_right_payload_or_none(store: Store) -> None:
    whole, chance = file_of(store).read_bytes(), random.Random(0)
    survived = 0
    for _ in range(1000):
        data = corrupted(whole, chance)
        file_of(store).write_bytes(data)

        loaded = store.load(KEY)

        assert loaded == (PAYLOAD if data == whole else None)
        survived += loaded is not None
    assert survived < 10  # the accidents do happen


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole.replace(b"entry 1\n", b"entry 2\n", 1),  # another version
        lambda whole: whole + b"\0",
        lambda whole: whole.replace(b'"length": ', b'"length":  ', 1),  # equal JSON, other bytes
        lambda whole: whole.replace(b'"length": 2', b'"length": 3', 1),
        lambda whole: b"",
        lambda whole: MAGIC + b"null\n",
        lambda whole: MAGIC + b"[" * 100_000 + b"\n",
        lambda whole: MAGIC + b'{"key": {"graph": 1}}\n',
        lambda whole: MAGIC + b"\xff\xfe\n",
    ],
)
def test_a_file_that_save_would_not_write_is_missing(
    store: Store, damage: Callable[[bytes], bytes]
) -> None:
    file_of(store).write_bytes(damage(file_of(store).read_bytes()))

    assert store.load(KEY) is None
    assert not file_of(store).exists()


def test_a_sound_file_under_another_name_is_missing(store: Store) -> None:
    file_of(store).rename(file_of(store, OTHER))

    assert store.load(OTHER) is None
    assert store.load(KEY) is None


def test_after_a_damaged_entry_a_save_works(store: Store) -> None:
    file_of(store).write_bytes(b"?")
    store.load(KEY)

    store.save(KEY, PAYLOAD)

    assert store.load(KEY) == PAYLOAD


def test_a_file_larger_than_the_limit_is_not_read(store: Store) -> None:
    store.limit = file_of(store).stat().st_size - 1

    assert store.load(KEY) is None
    assert not file_of(store).exists()


def test_a_link_in_place_of_an_entry_is_not_followed(store: Store, tmp_path: Path) -> None:
    file_of(store).rename(tmp_path / "elsewhere")
    file_of(store).symlink_to(tmp_path / "elsewhere")

    assert store.load(KEY) is None
    store.save(KEY, PAYLOAD)

    assert not file_of(store).is_symlink()
    assert store.load(KEY) == PAYLOAD


def test_a_pipe_in_place_of_an_entry_does_not_hang(store: Store) -> None:
    file_of(store).unlink()
    os.mkfifo(file_of(store))

    assert store.load(KEY) is None
    assert not file_of(store).exists()


def test_a_folder_in_place_of_an_entry_is_a_problem(store: Store) -> None:
    file_of(store).unlink()
    file_of(store).mkdir()

    assert store.load(KEY) is None
    store.save(KEY, PAYLOAD)

    assert str(store.folder) in (store.problem or "")


# A folder that is not for us


def test_a_folder_of_another_user_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(store.folder).st_uid + 1)

    assert store.load(KEY) is None
    store.save(OTHER, PAYLOAD)

    assert store.problem == f"{store.folder} belongs to another user"
    assert store.why_missing(KEY) == store.problem
    assert (store.entries(), store.clear()) == ([], 0)
    assert os.listdir(store.folder) == [KEY.digest]


def test_a_link_of_another_user_is_not_followed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(store.folder)
    ours = os.lstat(link)
    values = list(ours)
    values[stat.ST_UID] += 1
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result(values))
    linked = Store(link, ROOMY)

    assert linked.load(KEY) is None
    assert "another user" in (linked.problem or "")


def test_a_link_of_ours_is_followed(store: Store, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(store.folder)

    assert Store(link, ROOMY).load(KEY) == PAYLOAD


def test_a_file_of_another_user_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    true_fstat = os.fstat

    def foreign(handle: int) -> os.stat_result:
        values = list(true_fstat(handle))
        values[stat.ST_UID] += 1
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", foreign)

    assert store.load(KEY) is None
    assert not file_of(store).exists()


@pytest.mark.parametrize(("before", "after"), [(0o777, 0o755), (0o770, 0o750), (0o755, 0o755)])
def test_a_folder_of_ours_that_others_may_write_to_is_tightened(
    store: Store, before: int, after: int
) -> None:
    store.folder.chmod(before)

    assert store.load(KEY) == PAYLOAD
    assert stat.S_IMODE(store.folder.stat().st_mode) == after


def test_a_folder_shared_on_purpose_is_refused_and_stays_as_it_is(store: Store) -> None:
    store.folder.chmod(0o1777)

    assert store.load(KEY) is None
    assert store.problem == f"others may write into {store.folder}"
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o1777


def test_a_folder_that_cannot_be_tightened_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.chmod(0o777)
    monkeypatch.setattr(os, "chmod", lambda path, mode: None)  # as on filesystems without modes

    assert store.load(KEY) is None
    assert store.problem == f"others may write into {store.folder}"


def test_a_system_without_owners_is_served(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getuid")
    store.folder.chmod(0o777)

    assert store.load(KEY) == PAYLOAD


def test_a_file_in_place_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for folder in (taken, taken / "below"):
        store = Store(folder, ROOMY)

        store.save(KEY, PAYLOAD)

        assert str(folder) in (store.problem or "")
        assert store.load(KEY) is None
    assert taken.read_text() == "a file"


@pytest.mark.parametrize("name", ["nul\0inside", "x" * 5000])
def test_a_folder_that_cannot_exist_is_a_problem(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name, ROOMY)

    store.save(KEY, PAYLOAD)

    assert store.load(KEY) is None
    assert store.clear() == 0
    assert store.problem is not None


# A system that refuses


@pytest.mark.parametrize("call", ["open", "replace"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_written_loads_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        store.save(OTHER, PAYLOAD)

    assert os.strerror(code) in (store.problem or "")
    assert store.load(KEY) == PAYLOAD
    assert store.load(OTHER) is None
    assert os.listdir(store.folder) == [KEY.digest]


def test_a_load_does_not_need_to_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("utime", "unlink", "replace", "mkdir"):
        monkeypatch.setattr(os, call, failing(errno.EROFS))

    assert store.load(KEY) == PAYLOAD
    assert store.problem is None


def test_a_damaged_entry_that_cannot_be_removed_stays_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(store).write_bytes(b"?")
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))

    assert store.load(KEY) is None
    assert store.load(KEY) is None


def test_a_full_disk_leaves_no_part_of_an_entry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", HalfWritten)
        store.save(OTHER, PAYLOAD)
        store.save(KEY, b"another payload")

    assert os.strerror(errno.ENOSPC) in (store.problem or "")
    assert os.listdir(store.folder) == [KEY.digest]
    assert store.load(KEY) == PAYLOAD


def test_a_write_that_the_system_cuts_short_leaves_no_part(store: Store) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        store.save(OTHER, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert os.strerror(errno.EFBIG) in (store.problem or "")
    assert os.listdir(store.folder) == [KEY.digest]


def test_a_folder_that_vanished_is_made_again(store: Store) -> None:
    file_of(store).unlink()
    store.folder.rmdir()

    assert store.load(KEY) is None
    store.save(KEY, PAYLOAD)

    assert store.load(KEY) == PAYLOAD


def test_a_folder_that_vanishes_during_a_save_is_a_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(errno.ENOENT))
        store.save(OTHER, PAYLOAD)

    assert "FileNotFoundError" in (store.problem or "")


@pytest.mark.parametrize("call", ["scandir", "lstat", "stat", "open", "fstat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_no_failure_of_the_system_gets_out(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        store.load(KEY)
        store.save(OTHER, PAYLOAD)
        store.why_missing(OTHER)
        store.entries()
        store.clear()

    assert store.load(KEY) in (None, PAYLOAD)


# Writers and readers at once


def write_often(folder: Path) -> None:
    store = Store(folder, ROOMY)
    for _ in range(200):
        store.save(KEY, PAYLOAD * 50)
        assert store.problem is None, store.problem


def read_until_told(folder: Path, done: Any, answers: Any) -> None:
    """Count what loads gave: nothing, the right payload, another; and the problems."""
    store, counts = Store(folder, ROOMY), {"none": 0, "right": 0, "wrong": 0}
    while not done.is_set() or counts["right"] == 0:
        loaded = store.load(KEY)
        name = "none" if loaded is None else "right" if loaded == PAYLOAD * 50 else "wrong"
        counts[name] += 1
    answers.put((counts, store.problem))


def test_two_processes_write_an_entry_while_a_third_reads_it(tmp_path: Path) -> None:
    folder, done, answers = tmp_path / "cache", SPAWN.Event(), SPAWN.Queue()
    reader = SPAWN.Process(target=read_until_told, args=(folder, done, answers))
    writers = [SPAWN.Process(target=write_often, args=(folder,)) for _ in range(2)]

    for process in (reader, *writers):
        process.start()
    for writer in writers:
        writer.join(timeout=60)
    done.set()
    counts, problem = answers.get(timeout=60)
    reader.join(timeout=60)

    assert [writer.exitcode for writer in writers] == [0, 0]
    assert counts["wrong"] == 0
    assert counts["right"] > 0
    assert problem is None
    assert os.listdir(folder) == [KEY.digest]


def save_and_die(folder: Path) -> None:
    """Be killed with the entry written, but not yet in its place."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = die  # type: ignore[assignment]  # stands in for the moment between two calls
    Store(folder, ROOMY).save(KEY, PAYLOAD)


def test_a_writer_killed_halfway_leaves_a_file_that_is_cleaned_up_when_old(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    writer = SPAWN.Process(target=save_and_die, args=(folder,))
    writer.start()
    writer.join(timeout=60)
    assert writer.exitcode == -signal.SIGKILL
    [leftover] = folder.iterdir()
    store = Store(folder, ROOMY)

    assert store.load(KEY) is None
    assert store.entries() == []
    store.save(KEY, PAYLOAD)
    assert store.load(KEY) == PAYLOAD
    assert leftover.exists()  # its writer may be alive, as far as anyone can tell

    long_ago = time.time() - 7200
    os.utime(leftover, (long_ago, long_ago))
    store.save(OTHER, PAYLOAD)
    assert sorted(os.listdir(folder)) == sorted([KEY.digest, OTHER.digest])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_shares_the_store(store: Store) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.save(OTHER, PAYLOAD)
            code = 0 if store.load(KEY) == PAYLOAD else 1
        finally:
            os._exit(code)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert store.load(OTHER) == PAYLOAD
