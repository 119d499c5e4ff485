"""Compile without Dynamo: functions and modules that are called with tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

from stator.core.events import start_compilation
from stator.core.torch_types import Flat
from stator.options import read_options
from stator.pipeline import make_tools
from stator.torch_api import pytree


def aot_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function`, traced and compiled ahead of time for each new kind of arguments.

    Arguments and results may be nested lists, tuples and dicts of tensors; other arguments are
    constants of the compilation, and must be hashable.
    """
    chosen = read_options(None, options)
    programs: dict[Any, tuple[Flat, list[Any]]] = {}

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        unique, slots = _distinct_tensors(leaves)
        constants = tuple((type(c), c) for c in leaves if not isinstance(c, torch.Tensor))
        key = (spec, tuple(slots), constants)
        if key not in programs:
            results: list[Any] = []
            program = _flattened(function, spec, leaves, slots, results)
            tools = make_tools(chosen, start_compilation())
            programs[key] = (tools.specialize(program), results)
        call, results = programs[key]
        values = call(*unique)
        return pytree.tree_unflatten(list(values), results[0])

    return compiled


def aot_module(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """A module that computes what `module` does, compiled; it shares its parameters."""
    return _CompiledModule(module, options)


class _CompiledModule(torch.nn.Module):
    def __init__(self, original: torch.nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.original = original

        def stateless(
            state: dict[str, torch.Tensor], training: tuple[bool, ...], args: Any, kwargs: Any
        ) -> Any:
            return functional_call(original, state, args, kwargs)

        self._compiled = aot_function(stateless, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled module's result."""
        state = dict(self.original.named_parameters())
        state |= dict(self.original.named_buffers())
        training = tuple(module.training for module in self.original.modules())
        return self._compiled(state, training, args, kwargs)


def _distinct_tensors(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """Every tensor once, and for each leaf the place of its tensor (-1: it is none)."""
    unique: list[torch.Tensor] = []
    places: dict[int, int] = {}
    slots = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            slots.append(-1)
            continue
        if id(leaf) not in places:
            places[id(leaf)] = len(unique)
            unique.append(leaf)
        slots.append(places[id(leaf)])
    return unique, slots


def _flattened(
    function: Callable[..., Any], spec: Any, leaves: list[Any], slots: list[int], results: list[Any]
) -> Flat:
    """A flat program over the distinct tensors; puts the structure of the result in `results`."""
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def program(*tensors: Any) -> list[Any]:
        filled = [
            tensors[slot] if slot >= 0 else constant
            for slot, constant in zip(slots, constants, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        values, structure = pytree.tree_flatten(function(*args, **kwargs))
        results[:] = [structure]
        return list(values)

    return program
