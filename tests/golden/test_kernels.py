"""The kernels of whole small programs, as text: a change of one is seen, and meant.

`pytest tests/golden --update-golden` writes them anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch

import stator
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.loops.verify import verify
from tests.golden.programs import PROGRAMS, Program
from tests.ops.fused import torch_calls

FOLDER: Final = Path(__file__).parent / "kernels"

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def kernels_of(program: Program, folder: Path) -> str:
    """Text of the kernels, from a dump; the result is compared with eager's on the way."""
    arguments = program.arguments()
    compiled = stator.compile(
        program.run, kernels=True, strict=True, dump_dir=folder, dynamic=program.dynamic
    )
    torch.testing.assert_close(compiled(*arguments), program.run(*arguments))
    (file,) = folder.glob("compilation_*/forward_kernels.txt")
    return file.read_text()


@each_program
def test_kernels_are_as_kept(program: Program, tmp_path: Path, update_golden: bool) -> None:
    made = f"# {program.run.__doc__}\n{kernels_of(program, tmp_path)}"
    file = FOLDER / f"{program.name}.loop"

    if update_golden:
        file.write_text(made)

    assert made == file.read_text(), "if it is meant: pytest tests/golden --update-golden"
    assert torch_calls() == {}


@each_program
def test_kept_kernels_parse_back_and_verify(program: Program) -> None:
    comment, _, text = (FOLDER / f"{program.name}.loop").read_text().partition("\n")
    kernels = [parse(part) for part in text.split("\n\n")]

    for kernel in kernels:
        verify(kernel)
    assert comment == f"# {program.run.__doc__}"
    assert "\n".join(to_text(kernel) for kernel in kernels) == text
    assert len(kernels) == program.kernels


def test_there_is_a_program_for_every_file() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {program.name for program in PROGRAMS}
