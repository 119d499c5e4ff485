"""Conditions that torch.export found: calls that break them are refused, as torch refuses them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import stator
from stator.errors import Unsupported

Body = Callable[[torch.Tensor, torch.Tensor], Any]


class Called(torch.nn.Module):
    """A function of two tensors."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """What the function returns."""
        return self.body(x, y)


def halved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Another program for an odd number of rows."""
    return x * 2 + y.sum() if x.shape[0] % 2 == 0 else x * 3


def cut(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many rows as another tensor has, of at least so many."""
    return x[: y.shape[0]] * 2


def divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Another program where rows are divided by those of another tensor with another rest."""
    return x * 2 + y.sum() if x.shape[0] % y.shape[0] == 2 else x * 3


def exported(body: Body) -> ExportedProgram:
    """A program whose first dimensions vary, and torch finds what they obey."""
    free = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    return export(Called(body), (torch.ones(8, 3), torch.ones(6, 2)), dynamic_shapes=free)


@pytest.mark.parametrize("body", [halved, cut, divided])
def test_what_torch_refuses_is_refused(body: Body, tmp_path: Path) -> None:
    program = exported(body)
    right = program.module()
    path = stator.aot_compile(program, options={"output_path": tmp_path / "m.pt2", "levels": (1,)})
    loaded, refused = stator.load(path), 0
    for rows, others in ((8, 6), (7, 6), (16, 3), (4, 4), (5, 9), (2, 2), (3, 2), (24, 24)):
        x, y = torch.randn(rows, 3), torch.randn(others, 2)
        try:
            expected = right(x, y)
        except (AssertionError, RuntimeError):
            refused += 1
            with pytest.raises(ValueError, match="sizes: the program was exported for those with"):
                loaded(x, y)
        else:
            torch.testing.assert_close(loaded(x, y), expected)
    assert 0 < refused < 8


def test_conditions_are_told_in_the_words_of_the_caller(tmp_path: Path) -> None:
    path = stator.aot_compile(exported(halved), options={"output_path": tmp_path / "m.pt2"})
    with pytest.raises(ValueError, match=r"those with Eq\(Mod\(x\.size\(0\), 2\), 0\)"):
        stator.load(path)(torch.ones(7, 3), torch.ones(6, 2))


def test_a_step_of_training_checks_them_too(tmp_path: Path) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Another program for an odd number of rows."""
            return super().forward(x) * (2 if x.shape[0] % 2 == 0 else 3)

    model = Scaled(3, 3)
    wishes = {"output_path": tmp_path / "m.pt2"}
    free = ({0: Dim.DYNAMIC},)
    path = stator.aot_compile_joint(model, (torch.ones(8, 3),), dynamic_shapes=free, options=wishes)
    loaded = stator.load(path)
    torch.testing.assert_close(loaded(torch.ones(6, 3)), model(torch.ones(6, 3)))
    with pytest.raises(ValueError, match="exported for those with Eq"):
        loaded(torch.ones(7, 3))


def saved(program: ExportedProgram) -> ExportedProgram:
    """A program as another process finds it."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("bounds", [{}, {"min": 1, "max": 9}, {"max": 9}])
def test_a_saved_program_with_a_named_dimension(bounds: dict[str, int], tmp_path: Path) -> None:
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    program = export(model, (x,), dynamic_shapes=({0: Dim("batch", **bounds)},))
    wishes = {"output_path": tmp_path / "m.pt2", "levels": (1,)}
    loaded = stator.load(stator.aot_compile(saved(program), options=wishes))
    for given in (x, x[:2]):
        torch.testing.assert_close(loaded(given), model(given).detach())
    with pytest.raises(ValueError, match="size 1 in dimension 0"):
        loaded(x[:1])


def test_a_saved_program_is_refused_where_it_has_lost_them(tmp_path: Path) -> None:
    wishes = {"output_path": tmp_path / "m.pt2"}
    with pytest.raises(Unsupported, match=r"% 2\) == 0, which a library cannot check"):
        stator.aot_compile(saved(exported(halved)), options=wishes)
    same = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    two = (torch.ones(8, 3), torch.ones(8, 3))
    program = export(Called(torch.add), two, dynamic_shapes=same)
    loaded = stator.load(stator.aot_compile(saved(program), options=wishes))
    assert loaded(torch.ones(5, 3), torch.ones(5, 3)).shape == (5, 3)
    with pytest.raises(ValueError, match="size"):
        loaded(torch.ones(5, 3), torch.ones(6, 3))
