"""The quick trace of forward and backward is the full one, or is left to it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stator
from stator.aot import compile as compiling
from stator.aot.compile import to_fake
from stator.aot.quick import record
from stator.aot.trace import trace
from tests.aot.traces import (
    Program,
    assert_same,
    assert_same_lines,
    is_recorded,
    without_full_trace,
)
from tests.e2e.models import HANDWRITTEN
from tests.fuzz.programs import inputs_of, program

F = nn.functional
aten = torch.ops.aten


def _layers(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = F.linear(x, w, b[0]).tanh()
    z = F.layer_norm(y.sigmoid(), (4,), b[1])
    rows = z.view(2, 2, 4).transpose(0, 1).softmax(-1).reshape(4, 4)
    return [rows[:, :2].exp().sum(), y, z, x, w, 3, None, y, x > 0]


def _written(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = x @ w
    y += b
    y.mul_(2).relu_()
    mask = torch.full((4, 4), -1.0).triu_(1)
    return [y, torch.zeros_like(w).copy_(w).add_(mask), w.new_ones(4, 4).mul_(b)]


def _without_grad(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    with torch.no_grad():
        z = w.exp()
    return [(x @ w) * z, z, (w.detach() * b).sum()]


def _norms(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    mean, var = x[0].clone(), x[1].clone()
    trained = F.batch_norm(w, mean, var, b[0], b[1], training=True)
    return [trained, F.batch_norm(w, None, None, training=True), F.batch_norm(b, mean, var)]


def _updates(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    loss = (w + x).exp().sum()  # which keeps nothing of what is written next
    with torch.no_grad():
        x.mul_(0.9).add_(w)
    return [loss * b.sum(), x]


def _new_leaf(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = x @ w
    return [y.sum(), y.detach().requires_grad_().exp()]


def _hooked(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = x @ w
    y.register_hook(lambda grad: grad * 2)
    return [y.exp().sum()]


def _twice(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    (grad,) = torch.autograd.grad((w * w * b).sum(), w, create_graph=True)
    return [grad.sum()]


def _cast(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        return [F.linear(x, w).float() * b]


def _drawn(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    return [F.dropout(w, 0.3), F.alpha_dropout(b), w * torch.rand(4), torch.empty(3).uniform_()]


def _attention(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    q, k, v = ((y @ w)[None, None] for y in (x, w, b))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [causal, F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)]


def _images(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = F.conv2d(w.repeat(4, 4)[None, None], b[None, None], padding=1, stride=2)
    pooled = [F.max_pool2d(y, 2), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1)]
    up = F.interpolate(y, scale_factor=2, mode="bilinear")
    last = y.to(memory_format=torch.channels_last).relu()
    return [*pooled, up, last, F.conv_transpose2d(y, b[None, None]), F.unfold(y, 2)]


SAME: dict[str, Program] = {
    "layers": _layers,
    "written": _written,
    "without_grad": _without_grad,
    "norms": _norms,
    "updates": _updates,
    "new_leaf": _new_leaf,
    "hooked": _hooked,
    "twice": _twice,
    "cast": _cast,
    "drawn": _drawn,
    "attention": _attention,
    "images": _images,
    "tied": lambda x, w, b: [x @ w @ w.t()],
    "leaves_of_its_own": lambda x, w, b: [torch.ones(3, requires_grad=True) * 2],
    "unused": lambda x, w, b: [x @ w],
    "nothing_to_train": lambda x, w, b: [x * 2, w],
    "identity": lambda x, w, b: [w.clone()],
    "loss": lambda x, w, b: [F.cross_entropy(x @ w, torch.zeros(4, dtype=torch.long))],
    "rows": lambda x, w, b: [
        F.embedding(torch.arange(3), w),
        w[torch.arange(2)],
        w.split(3)[1] * 2,
    ],
    "view_of_a_result": lambda x, w, b: [(x @ w).t(), (w * b)[:, 1:3], b.exp().expand(2, 4, 4)],
}

OPERATORS: dict[str, Program] = {
    "pad": lambda w, b: [F.pad(w, (1, 1))],
    "cumsum": lambda w, b: [w.cumsum(0), w.logcumsumexp(0)],
    "spread": lambda w, b: [w.std(0), w.var(), torch.var_mean(b)[0], w.norm(), b.logsumexp(0)],
    "sort": lambda w, b: [w.sort(0).values, w.topk(2, 0).values, w.max(0).values, w.amax(1)],
    "where": lambda w, b: [torch.where(w > 0, w, b), w.clamp(0, 1), w.masked_fill(w > 0, 0.0)],
    "power": lambda w, b: [w.pow(2), w**3.5, w**-1, 1 / w, w**b, w.rsqrt()],
    "scatter": lambda w, b: [
        w.gather(0, torch.zeros_like(w, dtype=torch.long)),
        w.index_add(0, torch.arange(2), b[:2]),
        w.scatter_add(0, torch.zeros_like(w, dtype=torch.long), b),
        w.index_select(0, torch.arange(2)),
    ],
    "activations": lambda w, b: [
        *(f(w) for f in (F.silu, F.gelu, F.softplus, F.hardswish, F.leaky_relu, F.elu, F.mish)),
        *(f(w) for f in (F.hardsigmoid, F.hardtanh, F.glu, F.relu6, F.logsigmoid, F.softsign)),
    ],
    "losses": lambda w, b: [
        F.mse_loss(w, b),
        F.huber_loss(w, b),
        F.binary_cross_entropy_with_logits(w, b.sigmoid()),
        F.l1_loss(w, b),
        F.cosine_similarity(w, b),
    ],
    "norms": lambda w, b: [F.rms_norm(w, (4,), b[0]), F.group_norm(w[None], 2), F.normalize(w)],
    "products": lambda w, b: [
        torch.einsum("ij,kj->ik", w, b),
        torch.bmm(w[None], b[None]),
        torch.addmm(w, w, b),
        w @ b[0],
        w[0] @ b[0],
        torch.outer(w[0], b[0]),
    ],
    "moves": lambda w, b: [w.roll(1), w.flip(0), w.unfold(0, 2, 1) * 2, w.repeat(2, 2), w.tril()],
    "parts": lambda w, b: [w.diagonal() * 1, w.select(0, 1).exp(), w.narrow(0, 0, 2).sin()],
    "joins": lambda w, b: [torch.cat([w, b]), torch.stack([w, b], 1), torch.cat([w[:2], b[2:]])],
    "types": lambda w, b: [w.half().float(), w.double().sum(), (w > 0).float() * b, w.to(w)],
    "pairs": lambda w, b: [torch.lerp(w, b, 0.3), torch.atan2(w, b), torch.minimum(w, b), w / b],
    "linear_algebra": lambda w, b: [torch.linalg.inv(w), torch.linalg.det(b)],
}


def _inputs() -> tuple[list[Any], Any]:
    return to_fake([torch.randn(4, 4), *(nn.Parameter(torch.randn(4, 4)) for _ in range(2))])


@pytest.mark.parametrize("name", SAME)
def test_quick_joint_trace_is_the_full_one(name: str) -> None:
    inputs, mode = _inputs()
    assert_same_lines(SAME[name], inputs, mode)


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_are_those_of_the_full_trace(name: str) -> None:
    inputs, mode = _inputs()
    assert_same_lines(OPERATORS[name], inputs[1:], mode)


def test_inputs_with_history_are_leaves_of_the_trace() -> None:
    base = torch.randn(4, 4, requires_grad=True)
    inputs, mode = to_fake([base * 2, base.t(), torch.randn(4, 4)])
    assert not inputs[0].is_leaf
    assert_same_lines(lambda x, y, z: [(x @ y).relu() + z, x.exp()], inputs, mode)


def test_a_gradient_of_nothing_that_came_in_is_left_to_the_full_trace() -> None:
    inputs, mode = _inputs()
    assert not is_recorded(lambda x: [torch.ones(3, requires_grad=True) * 2], inputs[:1], mode)


def _small() -> nn.Module:
    norm = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*norm, nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.GELU())


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x.sin(), use_reentrant=False)
        return y.exp().sum()


CAPTURED: dict[str, Any] = {
    "small": lambda: (_small(), (torch.randn(2, 3, 6, 6),)),
    **{name: HANDWRITTEN[name] for name in ("resnet", "unet", "lstm_cell_loop", "moe_dense")},
    **{name: HANDWRITTEN[name] for name in ("gnn_index_add", "gnn_scatter_reduce", "recommender")},
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_model_is_traced_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CAPTURED[name]()
    traces = []

    def both(
        program: Program, given: Any, mode: Any, *, as_eager: bool, may_run_again: bool
    ) -> Any:
        assert_same(program, given, mode)
        traces.append(trace(program, given, mode, may_run_again=may_run_again))
        return traces[-1]

    monkeypatch.setattr(compiling, "trace", both)
    stator.compile(model, strict=True, cache=False, kernels=False)(*inputs)
    assert [traced.program.is_training for traced in traces] == [True]


def test_what_is_checkpointed_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def noted(*given: Any, **how: Any) -> Any:
        traces.append(trace(*given, **how))
        return traces[-1]

    monkeypatch.setattr(compiling, "trace", noted)
    stator.compile(_Checkpointed(), strict=True, cache=False, kernels=False)(torch.randn(3, 6))
    marked = [node for node in traces[0].module.graph.nodes if node.meta.get("recompute")]
    assert {node.target for node in marked} >= {aten.addmm.default, aten.gelu.default}


def test_a_model_trains_without_a_full_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _small()
    without_full_trace(monkeypatch)
    compiled = stator.compile(model, strict=True, cache=False)
    compiled(torch.randn(2, 3, 6, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert int(cast(Tensor, model[1].num_batches_tracked)) == 1


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def _saved_and_written(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = x @ w
    z = y.exp()
    z.add_(1)  # autograd keeps it, and will not have it
    return [z]


def _forgotten(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = torch.ops.aten.zeros.default([4])
    z = y.detach()
    z.add_(1)
    return [w * y]


def _gains_history(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    x.add_(w)
    return [x * 2]


def _writes_through_a_view(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = torch.zeros(4, 4)
    y[0] = w[0]
    return [y * b]


def _writes_behind_a_view(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    y = x @ w
    rows = y[0]
    y.add_(1)
    return [rows * b]


LEFT: dict[str, Program] = {
    "saved_and_written": _saved_and_written,
    "forgotten": _forgotten,
    "gains_history": _gains_history,
    "writes_through_a_view": _writes_through_a_view,
    "writes_behind_a_view": _writes_behind_a_view,
    "writes_to_a_leaf": lambda x, w, b: [w.add_(1) * x],
    "returns_a_view_of_an_input": lambda x, w, b: [w.t(), w * 2],
    "returns_two_views": lambda x, w, b: list((x @ w).split(2)),
    "returns_a_detached_twin": lambda x, w, b: (lambda y: [y, y.detach()])(x @ w),
    "derivative_of_the_users": lambda x, w, b: [_Double.apply(w)],
    "no_derivative": lambda x, w, b: [w // 1, (w * b).sum()],
    "sizes_of_values": lambda x, w, b: [w[w > 0]],
    "in_place_on_a_view_of_a_leaf": lambda x, w, b: [(w * 1).view(-1).add_(1)],
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_simple_is_left_to_the_full_trace(name: str) -> None:
    inputs, mode = _inputs()
    assert not is_recorded(LEFT[name], inputs, mode)
    assert [value.requires_grad for value in inputs] == [False, True, True]
    assert all(value.is_leaf and value._version == 0 for value in inputs)


@pytest.mark.filterwarnings("ignore")
def test_random_programs_are_traced_alike() -> None:
    recorded = 0
    for seed in range(150):
        inputs, mode = to_fake([x.detach().requires_grad_() for x in inputs_of(seed)])
        if is_recorded(program(seed), inputs, mode):
            recorded += 1
            assert_same_lines(program(seed), inputs, mode)
    assert recorded > 50


def test_lines_of_the_forward_are_carried_to_the_backward() -> None:
    inputs, mode = _inputs()
    with mode:
        found = record(lambda x, w, b: [(x @ w).exp()], inputs)
    assert not isinstance(found, str)
    kinds = [n.meta.get("in_forward") for n in found.graph.nodes if n.op == "call_function"]
    assert kinds == [True, True, None, None, None]


def test_an_interrupted_quick_trace_leaves_the_full_one_what_it_needs() -> None:
    inputs, mode = _inputs()
    traced = trace(_gains_history, inputs, mode, may_run_again=True)
    assert [fact.mutation.name for fact in traced.program.inputs] == ["COPY", "NONE", "NONE"]
    assert traced.program.is_training
