"""Inputs whose values do not matter are made from a seed, so that none need be stored."""

from __future__ import annotations

import torch

from stator.debug.minify.case import Case
from stator.debug.minify.script import Made, made, made_like
from stator.debug.minify.search import Search


def make_up_inputs(search: Search) -> dict[int, Made]:
    """Try made-up values for all inputs, else for each; which of them are, and how."""
    search.tell("values", search.case)
    tensors = [n for n, v in enumerate(search.case.inputs) if isinstance(v, torch.Tensor)]
    ways = {n: made_like(search.case.inputs[n], seed=n) for n in tensors}
    if ways and search.attempt(_with_made(search.case, ways), anew=True):
        return ways
    found = {}
    for number, way in ways.items() if len(ways) > 1 else ():
        if search.attempt(_with_made(search.case, {number: way}), anew=True):
            found[number] = way
    return found


def _with_made(case: Case, ways: dict[int, Made]) -> Case:
    values = list(case.inputs)
    for number, way in ways.items():
        grad = way.requires_grad
        values[number] = made(way.size, way.stride, way.dtype, seed=way.seed, requires_grad=grad)
    return Case(case.module, tuple(values))
