"""A process of its own leaves a text, or says why it died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.alone import DiedError, left_by, why_died

WRITES = """
import pathlib, sys
name, file, *options = sys.argv[1:]
pathlib.Path(file).write_text(f"{name} {options}")
"""


def test_what_a_process_leaves_is_read() -> None:
    assert left_by(WRITES, ["me"], ["--tiny"], os.environ) == "me ['--tiny']"


def test_a_process_that_leaves_nothing_raises_what_it_said() -> None:
    with pytest.raises(DiedError, match=r"^no$"):
        left_by("raise SystemExit('no')", [], [], os.environ)


def test_a_process_that_died_says_why(tmp_path: Path) -> None:
    log = tmp_path / "row.log"
    log.write_text("Traceback\nValueError: no\n\n")

    assert why_died(-11, log) == "died of SIGSEGV after: ValueError: no"
    assert why_died(1, log) == "ValueError: no"
    log.write_text("")
    assert why_died(3, log) == "exit status 3"
