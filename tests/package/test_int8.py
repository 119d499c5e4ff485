"""Quantised models in packages: integers lie in the file, and are packed where they are used."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import stator
from stator.package.archive import read_package
from tests.e2e import quantized_models
from tests.e2e.quantized_models import MODELS, quantized_model


def built(model: Any, x: torch.Tensor, path: Path, **options: Any) -> str:
    """The frozen model's package."""
    wishes = {"output_path": path, "freezing": True, **options}
    with torch.no_grad():
        return stator.aot_compile(model, (x,), options=wishes)


def notes() -> list[str]:
    """What was said of integers."""
    compilation = stator.last_compilation()
    assert compilation is not None, "something was compiled"
    return [note for note in compilation.notes if " is int8" in note]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_quantised_models_compute_with_integers(name: str, dynamic: bool, tmp_path: Path) -> None:
    model, x = quantized_model(name, dynamic=dynamic)
    path = built(model, x, tmp_path / "model.pt2")
    assert notes()
    for loaded in (stator.load(path), torch._inductor.aoti_load_package(path)):
        for _ in range(2):
            torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-4)
    (folded,) = {one["folded"] for one in constants(path) if one["dtype"] == "int8"}
    assert folded


def constants(path: str) -> list[dict[str, Any]]:
    """What a package tells of its constants."""
    found: list[dict[str, Any]] = read_package(Path(path)).manifest["constants"]
    return found


class Residual(nn.Module):
    """A convolution whose result is added to that of another, and one that reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.inner, self.added, self.last = (nn.Conv2d(16, 16, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.added(torch.relu(self.inner(x))) + x)
        found: torch.Tensor = self.last(x)
        return found


def test_sums_are_inside_of_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C passes all arguments of the operator that adds."""
    monkeypatch.setitem(quantized_models.MODELS, "residual", (Residual, (2, 8, 12, 12)))
    model, x = quantized_model("residual", dynamic=False)
    path = built(model, x, tmp_path / "model.pt2")
    (note,) = [note for note in notes() if "add and relu inside" in note]
    assert note.endswith("gives uint8")
    for loaded in (stator.load(path), torch._inductor.aoti_load_package(path)):
        for _ in range(2):
            torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-4)


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    model, x = quantized_model("images", dynamic=False)
    first, second = (built(model, x, tmp_path / f"{number}.pt2") for number in range(2))
    assert Path(first).read_bytes() == Path(second).read_bytes()


def test_threads_that_come_first_pack_once(tmp_path: Path) -> None:
    model, x = quantized_model("layers", dynamic=False)
    path = built(model, x, tmp_path / "model.pt2", linker=False)
    loaded, expected = stator.load(path), model(x)
    wrong: list[int] = []

    def run(number: int) -> None:
        if not torch.allclose(loaded(x), expected, atol=1e-4):
            wrong.append(number)

    threads = [Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_constants_are_packed_again(tmp_path: Path) -> None:
    model, x = quantized_model("layers", dynamic=False)
    loaded = stator.load(built(model, x, tmp_path / "model.pt2"))
    before = loaded(x)
    loaded.load_constants({"layers.4.bias": loaded.constants()["layers.4.bias"] + 1})
    torch.testing.assert_close(loaded(x), before + 1)


class Bounded(nn.Module):
    """Activations that oneDNN takes numbers for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 32, 3), nn.Linear(32 * 36, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        x = nn.functional.relu6(self.first(x)).flatten(1)
        return nn.functional.relu6(self.last(x))


def test_bounds_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized_models.MODELS, "bounded", (Bounded, (2, 8, 8, 8)))
    model, x = quantized_model("bounded", dynamic=False)
    loaded = stator.load(built(model, x, tmp_path / "model.pt2"))
    assert len(notes()) == 2
    assert not any("hardtanh inside" in note for note in notes())
    torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-4)


class Halves(nn.Module):
    """A weight of int8 for inputs of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (64, 64), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(64).to(torch.bfloat16) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return torch.mm(x, self.weight.t().to(x.dtype)) * self.scales


def test_weights_alone_are_integers(tmp_path: Path) -> None:
    model, x = Halves().eval(), torch.randn(4, 64, dtype=torch.bfloat16)
    path = built(model, x, tmp_path / "model.pt2")
    assert {one["dtype"] for one in constants(path)} == {"int8", "bfloat16"}
    torch.testing.assert_close(stator.load(path)(x), model(x), atol=0.05, rtol=0.05)
