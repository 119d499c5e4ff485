"""The list of passes says what the compiler does today."""

from __future__ import annotations

import re

from docs.passes import PAGE, STAGES, described
from stator.rules.all import RULES


def test_the_list_is_up_to_date() -> None:
    kept = PAGE.read_text(encoding="utf-8")

    assert described(kept) == kept, "run `make docs`"


def test_every_pass_and_every_rule_stands_in_it() -> None:
    kept = PAGE.read_text(encoding="utf-8")
    passes = [one.__name__ for _, stage in STAGES.values() for one in stage]

    assert [name for name in passes if f". {name}\n" not in kept] == []
    assert [rule.name for rule in RULES if f"**{rule.name}**" not in kept] == []


def test_the_example_of_the_page_runs() -> None:
    kept = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", kept, re.DOTALL):
        exec(code, names)
        names["handle"].remove()  # type: ignore[attr-defined]  # of the pass it registered
