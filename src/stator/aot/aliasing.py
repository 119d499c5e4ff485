"""Inputs that share memory: which do, and one base for those that are written through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from stator.aot.metadata import Mutation, Program
from stator.aot.views import Geometry
from stator.core.torch_types import Flat
from stator.errors import Unsupported
from stator.torch_api import FunctionalTensor, is_traceable_wrapper_subclass, storage_of, view_base

T = TypeVar("T")


def sharing_groups(values: Sequence[Any]) -> list[list[int]]:
    """Indices of plain tensors that lie in the same storage, where there are several."""
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
            storage = storage_of(value)
            if storage is not None:
                groups.setdefault(storage, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def overlapping_groups(values: Sequence[Any]) -> list[list[int]]:
    """Those sharing groups in which two tensors may touch the same element."""
    return [group for group in sharing_groups(values) if _touch([values[i] for i in group])]


def _touch(tensors: list[torch.Tensor]) -> bool:
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(start < end and not _interleave(tensors) for (_, end), (start, _) in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte behind the last."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize


def _interleave(tensors: list[torch.Tensor]) -> bool:
    """Whether all are slices of the same rows, side by side: columns of one matrix do not touch."""
    first = tensors[0]
    if any(t.stride() != first.stride() or t.dtype != first.dtype for t in tensors):
        return False
    if first.dim() < 2 or first.stride(-1) != 1:
        return False
    row = first.stride(-2)
    columns = sorted((t.storage_offset() % row, t.size(-1)) for t in tensors)
    ends = [start + size for start, size in columns]
    return ends[-1] <= row and all(
        end <= start for end, (start, _) in zip(ends, columns[1:], strict=False)
    )


def writes_to_shared(program: Program, groups: Sequence[Sequence[int]]) -> bool:
    """Whether the program writes to an input that shares memory with another."""
    quiet = (Mutation.NONE, Mutation.METADATA)
    return any(program.inputs[i].mutation not in quiet for group in groups for i in group)


@dataclass(slots=True)
class Merged:
    """A program whose overlapping inputs are views of one base each.

    before: f(x, y)        where y is x[1:]
    after:  g(base) = f(base.as_strided(…), base.as_strided(…))
    """

    function: Flat
    groups: list[list[int]]
    places: dict[int, Geometry]  # where each merged input lies in its base
    dtypes: dict[int, torch.dtype]
    count: int  # inputs of the program before merging
    same: dict[int, int] = field(default_factory=dict)  # output -> merged input it is

    @staticmethod
    def of(function: Flat, values: Sequence[Any], groups: list[list[int]]) -> Merged:
        """Merge the `groups` of inputs; `values` are examples."""
        places = {
            i: Geometry(
                tuple(values[i].size()), tuple(values[i].stride()), values[i].storage_offset()
            )
            for group in groups
            for i in group
        }
        dtypes = {i: values[i].dtype for i in places}
        return Merged(function, groups, places, dtypes, len(values))

    def pack(self, values: Sequence[Any]) -> list[Any]:
        """Arguments of the merged program: the bases, then all other inputs."""
        merged = {i for group in self.groups for i in group}
        rest = [value for i, value in enumerate(values) if i not in merged]
        return [_base_of([values[i] for i in group]) for group in self.groups] + rest

    def packed_places(self, of: Mapping[int, T]) -> dict[int, T]:
        """What is known of inputs, by their places among packed arguments; of bases, nothing."""
        rest = [i for i in range(self.count) if i not in self.places]
        return {n: of[i] for n, i in enumerate(rest, len(self.groups)) if i in of}

    def __call__(self, *packed: Any) -> list[Any]:
        """The program on packed arguments; outputs that are merged inputs are left to `unpack`."""
        members: dict[int, Any] = {}
        for base, group in zip(packed, self.groups, strict=False):
            for i in group:
                place, dtype = self.places[i], self.dtypes[i]
                whole = base if base.dtype == dtype else _reinterpreted(base, dtype)
                members[i] = whole.as_strided(place.size, place.stride, place.offset)
        rest = iter(packed[len(self.groups) :])
        arguments = [members[i] if i in members else next(rest) for i in range(self.count)]
        outputs = list(self.function(*arguments))
        for position, output in enumerate(outputs):
            for i, member in members.items():
                if output is member:
                    self.same[position] = i
                    outputs[position] = None
        for i, member in members.items():
            if isinstance(member, FunctionalTensor) and _moved(member, self.places[i]):
                raise Unsupported("trace", "an in-place view of an input that shares memory")
        return outputs

    def unpack(self, outputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Outputs of the program before merging."""
        return [
            values[self.same[i]] if i in self.same else output for i, output in enumerate(outputs)
        ]


def _moved(member: torch.Tensor, place: Geometry) -> bool:
    return tuple(member.size()) != place.size or tuple(member.stride()) != place.stride


def _base_of(members: list[torch.Tensor]) -> torch.Tensor:
    """The tensor that all members are views of."""
    first = members[0]
    if any(member.requires_grad for member in members):
        bases = {id(b): b for b in (_root(member) for member in members)}
        if len(bases) > 1:
            raise Unsupported("trace", "inputs share memory and need grad, but not one base")
        return next(iter(bases.values()))
    length = first.untyped_storage().nbytes() // first.itemsize
    with torch.no_grad():
        flat = first.as_strided((length,), (1,), 0)
        mixed = any(member.dtype != first.dtype for member in members)
        return flat.view(torch.uint8) if mixed else flat


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = view_base(tensor)
    return tensor if base is None else base


def _reinterpreted(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `base` as elements of another type, less those that make no whole element."""
    return base[: base.size(0) // dtype.itemsize * dtype.itemsize].view(dtype)
