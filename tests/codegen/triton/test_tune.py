"""Tuning on a card that is not there: what is measured, kept, said and chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stator.codegen.triton.candidates import candidates
from stator.codegen.triton.card import Card
from stator.codegen.triton.kernel import Written
from stator.codegen.triton.shape import shape_of
from stator.codegen.triton.timing import Clock
from stator.codegen.triton.tune import Sample, Tuner, Verdict, scratch
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from tests.codegen.triton.kernels import POINTWISE, softmax
from tests.codegen.triton.test_timing import Told

SOFTMAX = parse(softmax(300, 4096))
LARGE = Sample("kernel_0", (300 * 4096, 300 * 4096), ())
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MadeUp(Card):
    """A card on which the way of that number takes half as long as the others."""

    device: torch.device = CPU
    best: int = 2
    free: int = 1 << 40
    recording: bool = False
    asked: list[int] = field(default_factory=list)

    def text(self) -> str:
        return "a card"

    def free_memory(self) -> int:
        return self.free

    def is_recording(self) -> bool:
        return self.recording

    def clock(self) -> Clock:
        return Told()

    def ways(self, kernels: Sequence[tuple[Kernel, Written, bool]]) -> list[Callable[..., Any]]:
        self.asked.append(len(kernels))
        times = [1e-4 if number == self.best else 2e-4 for number in range(len(kernels))]
        return [lambda *_, n=n: n for n in times]


@dataclass
class Kept:
    """Verdicts in memory."""

    answers: dict[str, str] = field(default_factory=dict)

    def find(self, question: Mapping[str, str]) -> str | None:
        """As it was kept."""
        return self.answers.get(str(question))

    def keep(self, question: Mapping[str, str], answer: str) -> None:
        """By its text."""
        self.answers[str(question)] = answer


def test_the_quickest_shape_is_chosen_and_said() -> None:
    notes: list[str] = []

    shapes = Tuner(MadeUp(), Kept(), notes).shapes({SOFTMAX: LARGE})

    assert shapes == {SOFTMAX: candidates(SOFTMAX)[2]}
    (note,) = notes
    assert note.startswith("kernel_0 is tuned: rows ")
    assert "100.0 us, instead of rows 1x4096 by 4 warps, 200.0 us" in note


def test_the_model_s_shape_stays_where_no_other_is_quicker() -> None:
    notes: list[str] = []

    shapes = Tuner(MadeUp(best=-1), Kept(), notes).shapes({SOFTMAX: LARGE})

    assert shapes == {SOFTMAX: shape_of(SOFTMAX)}
    assert notes[0].startswith("kernel_0 keeps the model's shape")


def test_a_second_compilation_measures_nothing() -> None:
    card, kept = MadeUp(), Kept()
    first = Tuner(card, kept, []).shapes({SOFTMAX: LARGE})
    notes: list[str] = []

    second = Tuner(card, kept, notes).shapes({SOFTMAX: LARGE})

    assert second == first
    assert len(card.asked) == 1
    assert "is tuned" in notes[0]


def test_other_sizes_and_places_are_other_questions() -> None:
    card, kept = MadeUp(), Kept()
    other = Sample("kernel_0", (600 * 4096, 300 * 4096), ())

    Tuner(card, kept, []).shapes({SOFTMAX: LARGE})
    Tuner(card, kept, []).shapes({SOFTMAX: other})
    Tuner(card, kept, []).shapes({SOFTMAX: LARGE}, anywhere={SOFTMAX})

    assert len(card.asked) == 3
    assert len(kept.answers) == 3


def test_all_candidates_of_all_kernels_are_compiled_at_once() -> None:
    pointwise = parse(POINTWISE.replace("100003", "1000003"))
    card = MadeUp()
    samples = {SOFTMAX: LARGE, pointwise: Sample("kernel_1", (1000003, 1000003), ())}

    shapes = Tuner(card, Kept(), []).shapes(samples)

    assert card.asked == [len(candidates(SOFTMAX)) + len(candidates(pointwise))]
    assert shapes.keys() == samples.keys()


SCATTER = """
kernel scatter
  buffer x: f32[1000000]
  buffer y: f32[100]
  outer i0: 1000000
  stage
    y[0] sum= x[i0]
"""


def test_what_scatters_or_is_small_is_left_as_it_is() -> None:
    card, notes = MadeUp(), list[str]()
    samples = {
        parse(SCATTER): Sample("kernel_1", (100, 1000000), ()),
        parse(POINTWISE): Sample("kernel_2", (1000, 1000), ()),
    }

    assert Tuner(card, Kept(), notes).shapes(samples) == {}
    assert card.asked == []
    assert notes == ["kernel_1 is not tuned: it scatters"]


@pytest.mark.parametrize(
    ("card", "reason"),
    [(MadeUp(free=1 << 20), "fill the card"), (MadeUp(recording=True), "being recorded")],
)
def test_what_cannot_be_measured_has_the_model_s_shape(card: MadeUp, reason: str) -> None:
    kept, notes = Kept(), list[str]()

    assert Tuner(card, kept, notes).shapes({SOFTMAX: LARGE}) == {}
    assert reason in notes[0]
    assert kept.answers == {}


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[9, [1.0, 2.0]]", "[-1, [1.0, 2.0]]", "[0, [1.0]]", '[0, ["x", 1]]'],
)
def test_a_kept_verdict_that_is_none_is_measured_again(text: str) -> None:
    assert Verdict.read(text, 2) is None


def test_a_verdict_is_kept_to_the_last_digit() -> None:
    verdict = Verdict(1, (0.1234567890123e-4, float("inf")))

    assert Verdict.read(verdict.written(), 2) == verdict


def test_kernels_are_tried_on_tensors_of_their_own() -> None:
    kernel = parse(POINTWISE.replace("buffer x: bf16", "buffer x: i32"))
    state = torch.get_rng_state()

    made = scratch(kernel, (10, 20), CPU)

    assert [(t.dtype, t.numel()) for t in made] == [(torch.bfloat16, 10), (torch.int32, 20)]
    assert made[1].eq(0).all()  # an index that is always within bounds
    assert torch.equal(state, torch.get_rng_state())  # the program's numbers stay as they were
