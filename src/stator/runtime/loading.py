"""The code of a plan's kernels: found, tuned or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from stator.codegen.llvm.backend import load_kernels
from stator.codegen.llvm.shape import arguments_of
from stator.codegen.triton.shape import Shape
from stator.core.verdicts import Verdicts
from stator.loops.ir import Kernel
from stator.lower.lower import Lowering
from stator.runtime.plan import Launch, Step, Together

if TYPE_CHECKING:
    from stator.codegen.triton.tune import Sample


@dataclass(frozen=True, slots=True)
class Loading:
    """Where kernels get their code."""

    now: bool = True  # in this process; else they have none
    verdicts: Verdicts | None = None  # of measurements; None: the model alone decides


AT_ONCE: Final = Loading()


@dataclass(frozen=True, slots=True)
class Code:
    """What a plan's steps run."""

    steps: Sequence[Step]
    lowering: Lowering
    loose: frozenset[str]  # tensors that may begin anywhere
    targets: Mapping[str, str]  # results that lie in memory of other names
    settled: Mapping[Kernel, Shape]  # what was measured before

    @property
    def launches(self) -> list[Launch | Together]:
        """The steps that run kernels."""
        return [step for step in self.steps if isinstance(step, Launch | Together)]

    @property
    def anywhere(self) -> set[Kernel]:
        """Kernels with a buffer that may begin anywhere."""
        return {s.nameless for s in self.launches if not self.loose.isdisjoint(s.takes)}

    def tuned(self, loading: Loading, notes: list[str]) -> dict[Kernel, Shape]:
        """Shapes other than the model's: measured to be quicker, where that is asked for."""
        device = self.lowering.target.device
        if not loading.now or loading.verdicts is None or not self.lowering.target.on_gpu:
            return dict(self.settled)
        from stator.codegen.triton.card import Card  # Triton is for GPUs alone
        from stator.codegen.triton.tune import Tuner

        tuner = Tuner(Card(device), loading.verdicts, notes)
        return {**tuner.shapes(self.samples(), self.anywhere), **self.settled}

    def samples(self) -> dict[Kernel, Sample]:
        """For each kernel, the largest that it is given."""
        found: dict[Kernel, Sample] = {}
        for kernel, sample in self._samples():
            if kernel not in found or sum(sample.lengths) > sum(found[kernel].lengths):
                found[kernel] = sample
        return found

    def _samples(self) -> Iterator[tuple[Kernel, Sample]]:
        from stator.codegen.triton.tune import Sample

        hint = self.lowering.sizes.hint
        for step in self.launches:
            if isinstance(step, Together) or step.nameless in self.settled:
                continue
            named = arguments_of(step.kernel)
            size = {self.targets.get(buffer.name, buffer.name): buffer.size for buffer in named}
            try:
                lengths = tuple(hint(size[name]) for name in step.arguments)
                sizes = tuple(map(hint, step.sizes))
            except KeyError:  # a size that the program itself computes
                continue
            yield step.nameless, Sample(step.kernel.name, lengths, sizes)

    def loaded(self, loading: Loading, shapes: Mapping[Kernel, Shape]) -> Mapping[Kernel, Any]:
        """The code of each kernel, with an `address` or a `function` of the same arguments."""
        kernels = list(dict.fromkeys(launch.nameless for launch in self.launches))
        target = self.lowering.target
        if not loading.now:
            return dict.fromkeys(kernels)
        if not target.uses_triton:
            return dict(zip(kernels, load_kernels(kernels), strict=True))
        from stator.codegen.triton.backend import begin_gpu_kernels  # Triton is for GPUs alone

        return Awaited(kernels, begin_gpu_kernels(kernels, target.device, self.anywhere, shapes))


class Awaited(Mapping[Kernel, Any]):
    """The code of kernels that others compile: waited for when one is asked for its code.

    Memory is planned and the host program written meanwhile, which know kernels by their names.
    """

    def __init__(self, kernels: Sequence[Kernel], collect: Callable[[], Sequence[Any]]) -> None:
        self._kernels = kernels
        self._collect = collect

    @cached_property
    def _found(self) -> dict[Kernel, Any]:
        return dict(zip(self._kernels, self._collect(), strict=True))

    def __getitem__(self, kernel: Kernel) -> Any:
        return self._found[kernel]

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)
