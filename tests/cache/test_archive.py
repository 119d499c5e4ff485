"""A whole cache as one file: the same bytes each time, and nothing but sound entries taken in."""

from __future__ import annotations

import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stator.cache import Key, Store
from stator.cache.archive import ArchiveError, Imported
from stator.cache.archive import export_entries as export
from stator.cache.archive import import_entries as import_

ROOMY = 1 << 20
KEYS = [Key.of({"graph": str(number)}) for number in range(5)]


def payload_of(key: Key) -> bytes:
    return repr(key).encode() * 20


def filled(folder: Path, keys: list[Key]) -> Store:
    store = Store(folder, ROOMY)
    for key in keys:
        store.save(key, payload_of(key))
    return store


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The file of a cache with every key."""
    path = tmp_path / "cache.zip"
    export(filled(tmp_path / "exported", KEYS), path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store to import into."""
    return Store(tmp_path / "cache", ROOMY)


def rewritten(archive: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> Path:
    """The archive with the name and bytes of each entry changed."""
    path = archive.with_name("rewritten.zip")
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(*change(name, old.read(name)))
    return path


def test_what_is_exported_is_imported(archive: Path, store: Store) -> None:
    assert import_(store, archive) == Imported(kept=5, skipped=0)
    assert [store.load(key) for key in KEYS] == [payload_of(key) for key in KEYS]


def test_an_imported_file_has_the_bytes_of_the_exported_one(archive: Path, store: Store) -> None:
    import_(store, archive)

    for key in KEYS:
        original = archive.parent / "exported" / key.digest
        assert (store.folder / key.digest).read_bytes() == original.read_bytes()


def test_the_same_entries_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    other = filled(tmp_path / "other", KEYS[::-1])

    assert export(other, tmp_path / "other.zip") == 5
    assert (tmp_path / "other.zip").read_bytes() == archive.read_bytes()
    with zipfile.ZipFile(archive) as members:
        assert {member.date_time[0] for member in members.infolist()} == {1980}


def test_an_import_keeps_what_was_there(archive: Path, store: Store) -> None:
    mine = Key.of({"graph": "mine"})
    store.save(mine, b"payload")

    import_(store, archive)

    assert store.load(mine) == b"payload"
    assert len(store.entries()) == 6


def test_an_empty_cache_makes_an_empty_archive(store: Store, tmp_path: Path) -> None:
    assert export(store, tmp_path / "empty.zip") == 0
    assert import_(store, tmp_path / "empty.zip") == Imported(kept=0, skipped=0)


def test_a_damaged_entry_is_not_exported(store: Store, tmp_path: Path) -> None:
    filled(store.folder, KEYS)
    (store.folder / KEYS[2].digest).write_bytes(b"?")

    assert export(store, tmp_path / "cache.zip") == 4


def test_damaged_entries_are_skipped_and_counted(archive: Path, store: Store) -> None:
    bad = {KEYS[1].digest, KEYS[3].digest}
    path = rewritten(archive, lambda name, data: (name, data[:-1] if name in bad else data))

    assert import_(store, path) == Imported(kept=3, skipped=2)
    assert [store.load(key) is None for key in KEYS] == [False, True, False, True, False]


def test_a_damaged_member_does_not_spoil_the_others(archive: Path, store: Store) -> None:
    whole = archive.read_bytes()
    archive.write_bytes(whole.replace(payload_of(KEYS[1]), payload_of(KEYS[1]).lower(), 1))

    assert import_(store, archive) == Imported(kept=4, skipped=1)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"../{name}",
        lambda name: f"/{name}",
        lambda name: f"below/{name}",
        lambda name: f"{name}\n",
        lambda name: name.upper(),
        lambda name: name[::-1],  # hexadecimal, but of another key
    ],
)
def test_only_the_digest_of_the_key_is_a_name(
    archive: Path, store: Store, rename: Callable[[str], str]
) -> None:
    path = rewritten(archive, lambda name, data: (rename(name), data))
    before = sorted(os.listdir(archive.parent))

    assert import_(store, path) == Imported(kept=0, skipped=5)
    assert sorted(os.listdir(archive.parent)) == before
    assert not store.folder.exists()


def test_compressed_entries_are_skipped(store: Store, tmp_path: Path) -> None:
    source = filled(tmp_path / "source", KEYS[:1])
    path = tmp_path / "small.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source.folder / KEYS[0].digest, KEYS[0].digest)

    assert import_(store, path) == Imported(kept=0, skipped=1)


def test_an_import_stays_under_the_limit(archive: Path, store: Store) -> None:
    size = (archive.parent / "exported" / KEYS[0].digest).stat().st_size
    store.limit = 3 * size

    import_(store, archive)

    assert len(store.entries()) == 3


def test_entries_larger_than_the_limit_are_skipped(archive: Path, store: Store) -> None:
    store.limit = 100

    assert import_(store, archive) == Imported(kept=0, skipped=5)


def test_a_folder_that_cannot_be_used_takes_nothing_and_says_why(
    archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    store = Store(tmp_path / "taken", ROOMY)

    assert import_(store, archive) == Imported(kept=0, skipped=5)
    assert store.problem is not None


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_file_that_is_no_archive_is_a_clear_error(
    store: Store, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ArchiveError) as caught:
        import_(store, path)

    assert "cannot be imported" in caught.value.what
    assert caught.value.where == str(path)


def test_an_archive_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "cache.zip"

    with pytest.raises(ArchiveError) as caught:
        export(filled(tmp_path / "cache", KEYS), path)

    assert "cannot be exported" in caught.value.what
    assert caught.value.where == str(path)


def test_an_export_that_fails_leaves_the_older_file(
    archive: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, listed = archive.read_bytes(), sorted(os.listdir(archive.parent))

    def full(*_: object) -> None:
        raise OSError("no space left")

    filled(store.folder, KEYS[:1])
    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(ArchiveError, match="no space left"):
        export(store, archive)

    assert archive.read_bytes() == before
    assert sorted(os.listdir(archive.parent)) == sorted([*listed, store.folder.name])


def test_a_damaged_archive_gives_sound_entries_or_a_clear_error(
    archive: Path, store: Store
) -> None:
    whole, chance, path = archive.read_bytes(), random.Random(0), archive.with_name("damaged")
    directory = whole.index(b"PK\x01\x02")  # where the list of members begins
    for number in range(600):
        data = bytearray(whole)
        start = directory if number % 2 else 0
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(start, len(data))] = chance.choice(
                (0, 0xFF, chance.randrange(256))
            )
        path.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            import_(store, path)
        except ArchiveError:
            continue
    for key in KEYS:
        assert store.load(key) in (None, payload_of(key))
    assert {entry.digest for entry in store.entries()} <= {key.digest for key in KEYS}
