"""Smaller shapes and plainer constants, where the graph still runs and still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from stator.debug.minify.case import Case, as_module
from stator.debug.minify.record import copy_of
from stator.debug.minify.search import Search


def shrink_sizes(search: Search) -> None:
    """Make sizes smaller: all of them, each wherever it stands, then in one input alone."""
    search.tell("sizes", search.case)
    for least in (1, 2):
        if search.attempt(_with_all_sizes(search.case, least), anew=True):
            break
    for size in _sizes(search.case):
        for smaller in _smaller(size):
            if search.attempt(_with_size(search.case, size, smaller), anew=True):
                break
    for number in range(len(search.case.inputs)):
        for dim, size in reversed(list(enumerate(_size_of(search.case.inputs[number])))):
            for smaller in _smaller(size):
                if search.attempt(_with_dim(search.case, number, dim, smaller), anew=True):
                    break


def _sizes(case: Case) -> list[int]:
    """All sizes of inputs, the largest first."""
    found = {size for value in case.inputs for size in _size_of(value)}
    return sorted(found, reverse=True)


def _size_of(value: Any) -> tuple[int, ...]:
    return tuple(value.size()) if isinstance(value, torch.Tensor) else ()


def _smaller(size: int) -> Iterator[int]:
    """Sizes to try, the smallest first."""
    for other in dict.fromkeys((1, 2, 3, 4, 8, size // 4, size // 2)):
        if 0 < other < size:
            yield other


def _with_size(case: Case, size: int, smaller: int) -> Case:
    """The case with `smaller` wherever `size` stands: in inputs, and in arguments of calls."""
    inputs = [
        _narrowed(value, {dim: smaller for dim, n in enumerate(_size_of(value)) if n == size})
        if isinstance(value, torch.Tensor)
        else (smaller if type(value) is int and value == size else value)
        for value in case.inputs
    ]
    wholes = {v.numel() for v in case.inputs if isinstance(v, torch.Tensor) and size in v.size()}

    def argument(value: Any) -> Any:
        if type(value) is not int:
            return value
        if value == size:
            return smaller
        return value * smaller // size if value in wholes else value  # of a tensor made flat

    changed = with_arguments(case, argument)
    return Case(changed.module, tuple(inputs))


def _with_all_sizes(case: Case, least: int) -> Case | None:
    """The case with `least` for every size above it; None if there is none."""
    larger = [size for size in _sizes(case) if size > least]
    for size in larger:
        case = _with_size(case, size, least)
    return case if larger else None


def _with_dim(case: Case, number: int, dim: int, smaller: int) -> Case:
    inputs = list(case.inputs)
    inputs[number] = _narrowed(inputs[number], {dim: smaller})
    return Case(case.module, tuple(inputs))


def _narrowed(value: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """The beginning of a tensor along some dimensions, which lies as densely as the whole."""
    if not sizes:
        return value
    part = value.detach()
    for dim, size in sizes.items():
        part = part.narrow(dim, 0, size)
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    stride, step = [0] * value.dim(), 1
    for dim in reversed(order):
        stride[dim] = step if value.stride(dim) else 0
        step *= part.size(dim) if value.stride(dim) else 1
    if any(n > 1 and s == 0 for n, s in zip(part.size(), stride, strict=True)):
        return copy_of(part).requires_grad_(value.requires_grad)
    dense = torch.empty_strided(part.size(), stride, dtype=value.dtype, device=value.device)
    return dense.copy_(part).requires_grad_(value.requires_grad)


def with_arguments(case: Case, changed: Callable[[Any], Any]) -> Case:
    """The case with other constants in its calls."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in case.graph.nodes:
        if node.op == "output":
            graph.output(tuple(made[source] for source in case.outputs))
            continue
        made[node] = graph.node_copy(node, made.__getitem__)
        if node.op.startswith("call_"):
            made[node].args = fx.node.map_aggregate(made[node].args, changed)
            made[node].kwargs = fx.node.map_aggregate(made[node].kwargs, changed)
    return Case(as_module(case.module, graph), case.inputs)


def simplify_constants(search: Search) -> None:
    """Replace numbers by 0, 1 or 2, one argument of one call after another."""
    search.tell("constants", search.case)
    place = 0
    while (found := _constant(search.case, place)) is not None:
        for plain in (0, 1, 2):
            same = type(found)(plain)
            if same == found:
                break
            if search.attempt(_with_constant(search.case, place, same), anew=True):
                break
        place += 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _constant(case: Case, place: int) -> Any:
    """The constant with that number among all of them."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        found.extend([value] if _is_number(value) else [])
        return value

    with_arguments(case, look)
    return found[place] if place < len(found) else None


def _with_constant(case: Case, place: int, plain: Any) -> Case:
    count = iter(range(1 << 30))
    return with_arguments(
        case,
        lambda value: (plain if next(count) == place else value) if _is_number(value) else value,
    )
