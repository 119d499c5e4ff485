"""What is tried on a card: compiled side by side, those that cannot be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

pytest.importorskip("triton")

from stator.codegen.triton import card
from stator.codegen.triton.card import Card
from stator.codegen.triton.kernel import Written, write_kernel
from stator.codegen.triton.shape import shape_of
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from tests.codegen.triton.kernels import COLUMNS, POINTWISE, TURNED


@dataclass(frozen=True)
class Made:
    """A launcher that tells which kernel it launches."""

    name: str

    def function(self, *_: Any) -> str:
        """Its name."""
        return self.name


def test_each_way_launches_its_own_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: WeakSet[Made] = WeakSet()

    def launchable(kernels: Sequence[tuple[Kernel, Written, Any]], _: Any) -> list[Made]:
        found = [Made(cubin.name) for _, _, cubin in kernels]
        alive.update(found)
        return found

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(card, "capability_of", lambda _: 90)
    monkeypatch.setattr(card, "launchable", launchable)
    kernels = [parse(text) for text in (POINTWISE, TURNED, COLUMNS)]
    written = [write_kernel(kernel, shape_of(kernel)) for kernel in kernels]
    broken = replace(written[0], source=written[0].source.replace("tl.load", "tl.unknown"))
    given = [
        (kernels[0], written[0], False),
        (kernels[0], broken, True),
        (kernels[1], written[1], True),
        (kernels[2], written[2], False),
    ]

    ways = Card(torch.device("cpu")).ways(given)

    assert len(alive) == 3  # with the machine code that they are in
    assert [ways[n](0, 0, 1) for n in (0, 2, 3)] == [w.name for w in written]
    with pytest.raises(RuntimeError, match="could not be compiled"):
        ways[1](0, 0, 1)
