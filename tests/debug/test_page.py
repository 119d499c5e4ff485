"""The page: whole by itself, and in a browser without a complaint, whatever the size."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.screenshot import Opened, bert_explained, browser, chromium, opened
from stator.debug.page import page
from tests.debug.reports import made_up

MOST_BYTES = 5 << 20
VIEWS = ("overview", "graphs", "kernels", "calls", "unfused", "memory", "saved", "source")

in_a_browser = pytest.mark.skipif(browser() is None, reason="no Chromium here, or no playwright")


def test_the_page_holds_its_data() -> None:
    data = made_up(nodes=20, kernels=4)

    text = page(data)

    found = re.search(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]+)</script>', text)
    assert found is not None
    assert json.loads(gzip.decompress(base64.b64decode(found[1]))) == data
    assert not re.search(r"{(style|script|data)}", text), "every mark is filled"


def test_the_page_names_nothing_outside_of_itself() -> None:
    text = page(made_up(nodes=20, kernels=4))

    assert re.findall(r"(?:src|href)=[\"'](?!data:)[^\"']*", text) == []
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def test_equal_reports_make_equal_pages() -> None:
    assert page(made_up(nodes=20, kernels=4)) == page(made_up(nodes=20, kernels=4))


# --- in a browser ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step of BERT-base, all twelve layers of it; narrow, so that it runs quickly."""
    explained = bert_explained(width=48, inner=96, vocabulary=101, length=16)
    file: Path = explained.save(tmp_path_factory.mktemp("page") / "bert.html")
    return file


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def seen(started: Any, bert: Path) -> Iterator[Opened]:
    with opened(started, bert) as found:
        yield found


@in_a_browser
def test_bert_in_training_opens_without_a_complaint(bert: Path, seen: Opened) -> None:
    assert bert.stat().st_size < MOST_BYTES
    for view in VIEWS:
        seen.go("0", view)
        assert seen.page.inner_text("#view").strip(), view
        assert seen.page.get_attribute("#tabs a[aria-current]", "href") == f"#0/{view}"
    assert "NaN" not in seen.page.inner_html("#view")
    assert seen.complaints == []


@in_a_browser
def test_search_finds_kernels_lines_and_nodes(seen: Opened) -> None:
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("gelu forward")
    kinds = set(
        seen.page.eval_on_selector_all(
            "#found a span:first-child", "all => all.map(one => one.textContent)"
        )
    )
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_timeout(100)

    assert {"kernel", "node"} <= kinds
    assert seen.page.url.split("#")[1].startswith("0/kernels/forward/kernel_")
    assert "gelu" in seen.page.inner_text(".list .row.here")
    assert not seen.page.is_visible("#found")

    seen.page.fill("#search", "no such thing anywhere")
    assert "0 found" in seen.page.inner_text("#found")
    assert seen.complaints == []


@in_a_browser
def test_a_kernel_leads_to_operators_lines_and_code_and_back(seen: Opened) -> None:
    page = seen.page
    seen.go("0", "kernels")
    page.click(".list .row:nth-child(2)")
    page.wait_for_timeout(100)
    kernel = page.inner_text("h2").split(",")[0]

    assert f"kernel {kernel}" in page.inner_text("pre.loops")
    page.click("summary:has-text('LLVM')")
    assert "define" in page.inner_text("pre.code")

    page.click("h3:has-text('Operators') + ul a")  # to the node in its graph
    page.wait_for_timeout(200)
    assert "/graphs/" in page.url
    row = page.inner_text(".list .row.here")
    assert kernel in row

    page.click(".list .row.here a.chip:last-child")  # to the user's line
    page.wait_for_timeout(100)
    assert "/source/" in page.url
    page.click(f"h3:has-text('Kernels') + ul a:text-is('{kernel}')")  # and back
    page.wait_for_timeout(100)
    assert page.inner_text("h2").split(",")[0] == kernel
    assert seen.complaints == []


@in_a_browser
def test_graphs_before_and_after_a_pass_stand_side_by_side(seen: Opened) -> None:
    page = seen.page
    seen.go("0", "graphs", "joint")
    changed = "joint: " + page.inner_text(".passes a[aria-current] span:first-child")

    assert page.inner_text("h3:has(button)").startswith(changed)
    assert page.locator(".diff .del").count() > 0
    hidden = page.locator(".diff .gap").count()
    assert hidden > 0
    page.click("button:has-text('show all lines')")
    assert page.locator(".diff .gap").count() == 0
    assert seen.complaints == []


@in_a_browser
def test_memory_is_drawn_over_the_steps(seen: Opened) -> None:
    seen.go("0", "memory")

    assert seen.page.locator("svg polygon.area").count() == 6  # three kinds, two directions
    seen.page.hover("svg >> nth=0", position={"x": 400, "y": 60})
    assert re.search(r"step \d+:", seen.page.inner_text("section h3"))
    assert seen.complaints == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "large.html"
    file.write_text(page(made_up(nodes=5000, kernels=1500)), encoding="utf-8")
    return file


@in_a_browser
def test_five_thousand_nodes_are_read_a_screen_at_a_time(started: Any, large: Path) -> None:
    with opened(started, large) as seen:
        page: Any = seen.page
        for view in VIEWS:
            seen.go("0", view)
            assert page.evaluate("document.getElementsByTagName('*').length") < 4000, view
        seen.go("0", "graphs", "forward", "2", "add_4321")
        assert "add_4321:" in page.inner_text(".list .row.here")
        seen.page.fill("#search", "add_4999")
        assert "add_4999:" in page.inner_text("#found")
        seen.go("0", "source", "model%2Ffile_3.py%3A4")
        assert "<b>not bold</b>" in page.inner_text("pre")
        assert seen.complaints == []


@in_a_browser
@pytest.mark.parametrize(
    "wrong",
    ["<script>console.error('wrong')</script>", "<script>throw 1</script>", "<img src='no.png'>"],
)
def test_what_is_wrong_with_a_page_is_heard(started: Any, tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "wrong.html"
    file.write_text(f"<body data-ready><p>something</p>{wrong}</body>", encoding="utf-8")

    with opened(started, file) as seen:
        assert seen.complaints != []


@in_a_browser
def test_a_page_of_nothing_says_so(started: Any, tmp_path: Path) -> None:
    file = tmp_path / "empty.html"
    left = {"function": "forward", "line": "model.py:3", "reason": "Attempted to wrap <LSTM>"}
    data = {"graphs": [], "recompilations": [], "uncaptured": [left], "sources": {}}
    file.write_text(page(data), encoding="utf-8")

    with opened(started, file) as seen:
        told = seen.page.inner_text("#view")
        assert "Nothing was compiled" in told
        assert "Attempted to wrap <LSTM>" in told
        assert seen.complaints == []
