"""Entries in a folder: kept, found again, identical everywhere, and never more than the limit."""

from __future__ import annotations

import json
import os
import stat
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stator.cache import Key, Store, clear
from stator.cache.store import MAGIC, is_sound

KEY = Key.of({"graph": "a1", "options": "b2", "torch": "2.11"})
PAYLOAD = b"\x00code\n\xff" * 50
ROOMY = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", ROOMY)


def numbered(number: int) -> Key:
    return Key.of({"graph": str(number)})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def used(store: Store, key: Key, seconds_ago: float) -> None:
    """Pretend that the entry was used some time ago."""
    when = time.time() - seconds_ago
    os.utime(store.folder / key.digest, (when, when))


@pytest.mark.parametrize("payload", [b"", b"\n", PAYLOAD, bytes(300_000)])
def test_what_is_saved_is_loaded(store: Store, payload: bytes) -> None:
    store.save(KEY, payload)

    assert store.load(KEY) == payload
    assert store.problem is None


@given(parts=st.dictionaries(st.text(), st.text()), payload=st.binary())
def test_any_key_and_payload_make_a_sound_file(
    tmp_path_factory: pytest.TempPathFactory, parts: dict[str, str], payload: bytes
) -> None:
    store, key = Store(tmp_path_factory.mktemp("cache"), ROOMY), Key.of(parts)

    store.save(key, payload)

    assert store.load(key) == payload
    assert is_sound((store.folder / key.digest).read_bytes(), key.digest)


def test_a_second_store_on_the_folder_finds_the_entries(store: Store) -> None:
    store.save(KEY, PAYLOAD)

    assert Store(store.folder, ROOMY).load(KEY) == PAYLOAD


def test_a_later_save_replaces_the_payload(store: Store) -> None:
    store.save(KEY, b"old")
    store.save(KEY, b"new")

    assert store.load(KEY) == b"new"
    assert len(store.entries()) == 1


def test_without_a_folder_everything_is_missing_and_nothing_is_made(store: Store) -> None:
    assert store.load(KEY) is None
    assert store.entries() == []
    assert store.clear() == 0
    assert store.why_missing(KEY) == "the cache is empty"
    assert store.problem is None
    assert not store.folder.exists()


def test_an_entry_is_a_magic_line_a_line_of_json_and_the_payload(store: Store) -> None:
    store.save(KEY, PAYLOAD)

    data = (store.folder / KEY.digest).read_bytes()
    header, payload = data.removeprefix(MAGIC).split(b"\n", 1)
    assert payload == PAYLOAD
    assert json.loads(header) == {
        "key": dict(KEY.parts),
        "length": len(PAYLOAD),
        "sha256": sha256(PAYLOAD).hexdigest(),
    }


def test_the_same_entry_has_the_same_bytes_in_every_folder(tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one", ROOMY), Store(tmp_path / "some" / "other", 2 * ROOMY)

    one.save(KEY, PAYLOAD)
    other.save(numbered(1), b"before")
    other.save(Key.of(dict(reversed(KEY.parts))), PAYLOAD)

    assert (one.folder / KEY.digest).read_bytes() == (other.folder / KEY.digest).read_bytes()
    assert str(tmp_path).encode() not in (one.folder / KEY.digest).read_bytes()


def test_only_this_user_may_look_inside(store: Store) -> None:
    before = os.umask(0)
    try:
        store.save(KEY, PAYLOAD)
    finally:
        os.umask(before)

    assert mode(store.folder) == 0o700
    assert mode(store.folder / KEY.digest) == 0o600


def test_a_save_leaves_nothing_but_the_entry(store: Store) -> None:
    store.save(KEY, PAYLOAD)

    assert os.listdir(store.folder) == [KEY.digest]


def test_the_least_recently_used_entries_make_room(store: Store) -> None:
    keys = [numbered(number) for number in range(4)]
    for age, key in enumerate(keys):
        store.save(key, bytes(1000))
        used(store, key, seconds_ago=100 * (age + 1))  # the first is the latest used
    store.limit = 3 * store.entries()[0].size

    store.save(numbered(4), bytes(1000))

    kept = [key for key in [*keys, numbered(4)] if store.load(key) is not None]
    assert kept == [keys[0], keys[1], numbered(4)]
    assert store.problem is None


def test_a_load_counts_as_use(store: Store) -> None:
    for number in range(3):
        store.save(numbered(number), bytes(1000))
        used(store, numbered(number), seconds_ago=300 - number)
    store.limit = 3 * store.entries()[0].size

    store.load(numbered(0))  # the oldest until now
    store.save(numbered(3), bytes(1000))

    assert store.load(numbered(0)) is not None
    assert store.load(numbered(1)) is None


def test_entries_come_latest_used_first(store: Store) -> None:
    for number, age in enumerate((200, 100, 300)):
        store.save(numbered(number), bytes(number))
        used(store, numbered(number), seconds_ago=age)

    digests = [entry.digest for entry in store.entries()]

    assert digests == [numbered(number).digest for number in (1, 0, 2)]


def test_the_total_stays_under_the_limit_and_the_new_entry_stays(tmp_path: Path) -> None:
    store = Store(tmp_path, 5000)
    for number in range(30):
        store.save(numbered(number), bytes(37 * number))

        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
        assert store.load(numbered(number)) is not None


def test_the_new_entry_stays_though_others_claim_to_be_newer(tmp_path: Path) -> None:
    store = Store(tmp_path, 3000)
    for number in range(2):
        store.save(numbered(number), bytes(1000))
        used(store, numbered(number), seconds_ago=-1e6)  # by a clock that was ahead

    store.save(numbered(2), bytes(1000))

    assert store.load(numbered(2)) is not None
    assert len(store.entries()) == 2


def test_an_entry_larger_than_the_limit_is_not_stored(store: Store) -> None:
    store.save(numbered(1), b"small")
    store.limit = 1000

    store.save(KEY, bytes(1001))

    assert store.load(KEY) is None
    assert store.load(numbered(1)) == b"small"
    assert "exceeds" in (store.problem or "")


def test_clear_removes_entries_and_leftovers_and_nothing_else(store: Store) -> None:
    for number in range(3):
        store.save(numbered(number), PAYLOAD)
    (store.folder / ".writing-abc").write_bytes(b"half")
    (store.folder / "notes.txt").write_text("mine")

    assert clear(store) == 3
    assert os.listdir(store.folder) == ["notes.txt"]


def test_files_of_other_names_and_kinds_are_no_entries(store: Store) -> None:
    store.save(KEY, PAYLOAD)
    for name in ("readme", KEY.digest.upper(), f"{KEY.digest}0", KEY.digest[:-1] + "g"):
        (store.folder / name).write_bytes(b"?")
    (store.folder / ("0" * 64)).mkdir()
    (store.folder / ("1" * 64)).symlink_to(KEY.digest)

    assert [entry.digest for entry in store.entries()] == [KEY.digest]


def test_the_parts_that_differ_from_the_nearest_entry_are_named(store: Store) -> None:
    for parts in (
        {"graph": "a1", "options": "b2", "torch": "2.10"},
        {"graph": "zz", "options": "zz", "torch": "2.9"},
    ):
        store.save(Key.of(parts), PAYLOAD)

    assert store.why_missing(KEY) == "torch differs from the nearest entry"
    assert store.why_missing(Key.of({**dict(KEY.parts), "graph": "new"})) == (
        "graph, torch differ from the nearest entry"
    )


def test_a_part_that_an_older_entry_lacks_is_named(store: Store) -> None:
    store.save(KEY, PAYLOAD)

    assert "cpu" in store.why_missing(Key.of({**dict(KEY.parts), "cpu": "avx512"}))


def test_only_the_entries_used_last_are_compared(store: Store) -> None:
    near = Key.of({**dict(KEY.parts), "torch": "2.10"})
    store.save(near, PAYLOAD)
    used(store, near, seconds_ago=1000)
    for number in range(40):
        store.save(numbered(number), b"")

    assert store.why_missing(KEY) == "graph, options, torch differ from the nearest entry"


def test_a_stored_key_differs_in_nothing(store: Store) -> None:
    store.save(KEY, PAYLOAD)

    assert store.why_missing(KEY).startswith("no part differs")


def test_heads_that_cannot_be_read_are_passed_over(store: Store) -> None:
    store.save(numbered(1), PAYLOAD)
    (store.folder / ("0" * 64)).write_bytes(b"not an entry")
    (store.folder / ("1" * 64)).write_bytes(MAGIC + b"[" * 100_000 + b"\n")
    (store.folder / ("2" * 64)).write_bytes(MAGIC + b'{"key": {"graph": 1}}\n')

    assert store.why_missing(KEY) == "graph, options, torch differ from the nearest entry"
