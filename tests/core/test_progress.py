"""The bar: on a terminal, when it takes long, and not otherwise."""

from __future__ import annotations

import io
import re
import time

import pytest

from stator.core import progress
from stator.core.events import Compilation


class Terminal(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def run(
    monkeypatch: pytest.MonkeyPatch, err: io.StringIO, *, patience: float, **wishes: bool
) -> str:
    """What a compilation of 0.4 seconds writes."""
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    record = Compilation()
    with progress.progress_shown(record, 2, **wishes), record.stage("forward/plan"):
        time.sleep(0.4)
    return err.getvalue()


def test_a_long_compilation_shows_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(monkeypatch, Terminal(), patience=0.05)

    assert "forward/plan" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_a_short_one_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Terminal(), patience=2.0) == ""


def test_no_terminal_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, io.StringIO(), patience=0.05) == ""


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Terminal(), patience=0.05, wanted=False) == ""


def test_what_fails_inside_is_raised_and_the_next_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(ValueError, match="inside"), progress.progress_shown(Compilation(), 1):
        raise ValueError("inside")

    assert run(monkeypatch, Terminal(), patience=0.05)


def test_of_two_at_once_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with progress.progress_shown(Compilation(), 1):
        assert run(monkeypatch, Terminal(), patience=0.05) == ""
