"""Scripts that the minifier writes run in a process of their own, and so does the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.faults import planted
from stator.cli import app
from tests.debug.test_minifier import number_of

ROOT = Path(__file__).parents[2]

TRAINING = """
import torch

layer = torch.nn.Linear(8, 8)


@torch.compile(backend="stator")
def program(x):
    for _ in range(3):
        x = torch.tanh(layer(x)) + x.sin()
    return x.sum(-1), x


program(torch.randn(4, 8))[0].sum().backward()
"""


def run(script: Path, fault: int | None) -> subprocess.CompletedProcess[str]:
    """A script in a fresh process, whose compiler has a bug or none."""
    environment = {name: value for name, value in os.environ.items() if name != "STATOR_FAULT"}
    environment["PYTHONPATH"] = str(ROOT)
    if fault is not None:
        environment["STATOR_FAULT"] = f"benchmarks.bugs:plant:{fault}"
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )


def test_a_script_is_watched_minimised_and_what_is_written_runs(tmp_path: Path) -> None:
    file, output = tmp_path / "training.py", tmp_path / "small"
    file.write_text(TRAINING)
    number = number_of("code of cos, too_busy")  # needed by the backward of sin alone
    with planted(number):
        environment = {"PYTHONPATH": str(ROOT)}
        command = ["minify", "--output", str(output), str(file)]
        result = CliRunner().invoke(app, command, env=environment)
    assert result.exit_code == 0, result.output
    assert "no code for cos" in result.output

    script = output / "repro.py"
    text = script.read_text()
    assert "sin" in text
    assert "linear" not in text.partition("def inputs")[0].replace("linear_", "")
    assert not (output / "tensors.pt").exists()

    failing = run(script, number)
    assert failing.returncode == 1, failing.stderr
    assert "no code for cos" in failing.stdout
    fixed = run(script, None)
    assert fixed.returncode == 0, fixed.stderr


def test_a_script_that_runs_well_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fine.py"
    file.write_text("pass")

    result = CliRunner().invoke(app, ["minify", "--output", str(tmp_path / "out"), str(file)])

    assert result.exit_code == 2
    assert "no graph of the script failed" in " ".join(result.output.split())


def test_a_search_that_was_not_begun_is_not_resumed(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["minify", "--output", str(tmp_path), "--resume"])

    assert result.exit_code == 2
    assert "no search was begun" in " ".join(result.output.split())
