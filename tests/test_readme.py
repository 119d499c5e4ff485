"""The examples in README.md run as printed."""

import re
from typing import Any

import pytest

from tests.style.tree import ROOT


def test_the_example_compiles_trains_and_prints_the_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)

    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    assert "trace" in capsys.readouterr().out
