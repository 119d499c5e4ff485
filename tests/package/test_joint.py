"""Packages for training: outputs and gradients as eager has them, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stator
from stator.errors import OptionError, Unsupported
from tests.package.models import Images, Perceptron, Recurrent, Tied, encoder

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "perceptron": lambda: (Perceptron(), (torch.randn(5, 8),)),
    "images": lambda: (Images(), (torch.randn(2, 3, 8, 8),)),
    "tied": lambda: (Tied(), (torch.randint(20, (2, 6)),)),
    "encoder": lambda: (encoder(), (torch.randn(2, 7, 16),)),
    "recurrent": lambda: (Recurrent(), (torch.randn(2, 5, 6),)),
}


def made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model in training mode, and what it is called with."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    return model.train(), args


def losses(model: nn.Module, args: tuple[Any, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of gradient descent: the losses, and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(3):
        output = model(*args)
        loss = (output[0] if isinstance(output, tuple) else output).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, model.state_dict()


def package(name: str, folder: Path, **options: Any) -> str:
    """A package of a model's training step."""
    model, args = made(name)
    wishes = {"output_path": folder / f"{name}.pt2", **options}
    return stator.aot_compile_joint(model, args, options=wishes)


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")  # LSTM's
@pytest.mark.parametrize("linker", [True, False], ids=["linked", "objects"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_three_steps_as_in_eager(name: str, linker: bool, tmp_path: Path) -> None:
    loaded = stator.load(package(name, tmp_path, linker=linker))
    model, args = made(name)
    assert sorted(loaded.state_dict()) == sorted(model.state_dict())
    found, state = losses(loaded, args)
    expected, wanted = losses(model, args)
    assert found == pytest.approx(expected, rel=1e-4)
    for key, value in wanted.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


SERVER = """
import sys, torch, stator
loaded = stator.load(sys.argv[1])
loaded(torch.randn(5, 8))[0].sum().backward()
for name in ("torch._dynamo", "stator.aot.trace", "stator.lower", "stator.codegen.llvm.jit"):
    assert name not in sys.modules, name
from tests.package.test_joint import losses, made
found = losses(stator.load(sys.argv[1]), made("perceptron")[1])[0]
assert torch.allclose(torch.tensor(found), torch.tensor(losses(*made("perceptron"))[0]), rtol=1e-4)
for name in ("llvmlite", "stator.pipeline"):  # Dynamo comes with torch's optimizers
    assert name not in sys.modules, name
print("trained")
"""


def test_in_a_process_without_a_compiler(tmp_path: Path) -> None:
    path = package("perceptron", tmp_path)
    environment = {**os.environ, "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SERVER, path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "trained", done.stderr


BATCH = torch.export.Dim("batch", min=2, max=15)
LENGTH = torch.export.Dim("length", min=2, max=32)
VARYING: dict[str, dict[int, Any]] = {
    "perceptron": {0: BATCH},
    "images": {0: BATCH},
    "tied": {0: BATCH, 1: LENGTH},
    "encoder": {0: BATCH, 1: LENGTH},
}


def batches(name: str) -> list[torch.Tensor]:
    """Inputs of several sizes, the smallest and the largest among them."""
    (x,) = made(name)[1]
    first = torch.cat([x] * 16)
    whole = torch.cat([first] * 8, 1) if 1 in VARYING[name] else first
    longest = 32 if 1 in VARYING[name] else whole.size(1)
    lengths = (2, 9, longest) if 1 in VARYING[name] else (longest,) * 3
    return [whole[:rows, :length] for rows, length in zip((2, 5, 15), lengths, strict=True)]


@pytest.mark.parametrize("name", sorted(VARYING))
def test_sizes_that_vary(name: str, tmp_path: Path) -> None:
    model, args = made(name)
    wishes = {"output_path": tmp_path / "model.pt2", "levels": (1,)}
    shapes = (VARYING[name],)
    path = stator.aot_compile_joint(model, args, dynamic_shapes=shapes, options=wishes)
    loaded = stator.load(path)
    for x in batches(name):
        outputs = [one(x) for one in (loaded, model)]
        for output, one in zip(outputs, (loaded, model), strict=True):
            one.zero_grad()
            (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        for key, value in model.named_parameters():
            found = loaded.get_parameter(key).grad
            torch.testing.assert_close(found, value.grad, rtol=1e-4, atol=1e-5)
    (told,) = loaded.manifest["inputs"]
    wrong = f"{told['name']}: size 16 in dimension 0, and it was built for 2 to 15"
    with pytest.raises(ValueError, match=wrong):
        loaded(torch.cat([x, x[:1]]))


def test_a_size_that_must_be_another_is_refused(tmp_path: Path) -> None:
    class Square(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Of as many rows as columns."""
            return super().forward(x) + x.t()

    wishes = {"output_path": tmp_path / "model.pt2"}
    with pytest.raises(Exception, match="batch"):
        stator.aot_compile_joint(
            Square(4, 4), (torch.randn(4, 4),), dynamic_shapes=({0: BATCH},), options=wishes
        )


def test_gradients_of_inputs(tmp_path: Path) -> None:
    model, (x,) = made("perceptron")
    x.requires_grad_()
    wishes = {"output_path": tmp_path / "model.pt2"}
    loaded = stator.load(stator.aot_compile_joint(model, (x,), options=wishes))
    (found,) = torch.autograd.grad(loaded(x)[0].square().sum(), [x])
    (expected,) = torch.autograd.grad(model(x)[0].square().sum(), [x])
    torch.testing.assert_close(found, expected)


def test_a_gradient_that_does_not_come_is_zero(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Two results."""
            return self.first(x), self.second(x)

    model, x = Two(), torch.randn(2, 3)
    wishes = {"output_path": tmp_path / "two.pt2"}
    loaded = stator.load(stator.aot_compile_joint(model, (x,), options=wishes))
    loaded(x)[1].sum().backward()
    model(x)[1].sum().backward()
    torch.testing.assert_close(loaded.second.weight.grad, model.second.weight.grad)
    assert loaded.first.weight.grad is None or not loaded.first.weight.grad.any()


def test_dropout_differs_from_call_to_call_and_is_one_mask(tmp_path: Path) -> None:
    x = torch.ones(64, requires_grad=True)
    wishes = {"output_path": tmp_path / "dropout.pt2"}
    loaded = stator.load(stator.aot_compile_joint(nn.Dropout(0.5).train(), (x,), options=wishes))
    first, second = loaded(x), loaded(x)
    assert not torch.equal(first, second)
    (grad,) = torch.autograd.grad(first.sum(), [x])
    torch.testing.assert_close(grad, first.detach())


class Lifted(nn.Module):
    """What a state_dict has not: a buffer that is not persistent, and a constant of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("scratch", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("kept", torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer, scaled and moved."""
        return self.drop(self.linear(x) * self.scratch * self.kept + torch.tensor([1.0] * 4))


def test_a_checkpoint_of_the_model_fits(tmp_path: Path) -> None:
    model, x = Lifted().eval(), torch.randn(2, 4)
    wishes = {"output_path": tmp_path / "m.pt2"}
    loaded = stator.load(stator.aot_compile_joint(model, (x,), options=wishes))
    other = Lifted().eval()
    loaded.load_state_dict(other.state_dict())
    other.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(loaded(x), other(x))


def test_a_frozen_parameter_stays_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    wishes = {"output_path": tmp_path / "m.pt2"}
    loaded = stator.load(stator.aot_compile_joint(model, (torch.randn(2, 3),), options=wishes))
    found = {name: one.requires_grad for name, one in loaded.named_parameters()}
    assert found == {name: one.requires_grad for name, one in model.named_parameters()}
    assert not [*loaded.buffers()]


def test_the_mode_is_that_of_the_model(tmp_path: Path) -> None:
    for training in (True, False):
        wishes = {"output_path": tmp_path / "m.pt2"}
        model = Lifted().train(training)
        loaded = stator.load(stator.aot_compile_joint(model, (torch.randn(2, 4),), options=wishes))
        assert loaded.train(training).training is training
        with pytest.raises(
            Unsupported, match=r"m\.pt2 was built of a model in \w+\(\), and has no"
        ):
            loaded.train(not training)
        assert loaded.training is training


def test_what_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(Unsupported, match="needs a gradient"):
        stator.aot_compile_joint(frozen, (x,), options={"output_path": tmp_path / "a.pt2"})
    with pytest.raises(OptionError, match=r"ends in \.pt2"):
        stator.aot_compile_joint(nn.Linear(3, 3), (x,), options={"output_path": tmp_path / "a.so"})
    with pytest.raises(OptionError, match="a function has no parameters to train"):
        stator.aot_compile_joint(lambda x: x.sin(), (x,))
    loaded = stator.load(package("perceptron", tmp_path))
    y = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(ValueError, match="input x asks for a gradient, and perceptron"):
        loaded(y)
    with torch.no_grad():
        loaded(y)
    output = loaded(y.detach())[0]
    with pytest.raises((Unsupported, RuntimeError)):
        torch.autograd.grad(output.sum(), [loaded.first.weight], create_graph=True)
