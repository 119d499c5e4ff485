"""Packages from the command line: build, inspect, run, bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stator
from stator.cli import app
from stator.package.trial import made_up_inputs
from tests.package.models import MODELS, made

# torch.export's opinion of torch.nn.LSTM.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.cells")

FACTORY = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),)

def exported():
    batch = torch.export.Dim("batch", min=2, max=8)
    model, args = make()
    return torch.export.export(model, args, dynamic_shapes=({0: batch},))
"""


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    """Puts back what a command finds modules by: it has a process of its own."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def called(*words: object) -> str:
    """What a command prints; it succeeds."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """A file with functions that make models."""
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return path


def test_build_and_run(factory: Path, tmp_path: Path) -> None:
    path, saved, result = (tmp_path / name for name in ("a.pt2", "x.pt", "y.pt"))
    assert f"written: {path}" in called("build", f"{factory}:make", "-o", path)
    torch.save(torch.ones(2, 4), saved)
    assert "output 0: torch.float32 [2, 3]" in called("run", path, "--input", saved)
    called("run", path, "--input", saved, "--output", result)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = torch.nn.Linear(4, 3)(torch.ones(2, 4))
    torch.testing.assert_close(torch.load(result), expected)


def test_what_lies_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "layers_beside.py").write_text("import torch\n\nclass L(torch.nn.Linear): pass\n")
    path = tmp_path / "model.py"
    path.write_text(f"from layers_beside import L\n{FACTORY.replace('torch.nn.Linear', 'L')}")
    called("build", f"{path}:make", "-o", tmp_path / "a.pt2")


def test_a_file_called_as_a_module_of_the_library(factory: Path, tmp_path: Path) -> None:
    path = factory.rename(tmp_path / "json.py")
    called("build", f"{path}:make", "-o", tmp_path / "a.pt2")
    assert sys.modules["json"] is json


def test_tensors_for_a_program_that_takes_numbers_and_keywords(
    built: Callable[[str], Path], tmp_path: Path
) -> None:
    _, (x, _), kwargs, _ = made("named")
    files = [tmp_path / "x.pt", tmp_path / "bias.pt"]
    for file, value in zip(files, (x, kwargs["bias"]), strict=True):
        torch.save(value, file)
    result = tmp_path / "y.pt"
    first, second = files
    called("run", built("named"), "--input", first, "--input", second, "--output", result)
    torch.testing.assert_close(torch.load(result)["sum"], x.sum())
    done = CliRunner().invoke(app, ["run", str(built("named")), "--input", str(first)])
    assert done.exit_code == 2
    assert "1 tensors are given" in done.output


def test_build_of_an_exported_program(factory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    called("build", f"{factory}:exported", "-o", path, "--levels", "1,3")
    shown = called("inspect", path)
    assert "levels 1, 3" in shown
    assert "(2 to 8)" in shown
    assert stator.load(path)(torch.ones(7, 4)).shape == (7, 3)


def test_a_package_for_training(tmp_path: Path) -> None:
    path, model = tmp_path / "step.pt2", torch.nn.Linear(4, 3)
    stator.aot_compile_joint(model, (torch.ones(2, 4),), options={"output_path": path})
    assert "output 0: torch.float32 [2, 3]" in called("run", path)
    assert "weight" in called("inspect", path)
    assert "median" in called("bench", path, "--seconds", "0.05")


def test_bench(built: Callable[[str], Path]) -> None:
    shown = called("bench", built("perceptron"), "--seconds", "0.05")
    assert all(word in shown for word in ("load", "first call", "median"))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_made_up_inputs_fit(name: str, built: Callable[[str], Path]) -> None:
    loaded = stator.load(built(name))
    args, kwargs = made_up_inputs(loaded)
    loaded(*args, **kwargs)
    assert len(args) == len(made(name)[1])


def test_bench_of_no_time(built: Callable[[str], Path]) -> None:
    assert "3 calls" in called("bench", built("perceptron"), "--seconds", "0")


def test_files_that_hold_no_tensor(built: Callable[[str], Path], tmp_path: Path) -> None:
    text, row = tmp_path / "text.pt", tmp_path / "row.pt"
    text.write_text("hello")
    torch.save([torch.ones(3)], row)
    for path, message in (
        (text, "is no file of torch.save's"),
        (row, "holds a list, and a tensor"),
    ):
        words = ["run", str(built("perceptron")), "--input", str(path)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("build", "model.py", "-o", "a.pt2"), "name a function"),
        (("build", "nowhere.py:make", "-o", "a.pt2"), "there is no file"),
        (("inspect", "nowhere.pt2"), "cannot be read"),
        (("run", "nowhere.pt2"), "cannot be read"),
        (("build", "nowhere.py:make", "-o", "a.pt2", "--levels", "x"), "no list of numbers"),
        (("run", "PACKAGE", "--input", "nowhere.pt"), "No such file"),
        (("run", "PACKAGE", "--input", __file__), "Weights only load failed"),
        (("run", "PACKAGE", "--output", "nowhere/y.pt"), "nowhere does not exist"),
        (("build", "nowhere:make", "-o", "a.pt2"), "there is no module nowhere"),
        (("build", "json:__name__", "-o", "a.pt2"), "json has no function __name__"),
        (("build", "builtins:dict", "-o", "a.pt2"), "returned dict: return a torch.export.Export"),
        (("bench", "PACKAGE", "--seconds", "-1"), "than or equal to 0"),
    ],
)
def test_what_is_not_there(
    words: tuple[str, ...], message: str, built: Callable[[str], Path]
) -> None:
    given = [str(built("perceptron")) if word == "PACKAGE" else word for word in words]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
