"""The picture of `stator explain`'s page in README.md: BERT in training, opened in Chromium.

`python -m docs.screenshot` writes docs/explain.png anew, where there is a browser.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

PICTURE: Final = Path(__file__).with_name("explain.png")
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


@dataclass(slots=True)
class Opened:
    """A page in a browser, and what it complained of."""

    page: Any  # playwright's
    complaints: list[str] = field(default_factory=list)

    def go(self, *parts: str) -> None:
        """Show a view, as a link would."""
        self.page.evaluate("address => { location.hash = address }", "/".join(parts))
        self.page.wait_for_timeout(100)


def browser() -> str | None:
    """Where Chromium is; None if there is none, or nothing to drive it with."""
    try:
        import playwright.sync_api as _  # noqa: F401
    except ImportError:
        return None
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Without the sandbox, which root may not have; the pages are our own.
        started = driver.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(started: Any, file: Path, width: int = 1280, height: int = 800) -> Iterator[Opened]:
    """A page of this machine in a browser, ready to be looked at."""
    page = started.new_page(viewport={"width": width, "height": height})
    seen = Opened(page)
    page.on("console", lambda said: seen.complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda asked: _note_fetch(asked.url, file, seen))
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("body[data-ready]")
    yield seen
    page.close()


def _note_fetch(address: str, file: Path, seen: Opened) -> None:
    if not address.startswith(("data:", "blob:")) and address != file.resolve().as_uri():
        seen.complaints.append(f"fetches {address}")


def bert_explained(runs: int = 2, **sizes: int) -> Any:
    """An explanation of a training step of BERT-base; `sizes` other than its own."""
    from benchmarks.models.text import BERT_BASE, bert
    from stator.debug.explain import watched

    module, inputs = bert(replace(BERT_BASE, **sizes), True)
    compiled = torch.compile(module.train(), backend="stator", options={"explain": True})
    with watched() as seen:
        for _ in range(runs):
            compiled(*inputs).backward()
    return seen.explanation()


def main() -> None:
    """Write the picture."""
    if browser() is None:
        sys.exit("there is no Chromium here, or no playwright")
    file = bert_explained(runs=6).save(PICTURE.with_suffix(".html"))
    with chromium() as started, opened(started, file, 1280, 680) as seen:
        seen.go("0", "kernels")
        seen.page.click(".list .row:nth-child(6)")
        seen.page.wait_for_timeout(300)
        seen.page.screenshot(path=PICTURE)
    file.unlink()


if __name__ == "__main__":
    main()
