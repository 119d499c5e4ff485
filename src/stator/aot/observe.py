"""What a forward that just ran did to its inputs, and where its outputs come from.

Reads the functional tensors while they are alive; nothing here records into the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stator.aot.metadata import Mutation, OutputFact, Source
from stator.aot.subclasses import Plain, layout_of
from stator.errors import Unsupported
from stator.torch_api import (
    SYMBOLIC_TYPES,
    FunctionalTensor,
    from_functional,
    has_data_mutation,
    has_metadata_mutation,
    storage_of,
    version_of,
    view_base,
    was_storage_changed,
    was_storage_resized,
)


@dataclass(slots=True)
class Returned:
    """A value that the forward graph has to return."""

    tensor: Any  # functional tensor, subclass of such, or symbolic number
    differentiable: bool
    of_input: int | None = None
    of_output: int | None = None
    is_base: bool = False


@dataclass(slots=True)
class Observed:
    """The forward, as seen from outside."""

    mutations: list[Mutation] = field(default_factory=list)
    bumps: list[bool] = field(default_factory=list)  # whether the version counter moves
    outputs: list[OutputFact] = field(default_factory=list)
    values: list[Returned] = field(default_factory=list)
    bases: dict[int, torch.Tensor] = field(default_factory=dict)  # output -> base of its view
    without_history: set[int] = field(default_factory=set)  # outputs that have no grad_fn


@dataclass(frozen=True, slots=True)
class Before:
    """An input as it was when the program began."""

    plain: Any
    history: Any  # its grad_fn
    version: int

    @staticmethod
    def of(value: Any, plain: Any) -> Before:
        """Remember `value`, whose recorded twin is `plain`."""
        if not isinstance(value, torch.Tensor):
            return Before(plain, None, 0)
        return Before(plain, value.grad_fn, version_of(value))


def observe(inputs: Sequence[Any], before: Sequence[Before], outputs: Sequence[Any]) -> Observed:
    """Sort `outputs` by source, given the program's inputs now and `before`."""
    seen = Observed()
    for index, (value, old) in enumerate(zip(inputs, before, strict=True)):
        mutation = _mutation(value, old)
        seen.mutations.append(mutation)
        seen.bumps.append(mutation is not Mutation.NONE and version_of(value) != old.version)
        if mutation not in (Mutation.NONE, Mutation.IN_GRAPH):
            tracked = mutation in (Mutation.COPY, Mutation.COPY_AND_METADATA)
            seen.values.append(Returned(value, tracked and _has_history(value), index))
    _Sorter(seen, inputs, outputs).sort()
    return seen


def _mutation(value: Any, before: Before) -> Mutation:
    if not isinstance(value, torch.Tensor):
        return Mutation.NONE
    if was_storage_resized(value):
        raise Unsupported("trace", "the program resizes the storage of an input")
    data = has_data_mutation(value)
    if isinstance(value, FunctionalTensor):
        now = from_functional(value)
        if was_storage_changed(value) and storage_of(now) != storage_of(before.plain):
            return Mutation.STORAGE
        if has_metadata_mutation(value) and _geometry(now) != _geometry(before.plain):
            return Mutation.COPY_AND_METADATA if data else Mutation.METADATA
    if not data:
        return Mutation.NONE
    # Autograd knows of a write if and only if it changed the history.
    return Mutation.IN_GRAPH if value.grad_fn is before.history else Mutation.COPY


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.size()),)
    return (tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())


def _has_history(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None


class _Sorter:
    """Gives every output its source."""

    def __init__(self, seen: Observed, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.seen = seen
        self.outputs = outputs
        self.input_ids = {id(t): i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        self.input_storages = {
            storage_of(t): i
            for i, t in reversed(list(enumerate(inputs)))
            if isinstance(t, FunctionalTensor) and not was_storage_changed(t)
        }
        self.sharing: dict[Any, list[int]] = {}  # storage -> outputs that lie in it
        for index, output in enumerate(outputs):
            if isinstance(output, FunctionalTensor) and self._is_first(index):
                self.sharing.setdefault(storage_of(output), []).append(index)
        self.value_of: dict[int, int] = {}  # id of a tensor -> the value that returns it

    def _is_first(self, index: int) -> bool:
        return all(other is not self.outputs[index] for other in self.outputs[:index])

    def sort(self) -> None:
        """Fill `seen.outputs`; bases of views come behind all other values."""
        plan = [self._source(index) for index in range(len(self.outputs))]
        for index, fact in enumerate(plan):
            if fact.source is Source.GRAPH:
                plan[index] = OutputFact(
                    Source.GRAPH, self._returned(self.outputs[index], index), fact.requires_grad
                )
        for index, base in self.seen.bases.items():
            if plan[index].source is Source.VIEW_OF_VALUE:
                value = self._returned(base, index, is_base=True)
                plan[index] = OutputFact(Source.VIEW_OF_VALUE, value, plan[index].requires_grad)
        self.seen.outputs[:] = plan

    def _source(self, index: int) -> OutputFact:
        output = self.outputs[index]
        if isinstance(output, SYMBOLIC_TYPES):
            return OutputFact(Source.GRAPH)
        if not isinstance(output, torch.Tensor):
            return OutputFact(Source.CONSTANT, constant=output)
        grad = output.requires_grad
        if id(output) in self.input_ids:
            return OutputFact(Source.INPUT, self.input_ids[id(output)], grad)
        for earlier, other in enumerate(self.outputs[:index]):
            if other is output:
                return OutputFact(Source.OUTPUT, earlier, grad)
        if not isinstance(output, FunctionalTensor) or not isinstance(layout_of(output), Plain):
            return OutputFact(Source.GRAPH, requires_grad=grad)
        return self._aliased(index, output, grad)

    def _aliased(self, index: int, output: torch.Tensor, grad: bool) -> OutputFact:
        storage = storage_of(output)
        if storage is None or isinstance(
            output.grad_fn, torch.autograd.function.BackwardCFunction
        ):  # what a custom function returns has that function's backward: no view has
            return OutputFact(Source.GRAPH, requires_grad=grad)
        if not _has_history(output):
            self.seen.without_history.add(index)
        if storage in self.input_storages:
            return OutputFact(Source.VIEW_OF_INPUT, self.input_storages[storage], grad)
        group = self.sharing[storage]
        if len(group) == 1:
            return OutputFact(Source.GRAPH, requires_grad=grad)
        base = self._base(group)
        if base is output:
            return OutputFact(Source.GRAPH, requires_grad=grad)
        self.seen.bases[index] = base
        return OutputFact(Source.VIEW_OF_VALUE, requires_grad=grad)

    def _base(self, group: list[int]) -> torch.Tensor:
        """The tensor that all outputs of `group` are views of; else one of them."""
        members = [self.outputs[i] for i in group]
        for member in members:
            base = view_base(member)
            if isinstance(base, FunctionalTensor):
                return base
        tracked = [member for member in members if member.requires_grad]
        return (tracked or members)[0]

    def _returned(self, tensor: Any, output: int, *, is_base: bool = False) -> int:
        """Index of the value that is `tensor`, added if need be."""
        if id(tensor) not in self.value_of:
            self.value_of[id(tensor)] = len(self.seen.values)
            differentiable = isinstance(tensor, torch.Tensor) and _has_history(tensor)
            self.seen.values.append(Returned(tensor, differentiable, None, output, is_base))
        return self.value_of[id(tensor)]
