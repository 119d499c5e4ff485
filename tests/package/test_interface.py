"""The C interface, through torch's own runner: names, types, constants changed and swapped."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import stator
from stator.package import native
from stator.package.tables import runtime_text
from tests.package.models import made

INCLUDE = Path(torch.__file__).parent / "include"
HEADER = INCLUDE / "torch/csrc/inductor/aoti_runtime/interface.h"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bare library of the perceptron."""
    model, args, _, _ = made("perceptron")
    path = tmp_path_factory.mktemp("library") / "model.so"
    with torch.no_grad():
        return stator.aot_compile(model, args, options={"output_path": path})


@pytest.fixture
def runner(library: str) -> Any:
    """Torch's runner of it."""
    return torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1)


def state(seed: int) -> dict[str, torch.Tensor]:
    """Other weights."""
    torch.manual_seed(seed)
    parameters = made("perceptron")[0].named_parameters()
    return {name: torch.randn_like(value) for name, value in parameters}


def expected(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the model computes with other weights."""
    model = made("perceptron")[0]
    with torch.no_grad():
        return torch.func.functional_call(model, weights, (x,))[0]


def test_names_and_types(runner: Any) -> None:
    names = {name for name, _ in made("perceptron")[0].named_parameters()}
    assert set(runner.get_constant_names_to_original_fqns().values()) == names
    assert set(runner.get_constant_names_to_dtypes().values()) == {6}
    assert len(runner.get_call_spec()) == 2


def test_constants_come_back(runner: Any) -> None:
    found = runner.extract_constants_map(False)
    for name, value in made("perceptron")[0].named_parameters():
        torch.testing.assert_close(found[name], value.detach())


def test_constants_are_changed_and_swapped(runner: Any) -> None:
    x = made("perceptron")[1][0]
    first, second = state(1), state(2)
    runner.update_constant_buffer(first, False, True)
    torch.testing.assert_close(runner.run([x])[0], expected(first, x))
    runner.update_constant_buffer(second, True, True)
    torch.testing.assert_close(runner.run([x])[0], expected(first, x))
    runner.swap_constant_buffer()
    torch.testing.assert_close(runner.run([x])[0], expected(second, x))
    runner.free_inactive_constant_buffer()
    with pytest.raises(RuntimeError):
        runner.swap_constant_buffer()
    torch.testing.assert_close(runner.run([x])[0], expected(second, x))


def test_some_constants_are_changed(runner: Any) -> None:
    x = made("perceptron")[1][0]
    weights = dict(made("perceptron")[0].named_parameters())
    given = {"second.bias": torch.ones(4)}
    runner.update_constant_buffer(given, False, False)
    torch.testing.assert_close(runner.run([x])[0], expected({**weights, **given}, x))


@pytest.mark.parametrize(
    "given",
    [
        {"nobody": torch.ones(4)},
        {"second.bias": torch.ones(5)},
        {"second.bias": torch.ones(4).double()},
        {"second.bias": torch.ones(4, 1)},
    ],
    ids=["name", "size", "type", "dimensions"],
)
def test_constants_that_do_not_fit(given: dict[str, torch.Tensor], built: Any) -> None:
    loaded = stator.load(built("perceptron"))
    x = made("perceptron")[1][0]
    before = loaded(x)[0]
    with pytest.raises(RuntimeError, match=r"nobody|second\.bias"):
        loaded.load_constants(given)
    torch.testing.assert_close(loaded(x)[0], before)


def test_all_constants_when_all_are_asked_for(built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    with pytest.raises(RuntimeError, match="missing"):
        loaded.load_constants({"second.bias": torch.ones(4)}, check_full_update=True)
    loaded.load_constants(state(3), check_full_update=True)
    x = made("perceptron")[1][0]
    torch.testing.assert_close(loaded(x)[0], expected(state(3), x))


@pytest.mark.parametrize("name", ["words.weight", "head.weight"])
def test_a_weight_with_two_names_changes_under_both(
    name: str, built: Callable[[str], Path]
) -> None:
    model, (words,), _, _ = made("tied")
    loaded, new = stator.load(built("tied")), torch.randn(20, 8)
    model.words.weight.data.copy_(new)
    loaded.load_constants({name: new}, check_full_update=True)
    torch.testing.assert_close(loaded(words), model(words).detach())
    runner = torch._inductor.aoti_load_package(str(built("tied")))
    runner.load_constants({name: new}, check_full_update=True)
    torch.testing.assert_close(runner(words), model(words).detach())
    loaded.load_constants(dict.fromkeys(("words.weight", "head.weight"), new.neg()))
    model.words.weight.data.neg_()
    torch.testing.assert_close(loaded(words), model(words).detach())


def test_a_weight_that_shares_memory_is_not_changed_alone(tmp_path: Path) -> None:
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.there = torch.nn.Parameter(torch.randn(4, 4))
            self.back = torch.nn.Parameter(self.there.detach().t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """There and back again."""
            return x @ self.there @ self.back

    model, x = Turned(), torch.randn(3, 4)
    loaded = stator.load(
        stator.aot_compile(model, (x,), options={"output_path": tmp_path / "m.pt2"})
    )
    new = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="back: the constant shares memory with another"):
        loaded.load_constants({"there": new})
    loaded.load_constants({"there": new, "back": new.t()})
    torch.testing.assert_close(loaded(x), x @ new @ new.t())


def test_a_weight_that_others_were_made_of_is_none_of_a_frozen_package(tmp_path: Path) -> None:
    model, args, _, _ = made("tied")
    wishes = {"output_path": tmp_path / "m.pt2", "freezing": True}
    loaded = stator.load(stator.aot_compile(model, args, options=wishes))
    for name in ("words.weight", "head.weight"):
        with pytest.raises(RuntimeError, match=f"{name}: .* no constant of that name .freezing"):
            loaded.load_constants({name: torch.randn(20, 8)})


def test_constants_of_other_strides_are_copied(built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    weight = torch.randn(8, 16).t()
    loaded.load_constants({"first.weight": weight})
    torch.testing.assert_close(loaded.constants()["first.weight"], weight)


def test_weights_do_not_go_while_they_are_read(
    built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, wrapped = stator.load(built("perceptron")), native._wrapped
    before = loaded.constants()
    other = Thread(target=loaded.load_constants, args=(state(1),))

    def reading(*args: Any, **kwargs: Any) -> torch.Tensor:
        if other.ident is None:
            other.start()
            other.join(0.2)
        assert other.is_alive(), "the handles that are read are gone"
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(native, "_wrapped", reading)
    torch.testing.assert_close(loaded.constants(), before)
    monkeypatch.undo()
    other.join()
    torch.testing.assert_close(loaded.constants(), state(1))


def test_weights_change_while_others_run(built: Callable[[str], Path]) -> None:
    loaded = stator.load(built("perceptron"))
    x = made("perceptron")[1][0]
    states = [state(seed) for seed in range(2)]
    right = [expected(one, x) for one in states]
    loaded.load_constants(states[0])
    wrong: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(300):
            found = loaded(x)[0]
            if not any(torch.allclose(found, one, atol=1e-5) for one in right):
                wrong.append(found)

    threads = [Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(100):
        loaded.load_constants(states[number % 2])
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not HEADER.exists(), reason="torch came without its headers")
def test_every_function_of_the_container_is_there() -> None:
    wanted = set(re.findall(r"AOTInductorModelContainer\w+(?=\()", HEADER.read_text()))
    ours = set(re.findall(r"^define i32 @(AOTInductor\w+)", runtime_text(), re.MULTILINE))
    assert wanted <= ours


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.skipif(not HEADER.exists(), reason="torch came without its headers")
def test_a_program_in_cpp_without_python(built: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "examples" / "cpp" / "main.cpp"
    libraries = Path(torch.__file__).parent / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    program = tmp_path / "run"
    command = ["g++", "-std=c++20", str(source), "-o", str(program), f"-I{INCLUDE}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-L{libraries}", "-ltorch", "-ltorch_cpu"]
    command += ["-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True, capture_output=True)

    model, (x,), _, _ = made("images")
    (tmp_path / "in").write_bytes(x.numpy().tobytes())
    sizes = ",".join(map(str, x.size()))
    told = [str(program), str(built("images")), str(tmp_path / "in"), sizes, str(tmp_path / "out")]
    done = subprocess.run(told, capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    linked = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    assert "python" not in linked.stdout.replace(str(libraries), "")
    found = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found.view(2, 5), model(x))

    bad = subprocess.run(
        [*told[:3], "1,3,8,8", told[4]], capture_output=True, text=True, check=False, env={}
    )
    assert bad.returncode == 1
