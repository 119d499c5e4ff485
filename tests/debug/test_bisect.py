"""The guilty rewrite is found by running a script with fewer and fewer of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stator.cli import app
from stator.debug.bisect import bisect
from stator.errors import StatorError

SCRIPT = '''
import sys
import torch
import stator

aten = torch.ops.aten


@stator.rule(example=lambda: (torch.randn(3),))
def right(x: torch.Tensor) -> stator.Rewrite:
    """-(-x)  -->  x"""
    return stator.Rewrite(before=aten.neg.default(aten.neg.default(x)), after=x + 0)


@stator.rule(example=lambda: (torch.randn(3),))
def wrong(x: torch.Tensor) -> stator.Rewrite:
    """exp(sin(x))  -->  exp(cos(x))"""
    return stator.Rewrite(
        before=aten.exp.default(aten.sin.default(x)), after=aten.exp.default(aten.cos.default(x))
    )


for one in (right, wrong):
    stator.passes.register("joint", one)


def program(x):
    return (-(-x.abs())).sin().exp()


x = torch.randn(5)
ours = stator.compile(program, strict=True)(x)
sys.exit(0 if torch.allclose(ours, program(x)) else 1)
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def test_the_wrong_rewrite_is_found(script: str) -> None:
    result = CliRunner().invoke(app, ["bisect", script])

    assert result.exit_code == 0, result.output
    assert "wrong: exp" in result.output
    assert "right" not in result.output


def test_a_script_that_does_not_fail_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fine.py"
    file.write_text("pass")
    with pytest.raises(StatorError, match="does not fail"):
        bisect([str(file)])


def test_a_script_that_always_fails_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text("raise SystemExit(3)")
    with pytest.raises(StatorError, match="in eager mode too"):
        bisect([str(file)])
