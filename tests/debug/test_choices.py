"""A script runs in a process of its own; what its backwards keep comes back and is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stator.cli import app
from stator.debug.choices import Ran, choices_of, read, written
from tests.debug.programs import CHOICES

# A record that a compilation would leave; what comes after the choices is the script's own.
SCRIPT = f"""
import sys
from pathlib import Path
from stator.core.events import start_compilation
from stator.debug.choices import read

start_compilation()
start_compilation().choices = read({written([CHOICES])!r})[0]
assert sys.argv[1:] == ["--output", "mine"]
assert sys.path[0] == str(Path(__file__).parent)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def shown(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["memory", *arguments])


def test_choices_arrive_as_they_were_sent() -> None:
    assert read(written([CHOICES, CHOICES])) == (CHOICES, CHOICES)


def test_choices_of_a_script_are_collected(script: str) -> None:
    assert choices_of([script, "--output", "mine"]) == Ran(0, (CHOICES,))


def test_a_script_s_memory_is_shown_and_written(script: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    result = shown("--output", str(page), script, "--output", "mine")

    assert result.exit_code == 0, result.output
    assert "program 1 of 1" in result.output
    assert "chosen: 250 MiB at the peak" in result.output
    assert "aten.gelu" in page.read_text(encoding="utf-8")


def test_what_was_found_before_a_script_failed_is_shown(script: str, tmp_path: Path) -> None:
    result = shown("--output", str(tmp_path / "page.html"), script)

    assert result.exit_code == 1
    assert "chosen: 250 MiB at the peak" in result.output
    assert "the script ended with status 1" in result.output


def test_a_script_without_a_backward_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "idle.py"
    file.write_text("pass")

    result = shown("--output", str(tmp_path / "page.html"), str(file))

    assert result.exit_code == 1
    assert "nothing with a backward was compiled" in result.output
    assert not (tmp_path / "page.html").exists()


TRAINING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
step = torch.compile(model, backend="stator", options={"memory_budget": 0.5, "cache": True})
if __name__ == "__main__":
    step(torch.randn(256, 64)).square().mean().backward()
"""


def test_a_script_that_trains_is_shown_whatever_the_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATOR_CACHE_DIR", str(tmp_path / "cache"))
    file, page = tmp_path / "train.py", tmp_path / "page.html"
    file.write_text(TRAINING)

    for _ in range(2):
        result = shown("--output", str(page), str(file))

        assert result.exit_code == 0, result.output
        assert "program 1 of 1" in result.output
        assert "addmm" in result.output
        assert 'class="chosen"' in page.read_text(encoding="utf-8")
