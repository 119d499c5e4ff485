"""Copies of tensors and modules that keep what they shared, and copies in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers as they are."""
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    return tensor.to(torch.complex128) if tensor.dtype.is_complex else tensor


def inner_values(tensor: Tensor) -> dict[str, Any]:
    """What a wrapper subclass is made of: tensors, and opaque objects such as a device mesh."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def rebuilt(tensor: Tensor, inner: dict[str, Any]) -> Tensor:
    """A wrapper subclass like the given one, around other values."""
    context = tensor.__tensor_flatten__()[1]
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def plain_tensors(tensor: Tensor) -> Iterator[Any]:
    """The dense tensors that hold the values: of a subclass the inner ones."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in inner_values(tensor).values():
            if isinstance(inner, torch.Tensor):
                yield from plain_tensors(inner)
    elif tensor.layout is torch.sparse_coo:
        coalesced = tensor.detach().coalesce()
        yield from (coalesced.indices(), coalesced.values())
    elif tensor.layout is not torch.strided:
        yield tensor.detach().to_dense()
    else:
        yield tensor


def own_copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module; any other function as it is."""
    return copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn


def wide_copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same in float64; NotImplementedError if the module holds tensors that cannot be."""
    wide = own_copy(fn)
    if isinstance(wide, torch.nn.Module):
        try:
            wide._apply(widened)
        except RuntimeError as error:
            raise NotImplementedError("module does not widen") from error
    return wide


@dataclass
class Copier:
    """Copies tensors so that sharing, views, strides and leaves stay what they were."""

    widen: bool = False
    given: list[Any] = field(default_factory=list)  # copies of what was asked for, in order
    leaves: list[Any] = field(default_factory=list)  # copies, and hidden sources of non-leaves
    done: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # by id: original, copy
    storages: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # by old one: new, dtype

    def copy_tree(self, tree: object) -> tuple[Any, list[Any]]:
        """Copies of all tensors and modules in a pytree; and the modules."""
        flat, structure = tree_flatten(tree)
        modules = []
        for index, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                flat[index] = self.copy(value)
                self.given.append(flat[index])
            elif isinstance(value, torch.nn.Module):
                flat[index] = wide_copy(value) if self.widen else own_copy(value)
                modules.append(flat[index])
        return tree_unflatten(flat, structure), modules

    def copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.done:
            new = self._copy_as_is(tensor)
            for name, note in tensor.__dict__.items():  # such as those of mark_dynamic
                new.__dict__.setdefault(name, note)
            self.done[id(tensor)] = tensor, new  # holding the original keeps its id taken
        return self.done[id(tensor)][1]

    def _copy_as_is(self, tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):
            inner = {
                name: self._copy_as_is(value) if isinstance(value, torch.Tensor) else value
                for name, value in inner_values(tensor).items()
            }
            return self._finish(rebuilt(tensor, inner), tensor)
        if tensor.layout is not torch.strided:
            new = tensor.detach().clone()
            return self._finish(widened(new) if self.widen else new, tensor)
        base = tensor._base
        odd = tensor.is_conj() or tensor.is_neg()
        if base is not None and base.dtype == tensor.dtype and not odd:
            return self._view_of(self.copy(base), tensor)
        new = self._over_same_storage(tensor)
        new = new.conj() if tensor.is_conj() else new
        return self._finish(new._neg_view() if tensor.is_neg() else new, tensor)

    def _view_of(self, base: Tensor, tensor: Tensor) -> Tensor:
        # a view made under no_grad has to stay one: writing to it is an error
        with torch.set_grad_enabled(tensor.requires_grad or not base.requires_grad):
            new = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._finish(new, tensor) if tensor.is_leaf and tensor.requires_grad else new

    def _over_same_storage(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = self._copied_storage(storage, tensor), tensor.dtype
        new, dtype = self.storages[storage._cdata]
        if self.widen and dtype != tensor.dtype:
            raise NotImplementedError("one storage seen as two dtypes does not widen")
        wide = widened(torch.empty(0, dtype=tensor.dtype)).dtype if self.widen else tensor.dtype
        empty = torch.empty(0, dtype=wide, device=tensor.device)
        return empty.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _copied_storage(
        self, storage: torch.UntypedStorage, tensor: Tensor
    ) -> torch.UntypedStorage:
        if not self.widen:
            return storage.clone()
        count = storage.nbytes() // tensor.element_size()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(storage, 0, (count,), (1,))
        return widened(flat).clone().untyped_storage()

    def _finish(self, new: Tensor, tensor: Tensor) -> Tensor:
        """Give a fresh copy the original's place in autograd."""
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        if not tensor.requires_grad:
            return new
        source = new.requires_grad_()
        self.leaves.append(source)
        return source if tensor.is_leaf else source.clone()
