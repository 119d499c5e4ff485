"""What a backward keeps is drawn: in a terminal, and on a page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.dom import minidom

import pytest

from stator.aot.partition.report import Point
from stator.debug.memory_page import (
    HEIGHT,
    MOST_LINES,
    MOST_ROWS,
    Axis,
    memory_html,
    memory_text,
)
from tests.debug.programs import CHOICES, MEBIBYTE, POINTS


def curve(text: str) -> list[str]:
    """The lines between the title and the axis, without their labels."""
    return [re.split("[│┤]", line)[1] for line in text.splitlines()[1 : 1 + HEIGHT]]


def test_an_axis_is_ticked_at_round_numbers() -> None:
    assert Axis(96, 304).ticks() == [100, 150, 200, 250, 300]
    assert Axis(0.98, 1.52).ticks() == pytest.approx([1.0, 1.2, 1.4])
    assert len(Axis.over([7.0]).ticks()) > 1


def test_the_curve_falls_and_the_choice_is_marked() -> None:
    lines = curve(memory_text(CHOICES, 100))

    marks = sorted(
        (column, row, mark)
        for row, line in enumerate(lines)
        for column, mark in enumerate(line)
        if mark != " "
    )
    assert [mark for _, _, mark in marks] == ["·", "·", "·", "●", "·"]
    assert [row for _, row, _ in marks] == sorted(row for _, row, _ in marks)


def test_the_text_says_what_was_chosen_and_why() -> None:
    text = memory_text(CHOICES, 120)

    assert "chosen: 250 MiB at the peak, 1.040 of the quickest's time, 150 MiB saved" in text
    assert "parameters and inputs: 80 MiB; 1 values are saved, 1 recomputed" in text
    assert "weight 64 MiB, logits 20 MiB" in text
    (line,) = (line for line in text.splitlines() if "aten.mm" in line)
    assert line.split() == [
        *("32.00", "aten.mm", "h.0.mlp", "model.py:7", "saved"),
        *("a", "product", "is", "dear"),
    ]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, memory_text(CHOICES, width).splitlines())) <= width


def test_a_long_path_keeps_the_number_of_its_line() -> None:
    path = f"{'folder/' * 14}model.py:4711"
    values = tuple(replace(value, line=path) for value in CHOICES.values)

    assert ":4711" in re.sub(r"\s", "", memory_text(replace(CHOICES, values=values), 100))


def test_a_terminal_shows_the_largest_values_only() -> None:
    many = replace(CHOICES, values=CHOICES.values[:1] * (MOST_LINES + 3))

    text = memory_text(many, 100)

    assert text.count("aten.mm") == MOST_LINES
    assert text.endswith("and 3 smaller ones")


def test_an_empty_column_takes_no_room() -> None:
    nowhere = replace(CHOICES, values=tuple(replace(v, line="") for v in CHOICES.values))

    assert " line " in memory_text(CHOICES, 100)
    assert " line " not in memory_text(nowhere, 100)


class Page(HTMLParser):
    """Tags of a page, with whether each was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = memory_html([CHOICES, CHOICES])
    page = Page(text)

    assert page.open == []
    assert page.links == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert page.seen.count("svg") == 2
    assert "x &lt; y &amp; free" in text


def test_every_point_has_its_place_and_a_tooltip() -> None:
    (drawing,) = re.findall("<svg.*?</svg>", memory_html([CHOICES]), re.DOTALL)
    circles = minidom.parseString(drawing).getElementsByTagName("circle")

    kinds = [circle.getAttribute("class") for circle in circles]
    assert sorted(kinds) == ["chosen", *["point"] * 4]
    by_peak = sorted(circles, key=lambda circle: float(circle.getAttribute("cx")))
    heights = [float(circle.getAttribute("cy")) for circle in by_peak]
    assert heights == sorted(heights)  # further down is less time
    said = [circle.getElementsByTagName("title")[0].firstChild for circle in by_peak]
    assert [str(text and text.nodeValue)[:3] for text in said] == [
        "100",
        "150",
        "200",
        "250",
        "300",
    ]


def test_a_page_shows_the_largest_values_only() -> None:
    many = replace(CHOICES, values=CHOICES.values[:1] * (MOST_ROWS + 2))

    text = memory_html([many])

    assert text.count("<tr class=") == MOST_ROWS
    assert "and 2 smaller ones" in text


def test_a_choice_that_is_on_no_curve_is_shown() -> None:
    elsewhere = Point(10 * MEBIBYTE, 120 * MEBIBYTE, 2.0, "all again")

    text = memory_text(replace(CHOICES, chosen=elsewhere), 80)

    assert "●" in text
    assert text.count("·") == len(POINTS)


def test_a_single_point_is_drawn_too() -> None:
    alone = replace(CHOICES, points=POINTS[:1], chosen=POINTS[0])

    assert "●" in memory_text(alone, 80)
    assert 'class="chosen"' in memory_html([alone])
