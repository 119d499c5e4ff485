"""What a program raises, a program from the cache raises, with the line of the file that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.test_stored import Use, answer, fresh, selected


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (selected, (torch.randn(5), torch.tensor([1, 5]))),
        (lambda i, w: F.embedding(i, w).sum(0), (torch.tensor([4]), torch.randn(4, 3))),
        (lambda x, i: x.index_select(0, i) * 2, (torch.randn(3), torch.tensor([-4]))),
        (lambda x, i: x.gather(0, i), (torch.randn(3), torch.tensor([3]))),
        (lambda x, i: torch.linalg.cholesky(x) + i, (-torch.eye(3), torch.tensor(0))),
        (lambda x, i: F.nll_loss(x, i), (torch.randn(2, 3), torch.tensor([0, 3]))),
    ],
)
def test_what_the_program_raises_a_hit_raises(
    tmp_path: Path, fn: Use, inputs: tuple[Any, ...]
) -> None:
    raised: list[Any] = []
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            fresh(fn, tmp_path)(*inputs)
        raised.append((type(caught.value), str(caught.value), caught.value.__dict__))

    assert answer() == "hit"
    assert raised[0] == raised[1]


def program_in(path: Path, above: int, between: str = "") -> Use:
    """A function from a file of its own, whose last operation fails on positive numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"{chr(10) * above}def f(x):\n    return (x.neg(){between}.sub(1){between}.cholesky())\n"
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    found: Use = names["f"]
    return found


def note_of(fn: Use, folder: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        fresh(fn, folder)(torch.eye(3))
    (note,) = caught.value.__notes__
    return str(note)


def test_a_note_names_the_line_of_the_file_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for place, above, expected in (("one/program.py", 0, "miss"), ("other/name.py", 9, "hit")):
        file = tmp_path / place
        note = note_of(program_in(file, above), folder)

        assert answer() == expected
        assert note.endswith(f"{file}:{above + 2}")
    kept = b"".join(file.read_bytes() for file in folder.iterdir())
    assert str(tmp_path).encode() not in kept


def test_a_note_names_the_line_where_the_same_graph_is_spread_over_more(tmp_path: Path) -> None:
    folder, between = tmp_path / "cache", "\n        "
    note_of(program_in(tmp_path / "dense.py", 0), folder)

    for name in ("wide.py", "wider.py"):
        file = tmp_path / name
        assert note_of(program_in(file, 4, between), folder).endswith(f"{file}:8")
    assert answer() == "hit"
