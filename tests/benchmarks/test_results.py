"""RESULTS.md keeps every section but the one that is written."""

from pathlib import Path

import pytest

from benchmarks.results import markdown_table, write_section


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("top\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\nkept\n<!-- /b -->\n")

    write_section("a", r"new \1", file)

    assert file.read_text() == (
        "top\n<!-- a -->\nnew \\1\n<!-- /a -->\n<!-- b -->\nkept\n<!-- /b -->\n"
    )


def test_a_section_without_markers_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("<!-- a -->\n")

    with pytest.raises(ValueError, match="no section <!-- a -->"):
        write_section("a", "new", file)


def test_a_table_has_a_rule_under_its_headings() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
