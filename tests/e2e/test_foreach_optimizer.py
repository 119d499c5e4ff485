"""Optimizers over lists of parameters: eager's steps, in a launch or two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.copies import widened
from tests.parity import assert_close_to_reference

# Dynamo itself imports torch._inductor when it meets an optimizer, and that uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

Make = Callable[[Iterable[Tensor]], Any]

# eps keeps Adam's division from blowing up the rounding of gradients that are almost zero.
OPTIMIZERS: Final[dict[str, Make]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, foreach=True),
    "rmsprop centered": lambda p: torch.optim.RMSprop(
        p, lr=0.01, eps=1e-3, momentum=0.9, centered=True, foreach=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, foreach=True),
}
SHAPES: Final = ((8, 16), (16,), (3, 4, 5), (1,), (100, 7), (70,))
STEPS: Final = 3


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradients(own: list[Tensor], step: int) -> None:
    """The same gradients for everybody, in every type."""
    generator = torch.Generator().manual_seed(step)
    for parameter in own:
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = values.to(parameter.dtype)


def trained(
    make: Make, own: list[Tensor], backend: str | None, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Parameters and the optimizer's state after a few steps."""
    torch._dynamo.reset()
    updater = make(own)
    step = updater.step
    if backend is not None:
        step = torch.compile(updater.step, backend=backend, options=options or None)
    for number in range(STEPS):
        gradients(own, number)
        step()
    state = {
        f"{name} of {place}": value
        for place, parameter in enumerate(own)
        for name, value in sorted(updater.state[parameter].items())
        if isinstance(value, Tensor)
    }
    return own, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_steps_are_eager_s(name: str, dtype: torch.dtype) -> None:
    make, start = OPTIMIZERS[name], parameters(dtype)
    ours, state = trained(make, copy.deepcopy(start), "stator", kernels=True, strict=True)
    # What Dynamo captured, run by torch: it counts steps in float32, as compiled steps do.
    eager, eager_state = trained(make, copy.deepcopy(start), "eager")
    wide, wide_state = trained(make, [nn.Parameter(widened(p.detach())) for p in start], None)

    for place, (mine, theirs, truth) in enumerate(zip(ours, eager, wide, strict=True)):
        assert_close_to_reference(mine, theirs, truth, f"parameter {place}")
    assert state.keys() == eager_state.keys()
    for key, theirs in eager_state.items():
        assert_close_to_reference(state[key], theirs, wide_state[key], key)
    assert not torch.equal(ours[0], start[0]), "nothing was trained"


def launches(folder: Path) -> list[str]:
    """Steps of the last plan that run kernels or torch's operators."""
    newest = max(folder.iterdir())
    plan, _, _ = (newest / "forward_plan.txt").read_text().partition("\n\n")  # then its memory
    steps = plan.splitlines()[1:-1]
    return [line.strip() for line in steps if not line.strip().startswith("free ")]


def run_steps(make: Make, own: list[Tensor], folder: Path) -> list[str]:
    trained(make, own, "stator", kernels=True, strict=True, dump_dir=folder)
    return launches(folder)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_is_one_launch_over_the_list_and_one_for_the_counters(
    name: str, tmp_path: Path
) -> None:
    shapes = ((8, 16), (16,), (3, 4, 5), (2,), (100, 7), (70,), (5, 5))

    steps = run_steps(OPTIMIZERS[name], parameters(shapes=shapes), tmp_path)

    assert len(steps) <= 2, steps
    assert all(step.startswith("together: ") for step in steps), steps


@pytest.mark.parametrize("name", ["sgd", "sgd momentum"])
def test_sgd_is_one_launch_over_the_list(name: str, tmp_path: Path) -> None:
    shapes = ((8, 16), (16,), (3, 4, 5), (2,), (100, 7))

    steps = run_steps(OPTIMIZERS[name], parameters(shapes=shapes), tmp_path)

    assert len(steps) == 1, steps


def test_parameters_of_a_transposed_layout_are_updated_as_they_lie() -> None:
    def transposed() -> list[Tensor]:
        return [
            nn.Parameter(p.detach().t().contiguous().t()) for p in parameters(shapes=((9, 7),) * 3)
        ]

    ours, _ = trained(OPTIMIZERS["adamw"], transposed(), "stator", kernels=True, strict=True)
    theirs, _ = trained(OPTIMIZERS["adamw"], transposed(), "eager")

    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.stride() == expected.stride()
        torch.testing.assert_close(mine, expected)
