"""Scripts that are explained: run as Python would, and told whatever they compiled."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from stator.cli import app

TRAINING = """
import sys
import torch

def loss(x, weight):
    return torch.softmax(x @ weight, -1).square().sum()

x, weight = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
compiled = torch.compile(loss, backend="stator")
for _ in range(3):
    compiled(x, weight).backward()
sys.exit(int(sys.argv[1]))
"""


def test_a_script_is_explained_in_all_forms_however_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING, encoding="utf-8")
    data, page = tmp_path / "it.json", tmp_path / "it.html"

    options = ["--json", str(data), "--html", str(page)]
    done = CliRunner().invoke(app, ["explain", *options, str(script), "3"])

    assert done.exit_code == 1
    assert "the script ended with status 3" in done.output
    assert "training.py:6" in done.output
    (graph,) = json.loads(data.read_text())["graphs"]
    assert [half["name"] for half in graph["halves"]] == ["forward", "backward"]
    assert all(kernel["runs"] == 3 for half in graph["halves"] for kernel in half["kernels"])
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_script_that_compiles_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('idle')", encoding="utf-8")

    done = CliRunner().invoke(app, ["explain", str(script)])

    assert done.exit_code == 1
    assert "compiled nothing with Stator" in done.output
