"""Ten models: built here, loaded in a process without a compiler, compared; and by torch itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stator
from stator.errors import CompileError, OptionError, PackageError, Unsupported
from stator.torch_api import FakeTensorMode
from tests.package.models import MODELS, Counter, Perceptron, made

# torch.export's opinion of torch.nn.LSTM.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.cells")

# What a server does: Dynamo, LLVM and the compiler stay out.
SERVER = """
import sys, torch, stator
from pathlib import Path
from tests.package.models import made
for path in map(Path, sys.argv[1:]):
    model, args, kwargs, _ = made(path.stem)
    loaded = stator.load(path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(loaded(*args, **kwargs), model(*args, **kwargs))
for name in ("torch._dynamo", "torch._inductor", "llvmlite", "stator.pipeline", "stator.aot.trace"):
    assert name not in sys.modules, name
print("all", len(sys.argv) - 1)
"""


def test_ten_models_in_a_process_without_a_compiler(built: Callable[[str], Path]) -> None:
    paths = [str(built(name)) for name in MODELS]
    environment = {**os.environ, "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SERVER, *paths],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"all {len(MODELS)}"


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"named"}))
def test_torchs_own_loader_runs_them(name: str, built: Callable[[str], Path]) -> None:
    model, args, kwargs, _ = made(name)
    loaded = torch._inductor.aoti_load_package(str(built(name)))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(loaded(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("level", [1, 3, 4])
def test_every_level_of_processors(level: int, tmp_path: Path) -> None:
    for name in ("perceptron", "halves"):
        model, args, kwargs, _ = made(name)
        wishes = {"output_path": tmp_path / f"{name}.pt2", "levels": (level,)}
        with torch.no_grad():
            loaded = stator.load(stator.aot_compile(model, args, kwargs, options=wishes))
            torch.testing.assert_close(loaded(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("linker", [True, False], ids=["linked", "objects"])
def test_a_processor_without_its_instructions(
    linker: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, _, _ = made("perceptron")
    for levels, asked, fits in (((4,), 3, False), ((3, 4), 1, False), ((1, 4), 3, True)):
        wishes = {"output_path": tmp_path / "m.pt2", "levels": levels, "linker": linker}
        path = stator.aot_compile(model, args, options=wishes)
        monkeypatch.setenv("STATOR_LEVEL", str(asked))  # stands for a processor of that level
        if fits:
            stator.load(path)(*args)
        else:
            with pytest.raises(PackageError, match=rf"for level {levels[0]} .* of level {asked}"):
                stator.load(path)
        if not fits and linker:
            with pytest.raises(RuntimeError):
                torch._inductor.aoti_load_package(path)
        monkeypatch.delenv("STATOR_LEVEL")


@pytest.mark.parametrize("freezing", [False, True], ids=["plain", "frozen"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_without_a_linker(name: str, freezing: bool, tmp_path: Path) -> None:
    model, args, kwargs, dynamic = made(name)
    wishes = {"output_path": tmp_path / "model.pt2", "linker": False, "freezing": freezing}
    with torch.no_grad():
        path = stator.aot_compile(model, args, kwargs, dynamic_shapes=dynamic, options=wishes)
        loaded = stator.load(path)
        torch.testing.assert_close(loaded(*args, **kwargs), made(name)[0](*args, **kwargs))


def test_sizes_that_vary(built: Callable[[str], Path]) -> None:
    model = made("dynamic")[0]
    loaded = stator.load(built("dynamic"))
    with torch.no_grad():
        for size in (2, 5, 63, 64):
            x = torch.randn(size, 8)
            torch.testing.assert_close(loaded(x), model(x))
    for size in (0, 1, 65):
        with pytest.raises(ValueError, match=rf"size {size} in dimension 0.* 2 to 64"):
            loaded(torch.randn(size, 8))


def test_a_size_without_a_bound_is_so_many_or_more(tmp_path: Path) -> None:
    batch, wishes = torch.export.Dim("batch"), {"output_path": tmp_path / "m.pt2", "levels": (1,)}
    path = stator.aot_compile(
        torch.nn.ReLU(), (torch.ones(4),), dynamic_shapes=({0: batch},), options=wishes
    )
    with pytest.raises(ValueError, match="size 1 in dimension 0, and it was built for 2 or more"):
        stator.load(path)(torch.ones(1))


class Doubled(torch.nn.Module):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice, in place."""
        return x.mul_(2)


def test_autograd_knows_what_was_written_to(tmp_path: Path) -> None:
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    path = stator.aot_compile(Doubled(), (x,), options={"output_path": tmp_path / "m.pt2"})
    product = weight * x
    assert stator.load(path)(x) is x
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_an_input_that_is_written_to_must_lie_as_the_example(tmp_path: Path) -> None:
    x, path = torch.ones(3, 4), tmp_path / "m.pt2"
    loaded = stator.load(stator.aot_compile(Doubled(), (x,), options={"output_path": path}))
    with pytest.raises(ValueError, match="input 0, x: the program writes to it, and it lies othe"):
        loaded(torch.ones(4, 3).t())


def test_inputs_that_lie_otherwise(built: Callable[[str], Path]) -> None:
    model, (x,), _, _ = made("images")
    loaded = stator.load(built("images"))
    odd = [x.to(memory_format=torch.channels_last), x.mT, x.expand(2, 3, 8, 8), x.flip(0)[::1]]
    with torch.no_grad():
        for given in odd:
            torch.testing.assert_close(loaded(given), model(given))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((torch.randn(5, 9),), "input 0, x: size 9 in dimension 1, and it was built for 8"),
        ((torch.randn(5, 8).double(),), "input 0, x: type float64, and it was built for float32"),
        ((torch.randn(8),), "input 0, x: 1 dimensions, and it was built for 2"),
        (
            (torch.randn(5, 8, device="meta"),),
            "it is on another kind of device, and",
        ),
    ],
)
def test_wrong_inputs(bad: tuple[torch.Tensor], message: str, built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    with pytest.raises((ValueError, RuntimeError), match=message):
        loaded(*bad)
    torch.testing.assert_close(loaded(torch.zeros(5, 8))[0].sum(-1), torch.ones(5))


def test_wrong_forms(built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    x = torch.randn(5, 8)
    for args, kwargs in (((x, x), {}), ((), {}), (([x],), {}), ((x,), {"y": x})):
        with pytest.raises(TypeError, match="was built for"):
            loaded(*args, **kwargs)


class Less(torch.nn.Linear):
    """Takes two tensors, and has a weight."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A difference, and a product with the weight."""
        return (a - 2 * b) @ self.weight


def test_an_example_given_twice_stands_for_two_inputs(tmp_path: Path) -> None:
    model, wishes = Less(3, 3), {"output_path": tmp_path / "less.pt2"}
    x, a, b = torch.ones(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    for args in ((x, x), (x, model.weight), (model.weight, model.weight)):
        loaded = stator.load(stator.aot_compile(model, args, options=wishes))
        torch.testing.assert_close(loaded(a, b), model(a, b).detach())
        loaded = stator.load(stator.aot_compile_joint(model, args, options=wishes))
        torch.testing.assert_close(loaded(a, b), model(a, b))


def test_a_program_that_took_two_inputs_for_one_is_refused(tmp_path: Path) -> None:
    model, x = Less(3, 3), torch.ones(3, 3)
    wishes = {"output_path": tmp_path / "less.pt2"}
    for args in ((x, x), (x, model.weight)):
        program = torch.export.export(model, args)
        with pytest.raises(Unsupported, match=r"one tensor was given to torch\.export in"):
            stator.aot_compile(program, options=wishes)
    stator.aot_compile(torch.export.export(model, (x, x.clone())), options=wishes)


def test_numbers_and_words_are_those_of_the_example(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, factors: list[float], *, mode: str | None, y: torch.Tensor
        ) -> torch.Tensor:
            """A sum, or a difference."""
            return x * factors[0] + y if mode == "sum" else x * factors[1] - y

    x, y = torch.randn(3), torch.randn(3)
    given = {"mode": "sum", "y": y}
    wishes = {"output_path": tmp_path / "m.pt2"}
    loaded = stator.load(stator.aot_compile(Scaled(), (x, [2, 0.5]), given, options=wishes))
    torch.testing.assert_close(loaded(x, [2, 0.5], y=y, mode="sum"), x * 2 + y)
    for args, changed, message in (
        ((x, [3, 0.5]), {}, r"args\[1\]\[0\] is 3, and m.pt2 was built for 2 alone"),
        ((x, [2, 1e-9]), {}, r"args\[1\]\[1\] is 1e-09, and m.pt2 was built for 0.5 alone"),
        ((x, [2.0, 0.5]), {}, "is 2.0, and m.pt2 was built for 2 alone"),
        ((x, [x, 0.5]), {}, r"args\[1\]\[0\] is a tensor, and m.pt2 was built for 2 alone"),
        ((2, [2, 0.5]), {}, r"args\[0\] is 2, and m.pt2 was built for a tensor"),
        ((x, [2, 0.5]), {"mode": "difference"}, r"kwargs\['mode'\] is 'difference', and"),
        ((x, [2, 0.5]), {"mode": None}, r"kwargs\['mode'\] is None, and .* for 'sum' alone"),
    ):
        with pytest.raises(TypeError, match=message):
            loaded(*args, **{**given, **changed})


def test_tensors_that_are_not_what_lies_in_their_memory_are_refused(
    built: Callable[[str], Path],
) -> None:
    loaded, x = stator.load(built("perceptron")), torch.ones(5, 8)
    with FakeTensorMode():
        fake = torch.ones(5, 8)
    for odd, message in (
        (fake, "is a FakeTensor, and perceptron.pt2 was built for a plain tensor"),
        (torch._neg_view(x), "a view of the negative of its memory"),
        (x.to_sparse(), "input 0, x: it is sparse, or packed"),
        (x.to_mkldnn(), "input 0, x: it is sparse, or packed"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loaded(odd)
    torch.testing.assert_close(loaded(torch._neg_view(x).resolve_neg()), loaded(-x))


@pytest.mark.parametrize("build", [stator.aot_compile, stator.aot_compile_joint])
def test_an_input_that_is_written_to_shares_no_memory(
    build: Callable[..., str], tmp_path: Path
) -> None:
    class Added(torch.nn.Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """A sum, after one was changed."""
            return a.add_(1) + b + 0 * super().forward(b)

    x, y = torch.ones(3), torch.ones(3)
    loaded = stator.load(build(Added(3, 3), (x, y), options={"output_path": tmp_path / "m.pt2"}))
    torch.testing.assert_close(loaded(x, y).detach(), torch.full((3,), 3.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="input 0 shares memory with another, and the program wr"):
        loaded(x, x)
    torch.testing.assert_close(loaded(y, x).detach(), torch.full((3,), 4.0))


def test_keywords_in_any_order(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """The difference."""
            return a - b

    x, y = torch.randn(3), torch.randn(3)
    wishes = {"output_path": tmp_path / "two.pt2"}
    loaded = stator.load(stator.aot_compile(Two(), (), {"a": x, "b": y}, options=wishes))
    torch.testing.assert_close(loaded(b=y, a=x), x - y)


def test_gradients_are_not_recorded(built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    x = torch.randn(5, 8, requires_grad=True)
    assert torch.is_grad_enabled()
    assert not loaded(x)[0].requires_grad
    assert torch.is_grad_enabled()


def test_sizes_that_follow_from_values_are_refused_by_line(tmp_path: Path) -> None:
    class Found(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Twice what is positive."""
            return x[x > 0] * 2

    path = tmp_path / "found.pt2"
    with pytest.raises(Unsupported, match=r"test_round_trip.py:\d+: .* follows from values"):
        stator.aot_compile(Found(), (torch.randn(5),), options={"output_path": path})


def test_a_number_of_data_scales_within_a_library(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Times the largest."""
            return x * x.max().item()

    x, path = torch.randn(5), tmp_path / "scaled.pt2"
    loaded = stator.load(stator.aot_compile(Scaled(), (x,), options={"output_path": path}))
    for given in (x, x + 1):
        torch.testing.assert_close(loaded(given), given * given.max())


def test_what_cannot_be_a_library_is_refused(tmp_path: Path) -> None:
    class Many(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """As many ones as there are in `x`, by a Python function."""
            return torch.ops.aten._assert_async(x.sum() > 0) or x.bincount(minlength=3)

    path = tmp_path / "many.pt2"
    with pytest.raises((Unsupported, torch._dynamo.exc.UserError, RuntimeError)):
        stator.aot_compile(Many(), (torch.tensor([1, 2]),), options={"output_path": path})
    assert list(tmp_path.iterdir()) == []


def test_a_class_that_no_file_can_name_is_refused(tmp_path: Path) -> None:
    class Sorted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            """Torch's own class."""
            return torch.sort(x)

    for build in (stator.aot_compile, stator.aot_compile_joint):
        with pytest.raises(Unsupported, match=r"its results are nested .*return_types\.sort"):
            build(Sorted(), (torch.randn(3),), options={"output_path": tmp_path / "m.pt2"})


def test_options_of_its_own(tmp_path: Path) -> None:
    x = (torch.randn(5, 8),)
    for wishes, message in (
        ({"output_path": tmp_path / "model.zip"}, "ends in .pt2"),
        ({"output_path": tmp_path / "a.pt2", "levels": (2,)}, "levels cannot be"),
        ({"output_path": tmp_path / "a.pt2", "levels": 3}, "levels cannot be 3"),
        ({"output_path": tmp_path / "a.pt2", "levels": (3.0,)}, "levels cannot be"),
        ({"output_path": tmp_path / "a.pt2", "freezin": True}, "unknown option"),
    ):
        with pytest.raises(OptionError, match=message):
            stator.aot_compile(Perceptron(), x, options=wishes)
    assert list(tmp_path.iterdir()) == []


def test_a_library_alone_has_its_weights_within(tmp_path: Path) -> None:
    model, args, _, _ = made("perceptron")
    path = stator.aot_compile(model, args, options={"output_path": tmp_path / "model.so"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.so"]
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
    with torch.no_grad():
        torch.testing.assert_close(tuple(runner.run(list(args))), model(*args))


@pytest.mark.parametrize("end", [".pt2", ".so"])
def test_a_graph_that_takes_its_inputs_one_by_one(end: str, tmp_path: Path) -> None:
    graph, (x,) = torch.fx.symbolic_trace(made("perceptron")[0]), made("perceptron")[1]
    path = stator.compile_fx_aot(graph, [x], options={"output_path": tmp_path / f"m{end}"})
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu
    with torch.no_grad():
        found = stator.load(path)(x) if end == ".pt2" else tuple(runner(path, 1).run([x]))
        torch.testing.assert_close(found, graph(x))


def test_a_machine_without_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _, _ = made("perceptron")
    monkeypatch.setenv("PATH", "")
    path = stator.aot_compile(model, args, options={"output_path": tmp_path / "m.pt2"})
    with torch.no_grad():
        torch.testing.assert_close(stator.load(path)(*args), model(*args))
    with pytest.raises(CompileError, match="there is no linker on this machine"):
        stator.aot_compile(model, args, options={"output_path": tmp_path / "m.so"})


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = Counter()
    path = stator.aot_compile(
        model, (torch.randn(3),), options={"output_path": tmp_path / "counter.pt2"}
    )
    loaded, other = stator.load(path), stator.load(path)
    x = torch.ones(3)
    assert [int(loaded(x)[0]) for _ in range(3)] == [1, 2, 3]
    assert [int(other(x)[0]) for _ in range(2)] == [1, 2]  # each has buffers of its own
    assert model.calls == 0
