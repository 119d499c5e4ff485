"""The tour says what the compiler does today."""

from __future__ import annotations

import re

from docs.tour import TOUR, filled, tour


def without_assembly(page: str) -> str:
    """The page without what depends on the version of LLVM."""
    return re.sub(r"```asm\n.*?```", "```asm```", page, flags=re.DOTALL)


def test_the_tour_is_up_to_date() -> None:
    kept = TOUR.read_text(encoding="utf-8")

    assert without_assembly(tour(kept)) == without_assembly(kept), "run `make docs`"


def test_no_excerpt_is_empty() -> None:
    kept = TOUR.read_text(encoding="utf-8")

    assert kept.count("<!-- dump: ") == 13
    assert not re.search(r"```\w+\n```", kept)


def test_excerpts_are_replaced_and_prose_is_not() -> None:
    page = "Look:\n<!-- dump: a_*.txt -->\n```text\nold\n```\nAfter `old`.\n"

    assert filled(page, {"a_b.txt": "new\n", "c.txt": ""}) == page.replace("\nold\n", "\nnew\n")
