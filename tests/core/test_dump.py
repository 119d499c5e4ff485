"""Files of a dump: written on request, and a clear error where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from stator.core.dump import Dump
from stator.errors import OptionError


def never() -> str:
    raise AssertionError("nobody wants this text")


def test_without_a_folder_no_text_is_made() -> None:
    Dump().write("graph.txt", never)


def test_the_folder_is_made_on_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"

    Dump(folder).write("graph.txt", lambda: "a\nb")

    assert (folder / "graph.txt").read_text() == "a\nb\n"


def test_a_file_ends_with_one_newline_and_lies_in_the_folder_itself(tmp_path: Path) -> None:
    Dump(tmp_path).write("some/graph.txt", lambda: "a\n\n")

    assert (tmp_path / "some_graph.txt").read_text() == "a\n"


def test_a_folder_that_cannot_be_made_is_an_option_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")

    with pytest.raises(OptionError) as caught:
        Dump(tmp_path / "taken" / "inside").write("graph.txt", lambda: "text")

    assert "cannot be written" in caught.value.what
    assert caught.value.where == str(tmp_path / "taken" / "inside" / "graph.txt")
    assert "STATOR_DUMP" in (caught.value.hint or "")
