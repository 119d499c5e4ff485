"""Batch norms that become part of convolutions and products, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.passes.freezing.fold_batch_norm import fold_batch_norm
from stator.passes.freezing.fold_binary import fold_binary
from stator.passes.joint.drop_noops import drop_noops
from tests.passes.freezing.accuracy import folded
from tests.passes.freezing.graphs import rewritten, run_with_constants, with_weights

CONVOLUTION = "aten.convolution.default"
PLAIN = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def statistics(channels: int) -> tuple[Tensor, ...]:
    """Mean, variance, factor and summand."""
    mean, var, factor, summand = torch.randn(4, channels)
    return mean, var.abs() + 0.1, factor, summand


def convolved(convolve: Callable[..., Tensor], groups: int, biased: bool, affine: bool) -> Any:
    def normalized(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        mean, var, factor, summand = rest
        y = convolve(x, w, b if biased else None, stride=2, padding=1, groups=groups)
        given = (factor, summand) if affine else ()
        return F.batch_norm(y, mean, var, *given)

    return normalized


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("biased", "affine"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolutions_normalize(
    axes: int, groups: int, biased: bool, affine: bool, is_transposed: bool
) -> None:
    convolve = (TRANSPOSED if is_transposed else PLAIN)[axes - 1]
    inner = (4, 8 // groups) if is_transposed else (8, 4 // groups)
    x, w = torch.randn(2, 4, *[7, 6, 5][:axes]), torch.randn(*inner, *[3] * axes)
    fn = convolved(convolve, groups, biased, affine)
    calls, notes = folded(fn, (x, w, torch.randn(8), *statistics(8)), fold_batch_norm)

    assert calls == [CONVOLUTION]
    assert notes == ["_native_batch_norm_legit_no_training is folded"]


def test_statistics_may_have_more_digits_than_weights() -> None:
    x, w, b = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(8)
    fn = convolved(F.conv2d, 1, True, True)
    given = (x.bfloat16(), w.bfloat16(), b.bfloat16(), *statistics(8))
    calls, _ = folded(fn, given, fold_batch_norm)

    assert calls == [CONVOLUTION]


def test_a_norm_of_more_digits_that_is_rounded_behind_is_folded() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, w, b).to(rest[0].dtype), *rest).to(x.dtype).relu()

    x, w, b = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(8)
    given = (x.bfloat16(), w.bfloat16(), b.bfloat16(), *statistics(8))
    calls, notes = folded(fn, given, fold_batch_norm, fold_binary, drop_noops)
    assert notes == ["_native_batch_norm_legit_no_training is folded"]
    assert calls == [CONVOLUTION, "aten.relu.default"]


def test_double_precision_is_folded_in_itself() -> None:
    fn = convolved(F.conv2d, 1, True, True)
    x, w, b = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(8)
    given = tuple(one.double() for one in (x, w, b, *statistics(8)))
    module, _ = rewritten(fn, given, tuple(range(1, 7)), fold_batch_norm)
    (found,), _ = run_with_constants(module, given)

    torch.testing.assert_close(found, fn(*given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_large_transposed_convolutions_normalize(groups: int, layout: torch.memory_format) -> None:
    w = torch.randn(512, 512 // groups, 2, 2).contiguous(memory_format=layout)
    fn = convolved(F.conv_transpose2d, groups, True, True)
    given = (torch.randn(1, 512, 3, 3), w, torch.randn(512), *statistics(512))
    calls, _ = folded(fn, given, fold_batch_norm)

    assert calls == [CONVOLUTION]


def test_a_large_weight_of_16_bits_is_a_constant_all_the_same() -> None:
    x, w = torch.randn(1, 512, 3, 3).bfloat16(), torch.randn(512, 512, 3, 3).bfloat16() / 50
    fn = convolved(F.conv2d, 1, False, True)
    calls, _ = folded(fn, (x, w, torch.randn(512), *statistics(512)), fold_batch_norm)

    assert calls == [CONVOLUTION]


def test_a_weight_that_autocast_rounds_is_rounded_once() -> None:
    def rounded(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, w.to(x.dtype), b.to(x.dtype)), *rest)

    x, w, b = torch.randn(2, 4, 9, 9).bfloat16(), torch.randn(8, 4, 3, 3), torch.randn(8)
    module, _ = rewritten(rounded, (x, w, b, *statistics(8)), tuple(range(1, 7)), fold_batch_norm)
    casts = module.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)

    assert sum(cast.meta["val"].dtype == torch.bfloat16 for cast in casts) == 2


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts_stay(layout: torch.memory_format) -> None:
    x = torch.randn(2, 4, 9, 9).contiguous(memory_format=layout)
    w = torch.randn(8, 4, 3, 3).contiguous(memory_format=layout)
    fn = convolved(F.conv2d, 1, True, True)
    calls, _ = folded(fn, (x, w, torch.randn(8), *statistics(8)), fold_batch_norm)

    assert calls == [CONVOLUTION]


@pytest.mark.parametrize("biased", [True, False])
def test_products_normalize(biased: bool) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w, b if biased else None), *rest)

    calls, _ = folded(
        fn, (torch.randn(5, 6), torch.randn(4, 6), torch.randn(4), *statistics(4)), fold_batch_norm
    )
    assert calls == ["aten.addmm.default"]


# --- what is not folded ---


def in_training(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b), mean, var, training=True)


def read_twice(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Tensor:
    y = F.conv2d(x, w, b)
    return F.batch_norm(y, mean, var) + y


def of_the_input(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Tensor:
    return F.batch_norm(x, mean[:4], var[:4])


def turned(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Tensor:
    return F.batch_norm((x[..., :6, :6].reshape(8, 36) @ w.view(36, 8)).view(2, 8, 4), mean, var)


def along_another_axis(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor
) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b).transpose(1, 2), mean[:6], var[:6])


def rest_is_read(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Any:
    y = F.conv2d(x, w, b)
    norm = torch.ops.aten._native_batch_norm_legit_no_training
    return norm(y, None, None, mean, var, 0.1, 1e-5)[:2]


def of_half(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x.half(), w.half(), b.half()), mean, var)


ALL = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("fn", "weights", "reason"),
    [
        (convolved(F.conv2d, 1, True, False), (2, 3, 4), "the weight of convolution is no"),
        (convolved(F.conv2d, 1, True, False), (1, 3, 4), "the bias of convolution is no"),
        (convolved(F.conv2d, 1, True, False), (1, 2, 3), "normalizes with is no constant"),
        (in_training, ALL, "statistics of its input"),
        (read_twice, ALL, "others read convolution, too"),
        (of_the_input, ALL, "neither a convolution nor a product"),
        (along_another_axis, ALL, "neither a convolution nor a product"),
        (turned, ALL, "channels are not those of mm"),
        (rest_is_read, ALL, "more is read"),
        (of_half, ALL, "may leave the range of float16"),
    ],
)
def test_what_is_not_folded_says_why(
    fn: Callable[..., Any], weights: tuple[int, ...], reason: str
) -> None:
    given = (torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3), torch.randn(8), *statistics(8))
    module = with_weights(fn, given, weights)
    before, ctx = str(module.graph), Ctx()

    assert fold_batch_norm(module.graph, ctx) == 0
    assert str(module.graph) == before
    assert len(ctx.record.notes) == 1
    assert reason in ctx.record.notes[0]


def test_without_weights_nothing_is_said() -> None:
    _, ctx = rewritten(
        convolved(F.conv2d, 1, True, True),
        (torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3), torch.randn(8), *statistics(8)),
        (),
        fold_batch_norm,
    )
    assert ctx.record.notes == []


def test_without_fuel_the_graph_is_unchanged() -> None:
    given = (torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3), torch.randn(8), *statistics(8))
    graph = with_weights(convolved(F.conv2d, 1, True, True), given, tuple(range(1, 7))).graph
    before = str(graph)

    assert fold_batch_norm(graph, Ctx(fuel=Fuel(left=0))) == 0
    assert str(graph) == before


def test_a_large_weight_that_others_read_is_not_held_twice() -> None:
    def tied(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w), mean, var).sum() + w[0].sum() * x.sum()

    given = (torch.randn(4, 1024), torch.randn(512, 1024), *statistics(512)[:2])
    _, ctx = rewritten(tied, given, (1, 2, 3), fold_batch_norm)

    assert "which is large, too" in ctx.record.notes[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [1, 3, 4])
def test_channels_without_numbers_stay_so_and_others_are_not_touched(
    bad: float, where: int
) -> None:
    fn = convolved(F.conv2d, 1, True, True)
    x = torch.rand(2, 4, 8, 8) + 0.5
    given = (x, torch.randn(8, 4, 3, 3), torch.randn(8), *statistics(8))
    given[where][2] = bad
    module, _ = rewritten(fn, given, tuple(range(1, 7)), fold_batch_norm)
    (found,), _ = run_with_constants(module, given)
    expected = fn(*given)

    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found[:, [0, 1, 3]], expected[:, [0, 1, 3]])


def test_new_weights_are_folded_by_the_same_recipe() -> None:
    fn = convolved(F.conv2d, 2, True, True)
    x = torch.randn(2, 4, 8, 8)
    given = (x, torch.randn(8, 2, 3, 3), torch.randn(8), *statistics(8))
    others = (x, torch.randn(8, 2, 3, 3), torch.randn(8), *statistics(8))
    module, _ = rewritten(fn, given, tuple(range(1, 7)), fold_batch_norm)
    (found,), constants = run_with_constants(module, given)
    made = [recipe.make([others[i] for i in recipe.weights]) for recipe in constants.recipes]

    torch.testing.assert_close(found, fn(*given))
    torch.testing.assert_close(module(x, *made)[0], fn(*others))
