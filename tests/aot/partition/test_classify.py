"""Which nodes are forward, which backward, and which of them are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.partition.choose import Wish, choose
from stator.aot.partition.classify import Classes
from stator.aot.partition.classify import classify as classify_joint
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.weigh import NEVER, Scales
from stator.aot.trace import Traced
from tests.aot import custom_operators as custom_operators  # registers them
from tests.aot.partition.programs import checkpointed, leaf, targets, traced

RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE


def classify(found: Traced) -> Classes:
    return classify_joint(Joint.of(found))


def cut(found: Traced) -> Cut:
    """Where eager would cut."""
    return choose(Joint.of(found), classify(found), Wish(kernels=False))


def forward_targets(found: Traced) -> list[str]:
    """Operators of the forward, in order."""
    forward = classify(found).forward
    return targets(node for node in found.module.graph.nodes if node in forward)


def backward_targets(found: Traced) -> list[str]:
    return targets(classify(found).backward)


def recomputed(found: Traced) -> list[str]:
    """Operators of the forward that the backward computes again, in order."""
    again = cut(found).again & classify(found).forward
    return targets(node for node in found.module.graph.nodes if node in again)


# The two sides


def test_what_values_need_is_forward_and_what_gradients_need_beside_it_backward() -> None:
    found = traced(lambda x, y: [(x @ y).sin()], leaf(2, 3), leaf(3, 2))

    assert forward_targets(found) == ["mm.default", "sin.default"]
    # The cosine is of forward values alone, and yet nothing but the backward needs it.
    assert backward_targets(found) == [
        "cos.default",
        "mul.Tensor",
        "t.default",
        "mm.default",
        "t.default",
        "mm.default",
    ]


def test_no_node_is_on_both_sides() -> None:
    classes = classify(traced(lambda x: [x.sin().exp() * x], leaf(3)))

    assert classes.forward.isdisjoint(classes.backward)


def test_inputs_are_forward_even_if_only_the_backward_reads_them() -> None:
    found = traced(lambda x, unread: [x * 2], leaf(3), torch.randn(3))

    assert set(found.primals) <= classify(found).forward


def test_tangents_belong_to_no_side() -> None:
    found = traced(lambda x: [x.sin()], leaf(3))
    classes = classify(found)

    assert found.tangents
    assert not set(found.tangents) & (classes.forward | set(classes.backward))


def test_a_program_without_gradients_is_forward_alone() -> None:
    found = traced(lambda x: [x.sin() + 1], torch.randn(3))

    assert forward_targets(found) == ["sin.default", "add.Tensor"]
    assert backward_targets(found) == []


def test_what_nobody_needs_is_on_no_side() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        x.exp()
        return [x.sin()]

    found = traced(fn, leaf(3))

    assert "exp.default" in targets(found.module.graph.nodes)
    assert "exp.default" not in forward_targets(found) + backward_targets(found)


def test_the_new_value_of_an_input_is_forward() -> None:
    def fn(x: Tensor, counter: Tensor) -> list[Tensor]:
        counter.add_(1)
        return [x.sin()]

    assert "add.Tensor" in forward_targets(traced(fn, leaf(3), torch.zeros(1)))


def test_all_parts_of_a_forward_result_are_forward() -> None:
    found = traced(lambda x: [x.max(0)[0]], leaf(3, 2))

    # The second part, the places, is read by the backward alone.
    assert forward_targets(found) == ["max.dim", "getitem", "getitem"]
    assert "getitem" not in backward_targets(found)


# Effects


def test_an_effect_of_the_forward_is_forward_though_nobody_reads_it() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        torch.ops.stator_test.write_down("sum", x.detach())
        return [x.sin()]

    assert "write_down.default" in forward_targets(traced(fn, leaf(3)))


def test_an_assertion_is_forward() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        torch._assert_async(x.sum() > 0, "positive")
        return [x.sin()]

    found = forward_targets(traced(fn, leaf(3)))

    assert any("assert_async" in name for name in found)


def test_an_effect_of_the_backward_is_backward() -> None:
    found = traced(lambda x: [torch.ops.stator_test.note(x, "seen")], leaf(3))

    # register_autograd gives the operator a backward that has an effect of its own.
    assert forward_targets(found) == ["note.default"]
    assert "note.default" in backward_targets(found)


class WritesInBackward(torch.autograd.Function):
    """Doubles; its backward writes down what it saved, and nobody reads that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        torch.ops.stator_test.write_down("saved", x)
        return grad * 2


def test_an_effect_of_the_backward_is_backward_though_no_tangent_reaches_it() -> None:
    found = traced(lambda x: [WritesInBackward.apply(x)], leaf(3))

    assert "write_down.default" in backward_targets(found)
    assert "write_down.default" not in forward_targets(found)


# Computed again


def test_nothing_is_computed_again_but_views() -> None:
    again = recomputed(traced(lambda x: [x.t().sin().exp()], leaf(2, 3)))

    assert again == ["t.default"]


def test_a_view_that_is_returned_is_at_hand() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        y = (x * 2).t()
        return [y, y.sin()]

    found = traced(fn, leaf(2, 3))

    assert found.values[0].target.__name__ == "t.default"
    assert "t.default" not in recomputed(found)


@pytest.mark.parametrize(
    "policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE]
)
def test_a_checkpointed_region_is_computed_again(policy: CheckpointPolicy) -> None:
    found = traced(lambda x: [x.sin().exp().tanh()], leaf(3))
    checkpointed(found, {"sin.default", "exp.default", "tanh.default"}, policy)

    assert {"sin.default", "exp.default"} <= set(recomputed(found))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, None])
def test_what_the_policy_saves_is_not_computed_again(policy: Any) -> None:
    found = traced(lambda x: [x.sin().exp().tanh()], leaf(3))
    checkpointed(found, {"sin.default", "exp.default", "tanh.default"}, policy)

    assert set(recomputed(found)) <= {"detach.default"}


def test_a_value_that_leaves_its_region_is_saved() -> None:
    found = traced(lambda x: [x.sin().square().exp().tanh() * 2], leaf(3))
    checkpointed(found, {"sin.default", "pow.Tensor_Scalar", "exp.default"}, RECOMPUTE)

    again = recomputed(found)

    assert "sin.default" in again
    assert "exp.default" not in again  # tanh, outside, reads it


def test_a_view_does_not_hide_that_a_value_leaves_its_region() -> None:
    found = traced(lambda x: [x.sin().exp().t().tanh() * 2], leaf(2, 3))
    checkpointed(found, {"sin.default", "exp.default", "t.default"}, RECOMPUTE)

    assert "exp.default" not in recomputed(found)


def test_random_numbers_are_never_drawn_again() -> None:
    found = traced(lambda x: [F.dropout(x.sin()).exp()], leaf(3))
    everything = set(targets(found.module.graph.nodes))
    checkpointed(found, everything, RECOMPUTE)

    again = recomputed(found)

    assert "sin.default" in again
    assert "bernoulli.p" in everything
    assert "bernoulli.p" not in again


def test_an_effect_is_never_repeated() -> None:
    found = traced(lambda x: [torch.ops.stator_test.note(x.sin().square(), "seen").exp()], leaf(3))
    checkpointed(
        found, {"sin.default", "pow.Tensor_Scalar", "note.default", "exp.default"}, RECOMPUTE
    )

    again = recomputed(found)

    assert "sin.default" in again
    assert "note.default" not in again


def test_parts_of_a_result_are_computed_again_with_the_whole() -> None:
    found = traced(lambda x: [x.sin().max(0)[0].exp()], leaf(3, 2))
    checkpointed(found, {"sin.default", "max.dim", "getitem", "exp.default"}, RECOMPUTE)
    saved = traced(lambda x: [x.sin().max(0)[0].exp()], leaf(3, 2))

    assert {"max.dim", "getitem"} <= set(recomputed(found))
    assert "getitem" not in recomputed(saved)


def test_inputs_are_never_computed() -> None:
    found = traced(lambda x: [x.sin()], leaf(3))

    assert found.primals[0] in cut(found).kept


def test_a_constant_is_read_from_the_module_again() -> None:
    found = traced(lambda x: [x * torch.tensor([1.0, 2.0, 3.0])], leaf(3))
    (attribute,) = found.module.graph.find_nodes(op="get_attr")
    classes = classify(found)

    weight = Scales(Joint.of(found), classes).weigh(attribute)

    assert (weight.keep, weight.again) == (NEVER, 0)


def test_a_size_is_a_number_to_save() -> None:
    found = traced(lambda x: [(x * x.shape[0]).sin()], leaf(3, 2), symbolic=True)
    checkpointed(found, {"sym_size.int", "mul.Tensor", "sin.default"}, RECOMPUTE)

    assert "mul.Tensor" in recomputed(found)
    assert "sym_size.int" not in recomputed(found)
