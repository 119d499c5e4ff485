"""Shapes of kernels chosen by measurement, on request; verdicts are kept.

A kernel runs on tensors of its own, as long as the program's: nobody's data is read or written.
Numbers are random, indices 0.  Scatters are left as they are: how long they take depends on where
they write, which nobody knows yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Final

import torch

from stator.codegen.llvm.shape import arguments_of
from stator.codegen.triton.candidates import candidates
from stator.codegen.triton.card import Card
from stator.codegen.triton.kernel import Written, write_kernel
from stator.codegen.triton.shape import Shape, stores_of
from stator.codegen.triton.timing import Clock, quickest
from stator.core.dtypes import TORCH_DTYPES
from stator.core.verdicts import Verdicts
from stator.loops.index import Index
from stator.loops.ir import Buffer, Kernel
from stator.torch_api import unset_fake_temporarily

LEAST_MOVED: Final = 1 << 19  # bytes: less takes no longer than a launch
SHARE: Final = 0.5  # of the card's free memory that a kernel's tensors may take
_TORCH: Final = {ours: dtype for dtype, ours in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """What a program runs a kernel with."""

    name: str  # the kernel's, in the program
    lengths: tuple[int, ...]  # elements of each buffer
    sizes: tuple[int, ...]

    def bytes(self, kernel: Kernel) -> int:
        """Of all its buffers."""
        buffers = arguments_of(kernel)
        return sum(n * b.dtype.bytes for n, b in zip(self.lengths, buffers, strict=True))


@dataclass(frozen=True, slots=True)
class Tuner:
    """What tuning needs besides the kernels."""

    card: Card
    verdicts: Verdicts
    notes: list[str]  # what was found, in words

    def shapes(
        self, samples: Mapping[Kernel, Sample], anywhere: Collection[Kernel] = ()
    ) -> dict[Kernel, Shape]:
        """Those of kernels that have another than the model's; `anywhere` as for the loader."""
        trials = [
            _Trial(kernel, sample, candidates(kernel), kernel not in anywhere)
            for kernel, sample in samples.items()
            if self._is_worth_it(kernel, sample)
        ]
        found = {trial: self._known(trial) for trial in trials}
        fresh = [trial for trial, verdict in found.items() if verdict is None]
        found |= self._measured(fresh) if fresh else {}
        chosen = {}
        for trial, verdict in found.items():
            if verdict is not None:
                self.notes.append(verdict.text(trial))
                chosen[trial.kernel] = trial.shapes[verdict.chosen]
        return chosen

    def _is_worth_it(self, kernel: Kernel, sample: Sample) -> bool:
        if any(store.combine is not None for store in stores_of(kernel)):
            self.notes.append(f"{sample.name} is not tuned: it scatters")
            return False
        return sample.bytes(kernel) >= LEAST_MOVED

    def _question(self, trial: _Trial) -> dict[str, str]:
        return {"verdict": trial.digest, "card": self.card.text()}

    def _known(self, trial: _Trial) -> Verdict | None:
        answer = self.verdicts.find(self._question(trial))
        return None if answer is None else Verdict.read(answer, len(trial.shapes))

    def _measured(self, trials: Sequence[_Trial]) -> dict[_Trial, Verdict | None]:
        """All candidates are compiled side by side, then each kernel's are timed."""
        if self.card.is_recording():
            self.notes.append("nothing is tuned: a CUDA graph is being recorded")
            return {}
        found: dict[_Trial, Verdict | None] = {}
        with unset_fake_temporarily(), torch.no_grad(), torch.inference_mode(False):
            try:
                ways = self.card.ways([(t.kernel, w, t.aligned) for t in trials for w in t.written])
                clock = self.card.clock()
            except RuntimeError as error:  # no memory for the clock, say
                self.notes.append(f"nothing is tuned: {error}")
                return {}
            for trial in trials:
                own, ways = ways[: len(trial.shapes)], ways[len(trial.shapes) :]
                found[trial] = self._verdict(trial, own, clock)
        return found

    def _verdict(self, trial: _Trial, ways: Sequence[Any], clock: Clock) -> Verdict | None:
        if trial.sample.bytes(trial.kernel) > SHARE * self.card.free_memory():
            self.notes.append(f"{trial.sample.name} is not tuned: its tensors fill the card")
            return None
        try:
            tensors = scratch(trial.kernel, trial.sample.lengths, self.card.device)
            places = [tensor.data_ptr() for tensor in tensors]
            calls = [partial(way, *places, *trial.sample.sizes, 1) for way in ways]
            chosen, seconds = quickest(calls, clock)
        except RuntimeError as error:  # out of memory after all: the model's shape will do
            self.notes.append(f"{trial.sample.name} is not tuned: {error}")
            return None
        verdict = Verdict(chosen, tuple(seconds))
        self.verdicts.keep(self._question(trial), verdict.written())
        return verdict


@dataclass(frozen=True, slots=True)
class _Trial:
    """A kernel that is measured, and in which shapes."""

    kernel: Kernel
    sample: Sample
    shapes: tuple[Shape, ...]
    aligned: bool

    @property
    def written(self) -> list[Written]:
        return [write_kernel(self.kernel, shape) for shape in self.shapes]

    @property
    def digest(self) -> str:
        """Of all that its times depend on, the card and the compiler left out."""
        own = [[w.source, w.shape.warps, w.shape.stages] for w in self.written]
        told = [own, self.sample.lengths, self.sample.sizes, self.aligned]
        return sha256(json.dumps(told).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of some ways is taken, and the seconds of each."""

    chosen: int
    seconds: tuple[float, ...]

    def written(self) -> str:
        """As it is kept."""
        return json.dumps([self.chosen, self.seconds])

    @classmethod
    def read(cls, text: str, ways: int) -> Verdict | None:
        """What was kept for so many ways; None if it is nothing of ours."""
        try:
            match json.loads(text):
                case [int(chosen), [*seconds]] if 0 <= chosen < ways == len(seconds):
                    return cls(chosen, tuple(map(float, seconds)))
        except (ValueError, TypeError):
            pass
        return None

    def text(self, trial: _Trial) -> str:
        """What was chosen, against the model's."""
        model, own = self.seconds[0], self.seconds[self.chosen]
        measured = f"{len(self.seconds)} shapes measured"
        told = f"{shape_text(trial.shapes[0])}, {1e6 * model:.1f} us"
        if self.chosen == 0:
            return f"{trial.sample.name} keeps the model's shape, {told} ({measured})"
        taken = f"{shape_text(trial.shapes[self.chosen])}, {1e6 * own:.1f} us"
        return f"{trial.sample.name} is tuned: {taken}, instead of {told} ({measured})"


def shape_text(shape: Shape) -> str:
    """In a few words."""
    stages = f", {shape.stages} stages" if shape.stages > 1 else ""
    return f"{shape.kind} {shape.outer}x{shape.inner} by {shape.warps} warps{stages}"


def scratch(kernel: Kernel, lengths: Iterable[int], device: torch.device) -> list[torch.Tensor]:
    """Tensors for a kernel's buffers, as long as it is told."""
    pairs = zip(arguments_of(kernel), lengths, strict=True)
    return filled((Buffer(b.name, b.dtype, Index.of(length)) for b, length in pairs), device)


def filled(buffers: Iterable[Buffer], device: torch.device) -> list[torch.Tensor]:
    """Tensors for buffers of known sizes: random numbers, and integers that are in every range."""
    random = torch.Generator(device)
    random.manual_seed(0)
    made = []
    for buffer in buffers:
        dtype, length = _TORCH[buffer.dtype], buffer.size.constant
        tensor = torch.zeros(length, dtype=dtype, device=device)
        made.append(tensor.normal_(generator=random) if dtype.is_floating_point else tensor)
    return made
