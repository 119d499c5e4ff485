"""What every pass and every rule does to its example, as text: a change is seen, and meant.

`pytest tests/golden --update-golden` writes the texts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from torch import fx

from docs.passes import STAGES, before_and_after, calls_text, rule_example
from stator.graph.edit import WEIGHT
from stator.graph.rules import Rule
from stator.graph.run import Ctx
from stator.ops.libraries import onednn_linear
from stator.passes.joint.drop_noops import drop_noops
from stator.passes.post_grad.share_subexpressions import share_subexpressions
from stator.patterns import fwd_only, joint_fwd_bwd
from stator.pipeline import FREEZING
from stator.rules.all import RULES
from tests.golden.refusals import REFUSALS
from tests.golden.rewrites import CAPTURED, JOINT, TRACED, Example
from tests.passes.freezing.ways import expected_ways
from tests.passes.pre_grad.test_fuse_attention import captured

FOLDER: Final = Path(__file__).parent / "passes"
REFUSED: Final = Path(__file__).parent / "refused"
WITH_ONEDNN: Final = (
    "linear_to_onednn",
    "fuse_conv_activation",
    "add_into_convolution",
    "pack_linear",
    "pack_convolution",
    "pack_lstm",
    "int8_linear",
    "int8_convolution",
)


def of_rule(rule: Rule) -> str:
    return f"# {rule.equation}\n{rule_example(rule)}\n"


def of_captured(example: Example) -> str:
    module = captured(example.program, *example.arguments()).module
    return before_and_after(module.graph, example.pass_, example.options) + "\n"


def of_joint(example: Example) -> str:
    module = joint_fwd_bwd(example.program, example.arguments())
    return before_and_after(module.graph, example.pass_, example.options) + "\n"


def of_traced(example: Example) -> str:
    graph = traced(example)
    with expected_ways():  # a text does not depend on what is the fastest here
        return before_and_after(graph, example.pass_, example.options) + "\n"


def traced(example: Example) -> fx.Graph:
    graph = fwd_only(example.program, example.arguments()).graph
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        if number in example.weights:
            node.meta[WEIGHT] = True
    return graph


def of_refusals(pass_: str) -> str:
    return "\n".join(of_refusal(one) for one in REFUSALS if one.name == pass_)


def of_refusal(example: Example) -> str:
    graph, ctx = traced(example), Ctx(example.options)
    before = calls_text(graph, own_names=True)
    with expected_ways():
        assert example.pass_(graph, ctx) == 0
    assert calls_text(graph, own_names=True) == before, "it is left as it was"
    notes = "".join(f"    {note}\n" for note in ctx.record.notes)
    return f"{example.program.__doc__}\n{before}\nnoted\n{notes}"


TEXTS: Final[dict[str, Callable[[], str]]] = {
    **{rule.name: partial(of_rule, rule) for rule in RULES},
    **{example.name: partial(of_captured, example) for example in CAPTURED},
    **{example.name: partial(of_joint, example) for example in JOINT},
    **{example.name: partial(of_traced, example) for example in TRACED},
}


@pytest.mark.parametrize("name", TEXTS)
def test_before_and_after_are_as_kept(name: str, update_golden: bool) -> None:
    if name in WITH_ONEDNN and onednn_linear() is None:
        pytest.skip("torch has no oneDNN here")
    made = TEXTS[name]()
    file = FOLDER / f"{name}.txt"

    if update_golden:
        file.write_text(made)

    assert file.exists(), "pytest tests/golden --update-golden"
    assert made == file.read_text(), "if it is meant: pytest tests/golden --update-golden"


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_kept_shows_a_change(name: str) -> None:
    before, after = (FOLDER / f"{name}.txt").read_text().split("after\n")

    assert before.partition("before\n")[2] != after


def test_every_pass_and_rule_has_its_text_and_no_file_is_left_over() -> None:
    passes = [one for _, stage in STAGES.values() for one in stage]
    of_passes = {one.__name__ for one in passes if not hasattr(one, "rules")}
    names = of_passes | {rule.name for one in passes for rule in getattr(one, "rules", ())}

    assert names == set(TEXTS)
    assert {file.stem for file in FOLDER.iterdir()} == set(TEXTS)


REFUSING: Final = tuple(dict.fromkeys(example.name for example in REFUSALS))


@pytest.mark.parametrize("name", REFUSING)
def test_what_passes_leave_alone_and_note_is_as_kept(name: str, update_golden: bool) -> None:
    if name in WITH_ONEDNN and onednn_linear() is None:
        pytest.skip("torch has no oneDNN here")
    made, file = of_refusals(name), REFUSED / f"{name}.txt"

    if update_golden:
        REFUSED.mkdir(exist_ok=True)
        file.write_text(made)

    assert file.exists(), "pytest tests/golden --update-golden"
    assert made == file.read_text(), "if it is meant: pytest tests/golden --update-golden"


def test_every_pass_for_known_weights_has_a_text_of_what_it_leaves_alone() -> None:
    of_every_mode = {drop_noops.__name__, share_subexpressions.__name__}
    passes = {pass_.__name__ for pass_ in FREEZING} - of_every_mode
    packs = {"pack_linear", "pack_convolution", "pack_lstm", "add_into_convolution"}

    assert passes | packs | {"fuse_conv_activation"} == set(REFUSING)
    assert {file.stem for file in REFUSED.iterdir()} == set(REFUSING)
