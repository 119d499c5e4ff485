"""What the user asks for, in the weights of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.partition.choose import Wish, choose
from stator.aot.partition.classify import classify
from stator.aot.partition.joint import Joint
from stator.aot.partition.weigh import Scales
from stator.errors import OptionError
from tests.aot.partition.programs import called, checkpointed, leaf, targets, traced
from tests.aot.partition.programs import split as split_as_eager

aten = torch.ops.aten
Policy = Callable[[fx.Node], Any]


def two_parts(z: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return [z.exp().sum() + torch.tanh(x @ w).sin().sum()]


def largest(x: Tensor) -> list[Tensor]:
    return [torch.topk(x.sin(), 500, -1).values.exp().sum()]


def on(target: Any, answer: Any) -> Policy:
    return lambda node: answer if node.target is target else None


def copied_inputs(joint: Joint, policy: Policy | None = None) -> list[bool]:
    """Of each input, whether it would be kept as a copy: the caller may write to it."""
    scales = Scales(joint, classify(joint), policy)
    return [scales.weigh(node).is_copied for node in joint.primals]


def test_of_a_checkpointed_region_the_inputs_are_kept_and_no_others() -> None:
    found = traced(two_parts, leaf(8, 9), leaf(4, 3), leaf(3, 5))
    checkpointed(found, ["mm.default", "tanh.default"], CheckpointPolicy.MUST_RECOMPUTE)

    assert copied_inputs(Joint.of(found)) == [True, False, False]


def test_what_a_policy_has_computed_again_is_computed_from_what_is_there() -> None:
    joint = Joint.of(traced(two_parts, leaf(8, 9), leaf(4, 3), leaf(3, 5)))

    assert copied_inputs(joint, lambda node: None) == copied_inputs(joint) == [True, False, False]
    assert not any(copied_inputs(joint, on(aten.exp.default, "recompute")))


@pytest.mark.parametrize("answer", ["recomptue", "", True, CheckpointPolicy.MUST_SAVE])
def test_an_answer_that_is_none_is_refused(answer: Any) -> None:
    joint = Joint.of(traced(two_parts, leaf(8, 9), leaf(4, 3), leaf(3, 5)))

    with pytest.raises(OptionError, match="save_policy answered") as caught:
        choose(joint, classify(joint), Wish(policy=on(aten.tanh.default, answer)))
    assert "tanh" in str(caught.value)


def test_an_error_of_a_policy_names_it_and_the_value() -> None:
    joint = Joint.of(traced(two_parts, leaf(8, 9), leaf(4, 3), leaf(3, 5)))

    def policy(node: fx.Node) -> str | None:
        return str(node.meta["no such note"])

    with pytest.raises(OptionError, match="save_policy raised KeyError: 'no such note'") as caught:
        choose(joint, classify(joint), Wish(policy=policy))
    assert "mm" in str(caught.value) or "exp" in str(caught.value)


def test_parts_of_a_result_are_saved_or_computed_again_as_the_whole_is() -> None:
    joint = Joint.of(traced(largest, leaf(256, 1000)))

    def kept(budget: float, answer: str) -> list[str]:
        wish = Wish(policy=on(aten.topk.default, answer), budget=budget)
        return targets(choose(joint, classify(joint), wish).kept)

    assert "getitem" in kept(0.0, "save")
    assert "getitem" not in kept(1.0, "recompute")


def test_a_tag_of_a_result_is_one_of_its_parts() -> None:
    found = traced(largest, leaf(256, 1000))
    checkpointed(found, ["sin.default", "topk.default"], CheckpointPolicy.MUST_RECOMPUTE)

    assert "topk.default" in called(split_as_eager(found).backward)
