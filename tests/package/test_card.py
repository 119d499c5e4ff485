"""Packages for a GPU, where there is none: built for Hopper, run on what stands in for a card."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import stator
from stator.cli import app
from stator.codegen.llvm.objects import can_load
from stator.errors import CompileError, OptionError, PackageError, Unsupported
from stator.package.archive import LIBRARY, OpenFile, Package, read_package
from stator.package.card import capability_of, card_of
from stator.package.load import Model, check_device
from stator.torch_api import FakeTensorMode
from tests.package.models import made
from tests.package.stand_in import GUARD, NUMBER, STREAM, Card, exported
from tests.passes.on_cuda import fakes

pytestmark = pytest.mark.skipif(not can_load(), reason="packages are for Linux on x86-64")

BATCH = Dim("batch", min=2, max=64)
Build = Callable[..., tuple[Card, Path]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a model for Hopper; the card that knows its kernels, and the package."""

    def built(model: nn.Module, args: tuple[Any, ...], dynamic: Any = None, **more: Any) -> Any:
        card, path = Card(), tmp_path / "model.pt2"
        options = {"output_path": path, "linker": False, "gpu_arch": 90, **more}
        with card.noting():
            stator.aot_compile(exported(model, args, dynamic), options=options)
        return card, path

    return built


def perceptron(build: Build) -> tuple[Card, Model, nn.Module, Tensor]:
    """A card, a package on it, the model and its input."""
    model, (x,), _, _ = made("perceptron")
    card, path = build(model, (x,))
    loaded = card.loaded(path)
    card.asked.clear()
    return card, loaded, model, x


# --- what a package holds ---


def test_it_tells_what_it_is_for(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    _, path = build(model, args)
    package = read_package(path)
    metadata = json.loads(package.files[f"{LIBRARY}_metadata.json"])

    assert metadata == {"AOTI_DEVICE_KEY": "cuda", "AOTI_COMPUTE_CAPABILITY": "90"}
    assert (package.manifest["device"], package.manifest["capability"]) == ("cuda", 90)
    assert {one["device"] for one in package.manifest["inputs"]} == {"cuda"}
    assert {one["device"] for one in package.manifest["constants"]} == {"cuda"}
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "GPU of compute capability 9.0" in " ".join(shown.stdout.split())


def test_cubins_are_in_the_library(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    card, path = build(model, args, linker=True)
    library = read_package(path).files[f"{LIBRARY}.so"]

    assert card.kernels
    assert all(cubin in library for cubin in card.kernels)
    for name in (b"libtorch_cuda.so", b"libcuda.so.1"):
        assert name in library


def test_a_package_for_the_cpu_needs_no_library_of_a_gpu(built: Callable[[str], Path]) -> None:
    files = read_package(built("perceptron")).files

    assert b"cuda.so" not in files[f"{LIBRARY}.so"]
    assert b"libcuda" not in files[f"{LIBRARY}.so"]


def test_the_same_bytes_twice(build: Build, tmp_path: Path, monkeypatch: Any) -> None:
    model, args, _, _ = made("images")
    found = []
    for number in range(2):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"cache_{number}"))
        found.append(build(model, args, linker=True)[1].read_bytes())

    assert found[0] == found[1]


def test_another_card_has_other_code(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    hopper, _ = build(model, args)
    ampere, path = build(model, args, gpu_arch="sm_80")

    assert read_package(path).manifest["capability"] == 80
    assert hopper.kernels.keys().isdisjoint(ampere.kernels)


# --- calls ---


@pytest.mark.parametrize("name", ["perceptron", "images", "tied", "halves"])
def test_results_are_those_of_eager(name: str, build: Build) -> None:
    model, args, _, _ = made(name)
    card, path = build(model, args)
    loaded = card.loaded(path)

    with torch.no_grad():
        torch.testing.assert_close(loaded(*args), model(*args))
    assert "cuLaunchKernel" in card.names()


def test_folded_constants_go_to_the_card(build: Build) -> None:
    model, args, _, _ = made("images")
    card, path = build(model, args, freezing=True)
    told = read_package(path).manifest["constants"]

    assert {one["device"] for one in told if one["folded"]} == {"cuda"}
    with torch.no_grad():
        torch.testing.assert_close(card.loaded(path)(*args), model(*args), atol=1e-5, rtol=1e-5)


def test_sizes_that_vary(build: Build) -> None:
    model, (x,), _, _ = made("perceptron")
    card, path = build(model, (x,), ({0: BATCH},))
    loaded = card.loaded(path)

    for count in (2, 7, 64):
        x = torch.randn(count, 8)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x))
    with pytest.raises(ValueError, match="size 65 in dimension 0, and it was built for 2 to 64"):
        loaded(torch.randn(65, 8))


def test_buffers_that_are_written_to_stay_on_the_card(build: Build) -> None:
    model, (x,), _, _ = made("counter")
    card, path = build(model, (x,))
    first, second = card.loaded(path), card.loaded(path)

    torch.testing.assert_close([first(x), first(x), first(x)], [x, 2 * x, 3 * x])
    torch.testing.assert_close(second(x), x)


def test_kernels_are_launched_on_the_stream_of_the_device(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    loaded(x)

    guards = [given[1] for given in card.asked if given[0] == "aoti_torch_create_cuda_guard"]
    streams = [given[1] for given in card.asked if given[0] == "aoti_torch_get_current_cuda_stream"]
    launched = [given for given in card.asked if given[0] == "cuLaunchKernel"]
    contexts = [given[2] for given in card.asked if given[0] == "cuDevicePrimaryCtxRetain"]
    assert guards == [NUMBER]
    assert set(streams) == set(contexts) == {NUMBER}
    assert len(launched) == len(card.images) > 0
    assert {given[9] for given in launched} == {STREAM}
    assert card.asked[-1] == ("aoti_torch_delete_cuda_guard", GUARD)


def test_memory_is_taken_from_torch_on_the_device(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    loaded(x)

    made_there = [given[5:7] for given in card.asked if given[0] == "aoti_torch_empty_strided"]
    assert made_there
    assert set(made_there) == {(1, NUMBER)}


def test_kernels_are_loaded_once(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    loaded(x)
    before = len(card.images)
    loaded(x)

    assert len(card.images) == before


def test_the_stream_that_torchs_runner_gives(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    card.run_on_stream(loaded, x, 0x7777)

    entered = [given for given in card.asked if given[0] == "aoti_torch_create_cuda_stream_guard"]
    assert [given[1:3] for given in entered] == [(0x7777, NUMBER)]
    assert card.asked[-1] == ("aoti_torch_delete_cuda_stream_guard", GUARD)
    card.asked.clear()
    card.run_on_stream(loaded, x, None)
    assert "aoti_torch_create_cuda_stream_guard" not in card.names()


class Mixed(nn.Module):
    """A constant of the CPU among tensors of a GPU, and rows that may not be there."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some rows."""
        taken: Tensor = torch.ops.aten.index.Tensor(x * torch.tensor(2.0), [rows])
        return taken.tanh() + torch.arange(4, device=x.device)


def test_constants_of_the_cpu_stay_there(build: Build) -> None:
    x, rows = torch.randn(5, 4), torch.tensor([0, 3, 2])
    card, path = build(Mixed(), (x, rows))
    told = read_package(path).manifest["constants"]

    assert [one["device"] for one in told] == ["cpu"]
    torch.testing.assert_close(card.loaded(path)(x, rows), Mixed()(x, rows))


def test_what_is_required_is_asserted_on_the_device(
    build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    x, rows = torch.randn(5, 4), torch.tensor([0, 3, 2])
    card, path = build(Mixed(), (x, rows))
    loaded = card.loaded(path)
    card.asked.clear()
    loaded(x, rows)

    called = [given[1] for given in card.asked if given[0] == "aoti_torch_call_dispatcher"]
    assert called[-2:] == [b"aten::logical_not", b"aten::_assert_async"]
    with pytest.raises(RuntimeError) as refused:
        loaded(x, torch.tensor([0, 9, 2]))
    said = f"{refused.value}{capfd.readouterr().err}"  # where torch 2.11 writes what it found
    assert "index is out of bounds for dimension 0 with size 5" in said


def test_without_kernels_torch_runs_all(build: Build) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).tanh()

    x = torch.randn(5, 4)
    card, path = build(Product(), (x,), kernels=False)

    torch.testing.assert_close(card.loaded(path)(x), Product()(x))
    assert "cuLaunchKernel" not in card.names()


# --- what lies otherwise ---


def test_inputs_that_begin_elsewhere_are_copied(build: Build) -> None:
    _, loaded, model, x = perceptron(build)
    room = torch.empty(x.numel() + 1)
    shifted = room[1:].view_as(x).copy_(x)

    with torch.no_grad():
        torch.testing.assert_close(loaded(shifted), model(shifted))
        turned = x.t().contiguous().t()
        torch.testing.assert_close(loaded(turned), model(turned))


class Shifted(nn.Module):
    """A buffer in the midst of another's memory."""

    def __init__(self) -> None:
        super().__init__()
        room = torch.randn(33)
        self.register_buffer("whole", room)
        self.register_buffer("part", room[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Both are read."""
        return (x * self.part).tanh() + self.whole.sum()


def test_constants_that_begin_elsewhere_are_copied_by_each_run(build: Build) -> None:
    model, x = Shifted(), torch.randn(4, 32)
    card, path = build(model, (x,))
    loaded = card.loaded(path)

    for _ in range(2):
        torch.testing.assert_close(loaded(x), model(x))
    torch.testing.assert_close(loaded.constants()["part"], model.part)


def test_constants_are_replaced(build: Build) -> None:
    _, loaded, model, x = perceptron(build)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
        loaded.load_constants({k: v.detach() for k, v in other.state_dict().items()})
        torch.testing.assert_close(loaded(x), other(x))


# --- refusals ---


def test_an_input_on_another_device(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    card.place = 0

    with pytest.raises(ValueError, match="it is on cuda:0, and the program was loaded on cuda:1"):
        loaded(x)
    assert "cuLaunchKernel" not in card.names()
    assert "aoti_torch_create_cuda_guard" not in card.names()


def test_an_input_on_the_cpu(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    card.kind = 0

    with pytest.raises(ValueError, match="it is on cpu, and it was built for cuda"):
        loaded(x)


def test_a_launch_that_cuda_refuses(build: Build) -> None:
    card, loaded, _, x = perceptron(build)
    card.answers["cuLaunchKernel"] = 719

    with pytest.raises(RuntimeError, match=r"kernel_\d+ could not be launched: CUDA error 719"):
        loaded(x)
    assert card.names()[-1] == "aoti_torch_delete_cuda_guard"
    del card.answers["cuLaunchKernel"]
    loaded(x)


def test_a_library_refuses_another_card(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    card, path = build(model, args)
    card.capability = (8, 6)

    with pytest.raises(PackageError, match=r"capability 9\.0, and cuda:1 has 8\.6"):
        card.loaded(path)
    assert "cuModuleLoadData" not in card.names()


def test_a_library_refuses_to_be_where_no_card_is(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    card, path = build(model, args)
    card.answers["aoti_torch_empty_strided"] = 1

    with pytest.raises(PackageError, match="there is no GPU here"):
        card.loaded(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_it_is_not_loaded_without_a_card(build: Build) -> None:
    model, args, _, _ = made("perceptron")
    _, path = build(model, args, linker=True)

    with pytest.raises(PackageError, match="torch finds no NVIDIA GPU here"):
        stator.load(path)
    with pytest.raises(PackageError, match="it is for cuda, and cpu was asked for"):
        stator.load(path, device="cpu")


@pytest.mark.parametrize(
    ("asked", "message"),
    [(None, r"capability 9\.0, and cuda:0 \(A card\) has 8\.0"), ("cuda:3", "there is no cuda:3")],
)
def test_it_is_not_loaded_on_another_card(
    asked: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "is_available": True,
        "init": None,
        "current_device": 0,
        "device_count": 2,
        "get_device_capability": (8, 0),
        "get_device_name": "A card",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    path, file = Path("model.pt2"), OpenFile(Path(__file__))
    package = Package(path, {"device": "cuda", "capability": 90}, {}, file, 0)

    with pytest.raises(PackageError, match=message):
        check_device(package, None if asked is None else torch.device(asked))
    fitting = Package(path, {"device": "cuda", "capability": 80}, {}, file, 0)
    assert check_device(fitting, torch.device("cuda:1")) == 1


@pytest.mark.parametrize("asked", ["hopper", 9, ""])
def test_capabilities_that_there_are_not(asked: Any) -> None:
    with pytest.raises(OptionError, match="gpu_arch cannot be"):
        capability_of(torch.device("cuda"), asked)


@pytest.mark.parametrize("asked", [90, "90", "sm_90", 9.0])
def test_capabilities_may_be_spelled_otherwise(asked: Any) -> None:
    assert capability_of(torch.device("cuda"), asked) == 90


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_its_capability_must_be_said(build: Build) -> None:
    model, args, _, _ = made("perceptron")

    with pytest.raises(CompileError, match="no such card to compile for"):
        build(model, args, gpu_arch=None)


def test_tensors_of_two_cards_are_refused() -> None:
    with FakeTensorMode():
        other = torch.empty(3, device="cuda:1")
    assert card_of([torch.empty(1), *fakes((3,))]) == torch.device("cuda:0")
    assert card_of([torch.empty(1)]) is None
    with pytest.raises(Unsupported, match="its tensors lie on cuda:0, cuda:1"):
        card_of([*fakes((3,)), other])
