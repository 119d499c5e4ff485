"""Convolutions read images channels last; what the caller gets lies as eager leaves it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint.channels_last import channels_last
from tests.parity import check
from tests.passes import on_cuda

aten = torch.ops.aten

Program = Callable[..., Any]


def images(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 3, 9, 8))


def weights(*channels: int) -> list[Tensor]:
    return [torch.randn(b, a, 3, 3) * 0.2 for a, b in itertools.pairwise(channels)]


def stack(x: Tensor, *weight: Tensor) -> Tensor:
    for w in weight:
        x = functional.conv2d(x, w, padding=1).relu()
    return x


def graph_of(fn: Program, *inputs: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    return module


def turned(module: fx.GraphModule, fuel: int | None = None) -> int:
    """Run the pass; how many nodes it says lie otherwise."""
    count = channels_last(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="channels_last")
    module.recompile()
    return count


def clones(module: fx.GraphModule) -> list[torch.memory_format]:
    found = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    return [node.kwargs["memory_format"] for node in found]


def test_the_layout_spreads_from_the_first_convolution_and_ends_with_the_graph() -> None:
    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(stack, *inputs)

    assert turned(module) == 7  # one copy, three convolutions, three activations
    assert clones(module) == [torch.channels_last, torch.contiguous_format]
    result = module(*inputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result, stack(*inputs))


def test_an_image_that_lies_so_already_is_left_alone() -> None:
    inputs = (images().to(memory_format=torch.channels_last), *weights(3, 4, 5, 6))
    module = graph_of(stack, *inputs)

    assert turned(module) == 0
    assert clones(module) == []


@pytest.mark.parametrize("count", [1, 2])
def test_few_convolutions_are_not_worth_it(count: int) -> None:
    inputs = (images(), *weights(*range(3, 4 + count)))
    module = graph_of(stack, *inputs)
    before = str(module.graph)

    assert turned(module) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(stack, *inputs)
    before = str(module.graph)

    assert turned(module, fuel=0) == 0
    assert str(module.graph) == before


def test_signals_and_volumes_stay_as_they_are() -> None:
    def signals(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = functional.conv1d(x, w, padding=1)
        return x

    assert turned(graph_of(signals, torch.randn(2, 3, 9), torch.randn(3, 3, 3))) == 0


def test_a_view_that_needs_rows_gets_them() -> None:
    def fn(x: Tensor, *weight: Tensor) -> Tensor:
        result: Tensor = aten.view(stack(x, *weight), [2, -1]).sum(0)
        return result

    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(fn, *inputs)

    assert turned(module) > 0
    torch.testing.assert_close(module(*inputs), fn(*inputs))


def test_strides_that_the_program_speaks_of_are_those_it_knew() -> None:
    def fn(x: Tensor, *weight: Tensor) -> Tensor:
        y = stack(x, *weight)
        return torch.as_strided(y, (4, 5), (5, 1)) * 2 + torch.as_strided(y * 1, (4, 5), (5, 1))

    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(fn, *inputs)

    assert turned(module) > 0
    torch.testing.assert_close(module(*inputs), fn(*inputs))


def test_a_result_with_strides_of_its_own_gets_them_back() -> None:
    def fn(x: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        y = stack(x, *weight)
        return y.transpose(1, 2), y.permute(3, 2, 1, 0) + 1

    inputs = (images(), *weights(3, 4, 5, 6))
    expected = fn(*inputs)
    module = graph_of(fn, *inputs)

    assert turned(module) > 0
    for ours, theirs in zip(module(*inputs), expected, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


class Net(nn.Module):
    """A bit of everything that image models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores, and the features that they are from."""
        x = functional.max_pool2d(self.norm(self.first(x)).relu(), 3, 2, 1)
        x = functional.hardswish(self.depthwise(x)) + x
        gate = self.squeeze(functional.adaptive_avg_pool2d(x, 1)).sigmoid()
        features = self.last(x * gate)
        both = torch.cat([features, features.flip(3)], 1)
        return both.mean((2, 3)), features


@pytest.mark.parametrize("training", [False, True])
def test_a_model_is_as_good_as_eager_s(training: bool) -> None:
    torch.manual_seed(0)
    model = Net().train(training)
    check(model, torch.randn(2, 3, 18, 16, requires_grad=training), tolerance_scale=4)


def test_layouts_of_results_and_gradients_are_eager_s() -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(2, 3, 18, 16, requires_grad=True)
    ours = torch.compile(model, backend="stator", options={"strict": True, "kernels": True})

    scores, features = ours(x)
    expected = model(x)
    assert [t.stride() for t in (scores, features)] == [t.stride() for t in expected]
    scores.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.is_contiguous() for g in gradients.values())


def test_any_number_of_images() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    ours = torch.compile(model, backend="stator", dynamic=True, options={"strict": True})

    for count in (2, 3, 5):
        x = torch.randn(count, 3, 18, 16)
        torch.testing.assert_close(ours(x), model(x))


# --- on a GPU ---


def on_gpu(dtype: torch.dtype) -> int:
    """How many nodes of a small network on a GPU lie otherwise behind the pass."""
    sizes = [(2, 3, 9, 8), *((b, a, 3, 3) for a, b in itertools.pairwise((3, 4, 5, 6)))]
    return turned(on_cuda.graph_of(stack, *on_cuda.fakes(*sizes, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_cores_read_images_channels_last(dtype: torch.dtype) -> None:
    assert on_gpu(dtype) > 0


@pytest.mark.parametrize("allowed", [True, False])
def test_float32_is_turned_where_tensor_cores_may_round_it(allowed: bool) -> None:
    # Not set by itself: torch's own test helpers forbid that for the whole process.
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        turned = on_gpu(torch.float32)

    assert (turned > 0) == allowed


def test_what_tensor_cores_do_not_compute_stays() -> None:
    assert on_gpu(torch.float64) == 0


def both_ways(x: Tensor, *weight: Tensor) -> list[Tensor]:
    """A stack of convolutions, and the gradients of its weights."""
    images, grads = [x], []
    for w in weight:
        images.append(functional.conv2d(images[-1], w, padding=1))
    grad = images.pop().sin()
    for x, w in zip(reversed(images), reversed(weight), strict=True):
        settings = [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        grad, of_weight, _ = aten.convolution_backward(grad, x, w, *settings)
        grads.append(of_weight)
    return grads


def read_by(module: fx.GraphModule, target: Any, place: int) -> list[fx.Node]:
    nodes = module.graph.find_nodes(op="call_function", target=target)
    return [node.args[place] for node in nodes]


def test_a_backward_reads_the_forwards_copy_of_the_image() -> None:
    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(both_ways, *inputs)

    assert turned(module) > 0
    first, *_ = read_by(module, aten.convolution.default, 0)
    assert first.target is aten.clone.default
    assert read_by(module, aten.convolution_backward.default, 1)[-1] is first
    for ours, theirs in zip(module(*inputs), both_ways(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert ours.stride() == theirs.stride()


def test_on_a_gpu_weights_lie_as_images_do() -> None:
    sizes = [(2, 8, 9, 8), (8, 8, 3, 3), (8, 8, 1, 1), (8, 8, 3, 3)]
    module = on_cuda.graph_of(stack, *on_cuda.fakes(*sizes, dtype=torch.bfloat16))

    assert turned(module) > 0
    found = read_by(module, aten.convolution.default, 1)
    # That of a single point lies both ways.
    assert [node.op for node in found] == ["call_function", "placeholder", "call_function"]
    assert all(node.target is aten.clone.default for node in found[::2])


def test_on_a_cpu_weights_stay() -> None:
    inputs = (images(), *weights(3, 4, 5, 6))
    module = graph_of(both_ways, *inputs)

    assert turned(module) > 0
    for target, place in ((aten.convolution.default, 1), (aten.convolution_backward.default, 2)):
        assert all(node.op == "placeholder" for node in read_by(module, target, place))
