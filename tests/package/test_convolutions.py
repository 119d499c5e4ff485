"""Convolutions in packages: their weights lie in the file as they are, and are packed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.ops.libraries import onednn_convolution

pytestmark = pytest.mark.skipif(onednn_convolution() is None, reason="torch has no oneDNN here")


class Images(nn.Module):
    """Two convolutions with batch norms, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.norm, self.last = nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = self.norm(self.first(x)).relu()
        x = (self.second(x) + x).relu()
        return self.last(x.mean((2, 3)))


def images() -> tuple[Images, Tensor]:
    torch.manual_seed(0)
    model = Images().eval()
    model.norm.running_mean.normal_()
    return model, torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)


def packed() -> int:
    """Convolutions that read packed weights."""
    compilation = stator.last_compilation()
    assert compilation is not None
    return sum("reads its weight packed" in note for note in compilation.notes)


@pytest.mark.parametrize("freezing", [False, True])
def test_weights_are_packed_where_they_are_used(freezing: bool, tmp_path: Path) -> None:
    model, x = images()
    options = {"output_path": tmp_path / "model.pt2", "freezing": freezing}
    with torch.no_grad():
        path = stator.aot_compile(model, (x,), options=options)
        assert packed() == 2
        for loaded in (stator.load(path), torch._inductor.aoti_load_package(path)):
            for _ in range(2):
                torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A convolution whose result is added to that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.inner, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image."""
        x = torch.relu(self.first(x))
        return torch.relu(self.last(torch.relu(self.inner(x))) + x)


def test_sums_are_inside_of_convolutions(tmp_path: Path) -> None:
    """C passes all arguments of the operator that adds."""
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.randn(2, 8, 24, 24).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        path = stator.aot_compile(model, (x,), options={"output_path": tmp_path / "model.pt2"})
        compilation = stator.last_compilation()
        assert compilation is not None
        assert any("add is inside of" in note for note in compilation.notes)
        for loaded in (stator.load(path), torch._inductor.aoti_load_package(path)):
            for _ in range(2):
                torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


def test_other_weights_are_packed_again(tmp_path: Path) -> None:
    model, x = images()
    with torch.no_grad():
        path = stator.aot_compile(model, (x,), options={"output_path": tmp_path / "model.pt2"})
        loaded = stator.load(path)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
        for _ in range(3):
            model.first.weight.normal_()
            loaded.load_constants({"first.weight": model.first.weight})
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_transposed_ones_are_packed_where_they_are_used(
    layout: torch.memory_format, freezing: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2).eval()
    model.to(memory_format=layout)
    x = torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last)
    options = {"output_path": tmp_path / "model.pt2", "freezing": freezing}
    with torch.no_grad():
        path = stator.aot_compile(model, (x,), options=options)
        assert packed() == 1
        loaded = stator.load(path)
        for one in (loaded, torch._inductor.aoti_load_package(path)):
            torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)
        if not freezing:
            model.weight.normal_()
            loaded.load_constants({"weight": model.weight})
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    model, x = images()
    with torch.no_grad():
        paths = [
            stator.aot_compile(model, (x,), options={"output_path": tmp_path / f"{n}.pt2"})
            for n in range(2)
        ]
    first, second = (Path(path).read_bytes() for path in paths)
    assert first == second


def test_images_by_rows_stay_as_they_are(tmp_path: Path) -> None:
    layer, x = nn.Conv2d(8, 16, 3).eval(), torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        path = stator.aot_compile(layer, (x,), options={"output_path": tmp_path / "model.pt2"})
        found = stator.load(path)(x)
        assert found.is_contiguous()
        torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)
