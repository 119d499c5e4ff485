"""Every rule proves itself: fires on its example, where both sides agree, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from docs.passes import left_side
from stator.core.fuel import Fuel
from stator.graph.build import Builder
from stator.graph.rules import Rewrite, Rewriter, Rule, rule
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.rules.all import RULES
from stator.torch_api import pytree

aten = torch.ops.aten
REJECTIONS = [
    pytest.param(rule, number, id=f"{rule.name}-{number}")
    for rule in RULES
    for number in range(len(rule.rejects))
]


def fired(module: fx.GraphModule, rule: Rule, fuel: int | None = None) -> int:
    count = Rewriter(module.graph, Ctx(fuel=Fuel(fuel)), [rule]).run()
    verify(module.graph, after=rule.name)
    module.recompile()
    return count


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_fires_on_its_example_and_both_sides_agree(rule: Rule) -> None:
    torch.manual_seed(0)
    module, tensors = left_side(rule, rule.example())
    expected = module(*tensors)
    before = [node.target for node in module.graph.nodes]

    assert fired(module, rule) >= 1
    assert [node.target for node in module.graph.nodes] != before
    found = module(*tensors)
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_fuel_nothing_changes(rule: Rule) -> None:
    module, _ = left_side(rule, rule.example())
    before = str(module.graph)

    assert fired(module, rule, fuel=0) == 0
    assert str(module.graph) == before


def test_of_a_match_only_the_right_side_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    @rule(example=lambda: (torch.rand(2, 3),))
    def undone(x: torch.Tensor) -> Rewrite:
        """neg(exp(log(x)))  -->  neg(clone(x))"""
        before = aten.neg.default(aten.exp.default(aten.log.default(x)))
        return Rewrite(before=before, after=aten.neg.default(aten.clone.default(x)))

    module, _ = left_side(undone, undone.example())
    computed: list[fx.Node] = []

    def noted(builder: Builder, node: fx.Node) -> Any:
        computed.append(node)
        return compute(builder, node)

    compute = Builder._computed
    monkeypatch.setattr(Builder, "_computed", noted)

    assert fired(module, undone) == 1
    assert {node.target for node in computed} == {aten.neg.default, aten.clone.default}
    assert len(computed) == 2


@pytest.mark.parametrize(("rule", "number"), REJECTIONS)
def test_a_rejection_is_left_alone(rule: Rule, number: int) -> None:
    module, _ = left_side(rule, rule.rejects[number]())
    before = str(module.graph)

    assert fired(module, rule) == 0
    assert str(module.graph) == before


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_states_its_equation(rule: Rule) -> None:
    assert "-->" in rule.equation


def test_names_are_told_apart() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)


def test_a_right_side_that_cannot_be_computed_is_no_rewrite() -> None:
    @rule(example=lambda: (torch.randn(2, 3),))
    def flattened(x: torch.Tensor) -> Rewrite:
        """sin(cos(x))  -->  as a view that some strides do not allow"""
        return Rewrite(
            before=aten.sin.default(aten.cos.default(x)),
            after=lambda: aten.view.default(aten.sin.default(x), [7, 7]),
        )

    module, _ = left_side(flattened, flattened.example())
    before = str(module.graph)

    assert fired(module, flattened) == 0
    assert str(module.graph) == before
