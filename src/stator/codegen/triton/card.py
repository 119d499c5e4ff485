"""A card that kernels are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stator.codegen.llvm.backend import Entry
from stator.codegen.triton.backend import capability_of, launchable
from stator.codegen.triton.compile import compile_each
from stator.codegen.triton.kernel import Written
from stator.codegen.triton.timing import CardClock, Clock
from stator.loops.ir import Kernel


@dataclass(frozen=True, slots=True)
class Card:
    """What measuring asks of a device."""

    device: torch.device

    def text(self) -> str:
        """The card, and what compiles for it."""
        import triton

        own = torch.cuda.get_device_properties(self.device)
        counts = f"{own.multi_processor_count} processors, {own.total_memory} bytes"
        compiler = f"triton {triton.__version__}"
        return f"{own.name}, {counts}, {capability_of(self.device)}, {compiler}"

    def free_memory(self) -> int:
        """Bytes that tensors can have, those included that torch keeps for later ones."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + kept)

    def is_recording(self) -> bool:
        """Whether what is done now goes into a CUDA graph: then nothing can be waited for."""
        return bool(torch.cuda.is_current_stream_capturing())

    def clock(self) -> Clock:
        """That of the card."""
        return CardClock(self.device)

    def ways(self, kernels: Sequence[tuple[Kernel, Written, bool]]) -> list[Callable[..., Any]]:
        """Functions that launch kernels, compiled side by side; `True`: buffers are aligned.

        One that cannot be compiled raises when it is called.
        """
        found: list[Callable[..., Any]] = [_refuse] * len(kernels)
        for aligned in (True, False):
            own = [number for number, (_, _, other) in enumerate(kernels) if other is aligned]
            capability = capability_of(self.device)
            cubins = compile_each([kernels[n][1] for n in own], capability, aligned=aligned)
            pairs = zip(own, cubins, strict=True)
            made = {n: (*kernels[n][:2], cubin) for n, cubin in pairs if cubin is not None}
            entries = launchable(list(made.values()), self.device) if made else []
            for number, entry in zip(made, entries, strict=True):
                found[number] = partial(_launch, entry)
        return found


def _launch(entry: Entry, *given: int) -> Any:
    """Call a launcher; who holds this holds its machine code."""
    return entry.function(*given)


def _refuse(*_: object) -> None:
    raise RuntimeError("it could not be compiled")
