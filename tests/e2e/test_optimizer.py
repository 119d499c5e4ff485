"""Optimizers: steps on a compiled model, and steps that are compiled themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.copies import widened
from tests.e2e.models import build
from tests.parity import BACKEND, Backend, assert_close_to_reference, compiled

# Dynamo itself imports torch._inductor when it meets an optimizer, and that uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

Inputs = tuple[Any, ...]
Optimizer = Callable[[Iterable[Tensor]], Any]

# Adam divides by the root of a mean square: eps keeps it from blowing up the rounding of
# gradients that are almost zero, which would drown what these tests compare.
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
}
STEPS: Final = 4


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns first, or the mean square of what it returns first."""
    first = output[0] if isinstance(output, tuple) else output
    return first.square().mean() if first.ndim else first


def train(
    model: nn.Module,
    inputs: Inputs,
    optimizer: Optimizer,
    compile_model: bool = False,
    step_by: Backend | None = None,
) -> nn.Module:
    """A copy of the model after a few steps; `step_by` compiles them, `None` leaves them alone."""
    own = copy.deepcopy(model)
    updater = optimizer(own.parameters())
    step = updater.step if step_by is None else compiled(updater.step, backend=step_by)
    call = compiled(own, fullgraph=True) if compile_model else own
    for _ in range(STEPS):
        updater.zero_grad()
        loss_of(call(*inputs)).backward()
        step()
    return own


def require_same_training(
    name: str, optimizer: Optimizer, compile_model: bool = False, compile_step: bool = False
) -> None:
    """Train eagerly, compiled and in float64; compare what the parameters became."""
    model, inputs = build(name)
    model.train()
    step_by = BACKEND.get() if compile_step else None
    ours = train(model, inputs, optimizer, compile_model, step_by)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    # Under Dynamo an optimizer counts its steps in float32, not in Python's float: what Dynamo
    # captured, run by torch, is what a compiled step has to equal.
    eager = train(model, inputs, optimizer, step_by="eager" if compile_step else None)
    wide_inputs = tuple(widened(value) for value in inputs)
    wide = train(copy.deepcopy(model).double(), wide_inputs, optimizer)
    start, truths, mine = model.state_dict(), wide.state_dict(), ours.state_dict()
    for key, theirs in eager.state_dict().items():
        assert_close_to_reference(mine[key], theirs, truths[key], key)
    assert any(not torch.equal(start[key], mine[key]) for key in start), "nothing was trained"


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
def test_steps_on_a_compiled_model_match_eager(optimizer: str) -> None:
    require_same_training("gpt2_eager", OPTIMIZERS[optimizer], compile_model=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_step_matches_eager(optimizer: str) -> None:
    require_same_training("lstm_cell_loop", OPTIMIZERS[optimizer], compile_step=True)


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
def test_compiled_step_on_a_compiled_model_matches_eager(optimizer: str) -> None:
    require_same_training(
        "lstm_cell_loop", OPTIMIZERS[optimizer], compile_model=True, compile_step=True
    )


def test_steps_with_batch_norm_match_eager() -> None:
    require_same_training("resnet", OPTIMIZERS["sgd_momentum"], compile_model=True)


def test_scheduled_learning_rate_reaches_a_compiled_step() -> None:
    rate = torch.tensor(0.1)  # a tensor, so that a new rate is no new constant
    weight = nn.Parameter(torch.ones(3))
    updater = torch.optim.SGD([weight], lr=rate, foreach=False)
    step = compiled(updater.step)
    expected = torch.ones(3)

    for value in (0.1, 0.05, 0.02):
        rate.fill_(value)
        weight.grad = torch.full((3,), 2.0)
        step()
        expected = expected - 2.0 * value

    torch.testing.assert_close(weight.detach(), expected)


def test_clipped_gradients_match_eager() -> None:
    model, inputs = build("gpt2_eager")
    norms, grads = [], []
    for compile_model in (False, True):
        own = copy.deepcopy(model)
        call = compiled(own, fullgraph=True) if compile_model else own
        loss_of(call(*inputs)).backward()
        norms.append(nn.utils.clip_grad_norm_(own.parameters(), 0.1))
        grads.append([parameter.grad for parameter in own.parameters()])

    assert norms[0] > 0.1, "nothing was clipped"
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(grads[1], grads[0])
