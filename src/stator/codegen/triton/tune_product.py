"""Whether a product and what follows it had better be one kernel: measured beside cuBLAS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.product import product_shapes
from stator.codegen.triton.shape import Shape, shape_of
from stator.codegen.triton.timing import Way, quickest
from stator.codegen.triton.tune import SHARE, Tuner, Verdict, filled
from stator.loops.ir import Buffer
from stator.schedule.canonical import Canonical
from stator.torch_api import unset_fake_temporarily


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A product by torch's library: `mm` or `addmm`."""

    name: str  # of the result
    function: Callable[..., Any]
    operands: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # names, sizes, strides
    size: tuple[int, int]  # of the result, which is contiguous


@dataclass(frozen=True, slots=True)
class ProductTrial:
    """The two ways: one kernel, or a call and a kernel of the loops."""

    joined: Canonical
    loops: Canonical
    call: LibraryCall

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the one kernel."""
        return product_shapes(self.joined.kernel)

    @property
    def buffers(self) -> dict[str, Buffer]:
        """All that one of the ways reads or writes."""
        return {buffer.name: buffer for buffer in (*self.joined.buffers, *self.loops.buffers)}

    @property
    def bytes(self) -> int:
        """Of these."""
        return sum((b.size.constant or 0) * b.dtype.bytes for b in self.buffers.values())

    @property
    def digest(self) -> str:
        """Of all that its times depend on, the card and the compiler left out."""
        own = [write_kernel(self.joined.kernel, shape).source for shape in self.shapes]
        warps = [(shape.warps, shape.stages) for shape in self.shapes]
        kernel = self.loops.kernel
        layouts = [[size, stride] for _, size, stride in self.call.operands]
        told = [own, warps, write_kernel(kernel, shape_of(kernel)).source, layouts]
        called = [self.call.function.__name__, torch.__version__]
        return sha256(json.dumps([*told, *called]).encode()).hexdigest()


def product_shape(trial: ProductTrial, tuner: Tuner) -> Shape | None:
    """The shape in which one kernel is quicker; None where the library's call stays."""
    question = {"verdict": trial.digest, "card": tuner.card.text()}
    answer, count = tuner.verdicts.find(question), 1 + len(trial.shapes)
    verdict = None if answer is None else Verdict.read(answer, count)
    if verdict is None:
        verdict = _measured(trial, tuner)
        if verdict is None:
            return None
        tuner.verdicts.keep(question, verdict.written())
    tuner.notes.append(_text(trial, verdict))
    return trial.shapes[verdict.chosen - 1] if verdict.chosen else None


def _measured(trial: ProductTrial, tuner: Tuner) -> Verdict | None:
    name, card = trial.call.name, tuner.card
    if card.is_recording():
        tuner.notes.append(f"{name} is not tuned: a CUDA graph is being recorded")
        return None
    if trial.bytes > SHARE * card.free_memory():
        tuner.notes.append(f"{name} is not tuned: its tensors fill the card")
        return None
    try:
        with unset_fake_temporarily(), torch.no_grad(), torch.inference_mode(False):
            given = filled(trial.buffers.values(), card.device)
            tensors = dict(zip(trial.buffers, given, strict=True))  # they live until all is timed
            chosen, seconds = quickest(_ways(trial, tensors, tuner), card.clock())
    except RuntimeError as error:  # out of memory after all: the library's call will do
        tuner.notes.append(f"{name} is not tuned: {error}")
        return None
    return Verdict(chosen, tuple(seconds))


def _ways(trial: ProductTrial, tensors: Mapping[str, torch.Tensor], tuner: Tuner) -> list[Way]:
    """The call and the loops, then the kernel in each shape; all on the same tensors."""
    joined, loops = trial.joined.kernel, trial.loops.kernel
    model = write_kernel(loops, shape_of(loops))
    written = [(joined, write_kernel(joined, shape), True) for shape in trial.shapes]
    last, *ways = tuner.card.ways([(loops, model, True), *written])
    call = _call(trial.call, tensors)
    places = _places(trial.loops.buffers, tensors)

    def both() -> None:
        call()
        last(*places, 1)

    own = _places(trial.joined.buffers, tensors)
    return [both, *(partial(way, *own, 1) for way in ways)]


def _call(call: LibraryCall, tensors: Mapping[str, torch.Tensor]) -> Way:
    given = [tensors[name].as_strided(size, stride) for name, size, stride in call.operands]
    return partial(call.function, *given, out=tensors[call.name].view(call.size))


def _places(buffers: Iterable[Buffer], tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [tensors[buffer.name].data_ptr() for buffer in buffers]


def _text(trial: ProductTrial, verdict: Verdict) -> str:
    name, (before, *others) = trial.call.name, verdict.seconds
    measured = f"{len(others)} shapes measured"
    told = f"{1e6 * before:.1f} us by cuBLAS and a kernel"
    if not verdict.chosen:
        best = f"{1e6 * min(others):.1f} us as one kernel"
        return f"{name} stays with cuBLAS: {told}, {best} ({measured})"
    shape, own = trial.shapes[verdict.chosen - 1], verdict.seconds[verdict.chosen]
    tile = f"{shape.height}x{shape.outer}x{shape.inner} by {shape.warps} warps"
    taken = f"{tile}, {shape.stages} stages, {1e6 * own:.1f} us"
    return f"{name} is one kernel with what follows it: {taken}, instead of {told} ({measured})"
