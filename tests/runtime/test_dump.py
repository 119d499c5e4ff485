"""Every stage of a compilation as text, in the dump folder."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import stator
from stator.errors import OptionError
from stator.loops.parse import parse
from stator.loops.verify import verify


def dumped(folder: Path, fn: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, str]:
    """Texts by file name of one compilation without gradients."""
    stator.compile(fn, dump_dir=folder, strict=True, kernels=True, **options)(*inputs)
    (only,) = folder.iterdir()
    return {file.name: file.read_text() for file in only.iterdir()}


def mixed(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Loops, a reduction, a scan, a scatter, a check and a call of torch's."""
    y = x.softmax(-1)
    return (y @ w).relu(), y.cumsum(0), torch.zeros(8).index_add(0, i, x.sum(-1))


def mixed_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(8, 8), torch.tensor([0, 2, 1, 2])


def test_every_stage_is_written(tmp_path: Path) -> None:
    texts = dumped(tmp_path, mixed, *mixed_inputs())

    passes = {name for name in texts if name.endswith(("_before.txt", "_after.txt"))}
    assert "001_normalize_keywords_before.txt" in passes
    assert any(name.endswith("_drop_noops_after.txt") for name in passes)
    assert set(texts) - passes == {
        "traced.txt",
        "forward.txt",
        "forward_loops.txt",
        "forward_schedule.txt",
        "forward_kernels.txt",
        "forward.ll",
        "forward.s",
        "forward_plan.txt",
        "forward_host.ll",
        "forward_program.py",
    }


def test_loops_show_each_kind_of_item(tmp_path: Path) -> None:
    text = dumped(tmp_path, mixed, *mixed_inputs())["forward_loops.txt"]

    assert "_softmax: f32[4, 8], strides [8, 1]\n  outer i0: 4, i1: 8\n" in text
    assert "  stage r0: 8\n    total max= arg0_1[8*i0 + r0]\n" in text  # a reduction
    assert "  scan i0: 4\n    total sum=" in text
    assert "scatter into " in text
    assert "IndexError unless 0: index out of range in self" in text
    assert "torch runs mm = aten.mm.default(_softmax, arg1_1)\n  no rule\n" in text


def test_the_schedule_names_members_and_reasons(tmp_path: Path) -> None:
    text = dumped(tmp_path, mixed, *mixed_inputs())["forward_schedule.txt"]

    assert "group 0: kernel_0, rows: 4\n" in text
    assert "  _softmax maps, rows along i0\n" in text
    _, _, refused = text.partition("not fused:\n")
    assert " with " in refused
    assert "other rows than" in refused


def test_kernels_parse_back_and_stand_in_the_plan_and_in_llvm(tmp_path: Path) -> None:
    texts = dumped(tmp_path, mixed, *mixed_inputs())

    names = []
    for text in texts["forward_kernels.txt"].split("\n\n"):
        kernel = parse(text)
        verify(kernel)
        names.append(kernel.name)
    assert names
    for name in names:
        assert f"{name}(" in texts["forward_plan.txt"]
        assert f"define void @{name}(" in texts["forward.ll"]
        assert f"\n{name}:" in texts["forward.s"]
        assert f": {name}\n" in texts["forward_program.py"]


def test_the_program_is_python(tmp_path: Path) -> None:
    text = dumped(tmp_path, mixed, *mixed_inputs())["forward_program.py"]

    ast.parse(text)
    assert "def run(args):" in text


def test_kernels_from_the_cache_are_dumped_too(tmp_path: Path) -> None:
    x = torch.randn(3, 5)
    first = dumped(tmp_path / "first", lambda x: x.softmax(-1), x)
    torch._dynamo.reset()

    second = dumped(tmp_path / "second", lambda x: x.softmax(-1), x)

    for name in ("forward_kernels.txt", "forward.ll", "forward.s", "forward_plan.txt"):
        assert second[name] == first[name]


def test_equal_kernels_are_compiled_once_and_said_to_be_equal(tmp_path: Path) -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.gelu(x @ w) @ w)

    text = dumped(tmp_path, twice, torch.randn(4, 4), torch.randn(4, 4))["forward.ll"]

    assert "; kernel_3 is kernel_1: a0 = mm_1" in text
    assert "@kernel_3(" not in text


def test_launches_over_a_list_are_named_too(tmp_path: Path) -> None:
    def step(parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_sub(parameters, gradients, alpha=0.1))

    sizes = (100, 300, 200, 500)
    tensors = [[torch.randn(n) for n in sizes] for _ in range(2)]
    texts = dumped(tmp_path, step, *tensors)

    assert texts["forward_plan.txt"].count("kernel_") == len(sizes)
    assert texts["forward.ll"].count(" is kernel_0: ") == len(sizes) - 1
    assert texts["forward.ll"].count("define void @") == 1


def test_symbolic_sizes_are_named(tmp_path: Path) -> None:
    texts = dumped(tmp_path, lambda x: x.softmax(-1), torch.randn(4, 8), dynamic=True)

    assert "outer i0: size_s" in texts["forward_loops.txt"]
    assert "n000 = size_s" in texts["forward.ll"]


def test_without_kernels_there_are_plan_and_program(tmp_path: Path) -> None:
    stator.compile(torch.sin, dump_dir=tmp_path, kernels=False)(torch.randn(3))

    names = {file.name for file in tmp_path.glob("compilation_*/*")}
    assert {"forward.txt", "forward_plan.txt", "forward_program.py"} <= names
    assert "forward.ll" not in names


def test_a_second_graph_of_one_name_gets_a_number(tmp_path: Path) -> None:
    compiled = stator.aot_function(torch.sin, dump_dir=tmp_path)

    compiled(torch.randn(3))
    compiled(torch.randn(4))

    names = {file.name for file in tmp_path.glob("compilation_*/*")}
    assert {"forward.txt", "forward_2.txt", "forward_plan.txt", "forward_2_plan.txt"} <= names


# Where nothing can be written


@pytest.mark.parametrize("strict", [True, False])
def test_an_unwritable_folder_is_an_option_error(tmp_path: Path, strict: bool) -> None:
    (tmp_path / "taken").write_text("a file")
    compiled = stator.compile(torch.sin, dump_dir=tmp_path / "taken", strict=strict)

    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.randn(3))

    error = caught.value.inner_exception
    assert isinstance(error, OptionError)
    assert "please report" not in str(error)
    assert str(tmp_path / "taken") in str(error)
    assert "Options.dump_dir" in str(error)


def test_without_dynamo_nothing_runs_before_the_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    x = torch.zeros(3)

    with pytest.raises(OptionError, match="cannot be written"):
        stator.aot_function(lambda x: x.add_(1), dump_dir=tmp_path / "taken")(x)

    assert torch.equal(x, torch.zeros(3))
