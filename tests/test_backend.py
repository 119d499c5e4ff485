"""The front door: the entry point, stator.compile, compile_fx."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

import stator
from stator.core.events import Compilation
from stator.errors import CompileError, OptionError, StatorWarning

BY_NAME_ALONE: Final = """
import json, sys
import torch
imported = "stator" in sys.modules
listed = "stator" in torch._dynamo.list_backends()
out = torch.compile(lambda x: x.sin() + 1, backend="stator")(torch.zeros(2)).tolist()
stages = [stage.name for stage in sys.modules["stator"].last_compilation().stages]
print(json.dumps([imported, listed, out, stages]))
"""


def record() -> Compilation:
    found = stator.last_compilation()
    assert found is not None, "something was compiled"
    return found


def shifted(x: Tensor) -> Tensor:
    return x.sin() + 1


# torch.compile


def test_the_name_alone_is_enough_no_import_is_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BY_NAME_ALONE]
    # Away from the repository, so that only what is installed can be found.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    imported, listed, out, stages = json.loads(done.stdout)
    assert not imported
    assert listed
    assert out == [1, 1]
    assert "trace" in stages


def test_options_of_torch_compile_are_ours_by_name(tmp_path: Path) -> None:
    given = {"skip": ["drop_noops"], "dump_dir": str(tmp_path)}

    torch.compile(shifted, backend="stator", options=given)(torch.zeros(2))

    assert any("drop_noops skipped" in note for note in record().notes)
    assert list(tmp_path.glob("compilation_*/forward.txt"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"mode": "fastest"}, r"unknown mode 'fastest'(.|\n)*max-autotune, "),
        ({"options": {"fule": 1}}, r"unknown option 'fule'(.|\n)*did you mean 'fuel'\?"),
        ({"options": {"fuel": "1"}}, r"option 'fuel' cannot be '1'(.|\n)*a count"),
    ],
    ids=["mode", "option", "value"],
)
def test_torch_compile_says_what_is_wrong_with_its_settings(
    setting: dict[str, Any], said: str
) -> None:
    call = torch.compile(shifted, backend="stator", **setting)

    with pytest.raises(BackendCompilerFailed, match=said) as caught:
        call(torch.zeros(2))

    assert isinstance(caught.value.inner_exception, OptionError)


# stator.compile


def test_a_decorated_function_is_compiled() -> None:
    @stator.compile
    def decorated(x: Tensor) -> Tensor:
        return x.sin() + 2

    assert decorated(torch.zeros(2)).tolist() == [2, 2]
    assert "sin" in record().graphs["forward"]


def test_a_decorator_takes_options() -> None:
    @stator.compile(strict=True, skip=("drop_noops",))
    def decorated(x: Tensor) -> Tensor:
        return x.sin() + 2

    assert decorated(torch.zeros(2)).tolist() == [2, 2]
    assert any("drop_noops skipped" in note for note in record().notes)


def test_a_compiled_module_keeps_its_parameters() -> None:
    module = nn.Linear(3, 2)
    compiled, x = stator.compile(module, strict=True), torch.randn(4, 3)

    compiled(x).sum().backward()

    torch.testing.assert_close(compiled(x), module(x))
    assert module.weight.grad is not None
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in module.parameters()}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_stator_compile_takes_a_mode(mode: str) -> None:
    assert stator.compile(shifted, mode=mode)(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [{"mode": "fastest"}, {"fule": 1}, {"backend": "inductor"}])
def test_a_wrong_setting_is_refused_before_anything_runs(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        stator.compile(shifted, **wrong)


def compilations_of(call: Callable[..., Any], *sizes: int) -> int:
    """How many compilations the calls took."""
    seen: list[Compilation | None] = []
    for size in sizes:
        call(torch.zeros(size))
        if not any(stator.last_compilation() is known for known in seen):
            seen.append(stator.last_compilation())
    return len(seen)


def test_dynamic_is_torch_compile_s() -> None:
    assert compilations_of(stator.compile(shifted, dynamic=True), 3, 4, 5) == 1
    assert compilations_of(stator.compile(lambda x: x.cos(), dynamic=False), 3, 4, 5) == 3


def test_fullgraph_is_torch_compile_s() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1

    with pytest.raises(Unsupported):
        stator.compile(broken, fullgraph=True)(torch.zeros(2))


def test_disable_is_torch_compile_s() -> None:
    before = stator.last_compilation()

    assert stator.compile(shifted, disable=True)(torch.zeros(2)).tolist() == [1, 1]
    assert stator.last_compilation() is before


def test_each_compiled_function_keeps_its_own_options() -> None:
    skipping = stator.compile(shifted, skip=("drop_noops",))
    plain = stator.compile(lambda x: x.cos() + 1)

    plain(torch.zeros(2))
    without = record()
    skipping(torch.zeros(2))

    assert without.notes == []
    assert any("drop_noops skipped" in note for note in record().notes)


# Dumps


def test_a_dump_folder_gets_the_text_of_every_graph(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    x = torch.randn(3, requires_grad=True)

    stator.compile(shifted, dump_dir=folder)(x).sum().backward()

    texts = {file.stem: file.read_text() for file in folder.glob("compilation_*/*.txt")}
    graphs = record().graphs
    assert {"joint", "forward", "backward"} <= set(graphs)
    assert all(texts[name] == text + "\n" for name, text in graphs.items())
    assert "aten.sin" in texts["forward"]
    assert "aten.cos" in texts["backward"]
    assert sum("drop_noops_before" in name for name in texts) == 3  # of the whole, and of each half


def test_the_environment_asks_for_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATOR_DUMP", str(tmp_path))

    torch.compile(shifted, backend="stator")(torch.zeros(2))

    assert list(tmp_path.glob("compilation_*/forward.txt"))


# compile_fx


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (F.dropout(x * self.weight, training=False) + self.shift,)


def shifted_graph() -> fx.GraphModule:
    """As Dynamo hands a graph over: it returns a tuple."""
    return fx.symbolic_trace(lambda x: (shifted(x),))


def test_a_graph_compiles_without_dynamo() -> None:
    module, x = shifted_graph(), torch.randn(3)

    (out,) = stator.compile_fx(module, [x], options={"strict": True})(x)

    torch.testing.assert_close(out, shifted(x))


def test_tensors_of_the_module_stay_its_own() -> None:
    affine, x = Affine(), torch.randn(3)
    call = stator.compile_fx(fx.symbolic_trace(affine), [x], options={"strict": True})

    (before,) = call(x)
    torch.testing.assert_close(before, affine(x)[0])
    (grad,) = torch.autograd.grad(before.sum(), affine.weight)
    torch.testing.assert_close(grad, x)
    with torch.no_grad():
        affine.weight.add_(1)
        affine.shift.zero_()
    torch.testing.assert_close(call(x)[0], affine(x)[0])


def test_the_graph_that_was_given_is_left_as_it_was() -> None:
    module = fx.symbolic_trace(Affine())
    before = str(module.graph)

    stator.compile_fx(module, [torch.randn(3)], options={"strict": True})

    (settled,) = (event for event in record().stages if "settle_dropout" in event.name)
    assert settled.changed == 1  # in a copy
    assert str(module.graph) == before


def refuse(*_: Any) -> Any:
    raise RuntimeError("no executor today")


def test_a_graph_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stator.pipeline.load_native", refuse)
    module, x = shifted_graph(), torch.randn(3)

    with pytest.warns(StatorWarning, match="stage 'forward/executor' failed.*no executor today"):
        call = stator.compile_fx(module, [x])

    assert torch.equal(call(x)[0], shifted(x))
    assert "no executor today" in (record().fallback or "")


def test_a_strict_graph_raises_with_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stator.pipeline.load_native", refuse)

    with pytest.raises(CompileError, match="no executor today") as caught:
        stator.compile_fx(shifted_graph(), [torch.randn(3)], options=stator.Options(strict=True))

    assert caught.value.stage == "forward/executor"


# The package


def test_every_public_name_is_there() -> None:
    assert set(stator.__all__) == set(dir(stator))
    assert all(getattr(stator, name) is not None for name in stator.__all__)


def test_a_name_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"'compile_it'.*'compile'"):
        stator.compile_it  # noqa: B018  the reading is the test


def test_a_program_of_operators_may_write_in_place() -> None:
    """Dynamo captures exported programs as they are: with operators, not torch functions."""

    def written(x: Tensor) -> Tensor:
        return torch.ops.aten.relu_.default(x + 1) * 2

    x = torch.randn(5)
    found = torch.compile(written, backend="stator", options={"strict": True})(x)
    torch.testing.assert_close(found, written(x))
