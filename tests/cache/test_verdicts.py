"""What was measured is found again: by this process, and by others."""

from __future__ import annotations

from pathlib import Path

import pytest

from stator.cache import verdicts
from stator.cache.key import Key
from stator.cache.store import Store
from stator.cache.verdicts import StoredVerdicts, verdicts_of
from stator.options import Options

QUESTION = {"verdict": "kernel", "card": "a card"}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_found", {})


def test_an_answer_is_found_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(cache_dir=tmp_path)
    verdicts_of(options).keep(QUESTION, "[1, [2.0]]")
    monkeypatch.setattr(verdicts, "_found", {})

    assert verdicts_of(options).find(QUESTION) == "[1, [2.0]]"
    assert verdicts_of(options).find({**QUESTION, "card": "another"}) is None


def test_without_a_cache_this_process_knows_it(tmp_path: Path) -> None:
    options = Options(cache=False, cache_dir=tmp_path)

    verdicts_of(options).keep(QUESTION, "answer")

    assert verdicts_of(options).find(QUESTION) == "answer"
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = StoredVerdicts(Store(tmp_path / "file", 1 << 20))

    kept.keep(QUESTION, "answer")

    assert kept.find(QUESTION) == "answer"


def test_no_program_is_compared_with_a_verdict(tmp_path: Path) -> None:
    options = Options(cache_dir=tmp_path)
    verdicts_of(options).keep(QUESTION, "answer")
    store = Store(tmp_path, 1 << 20)

    assert store.why_missing(Key.of({"graph": "g"})) == "the cache is empty"
