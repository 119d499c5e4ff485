"""Products that run in one kernel with what follows them, where that was measured to be quicker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stator.codegen.triton.product import product_of
from stator.codegen.triton.shape import Shape
from stator.lower.lower import Lowering
from stator.runtime.loading import Loading
from stator.schedule.canonical import canonical
from stator.schedule.fuse import Fused, Group
from stator.schedule.products import Joinable, joinable
from stator.schedule.registers import build_gpu_kernel

if TYPE_CHECKING:
    from stator.codegen.triton.tune_product import ProductTrial

Wanted = Callable[[Sequence[Group]], Mapping[Group, set[str]]]


def join_products(
    fused: Fused, lowering: Lowering, wanted: Wanted, loading: Loading, notes: list[str]
) -> dict[Group, Shape]:
    """Join what had better be; the shapes of those kernels.

    `wanted` says which names of groups are read outside of them.
    """
    if not loading.now or loading.verdicts is None or not lowering.target.uses_triton:
        return {}
    refused: dict[str, str] = {}
    shapes: dict[Group, Shape] = {}
    while (found := joinable(fused.groups, lowering, refused)) is not None:
        trial = _trial(found, fused.groups, lowering, wanted)
        shape = None if trial is None else chosen(trial, lowering, loading, notes)
        if shape is None:
            refused[found.node.name] = "" if trial is not None else "its kernel would be another"
            continue
        # One after the other: whether the next may move depends on where this one runs now.
        fused.groups = found.applied(fused.groups)
        shapes[found.joined] = shape
    notes += [f"{name} stays with cuBLAS: {why}" for name, why in refused.items() if why]
    return shapes


def chosen(
    trial: ProductTrial, lowering: Lowering, loading: Loading, notes: list[str]
) -> Shape | None:
    """What is measured to be quicker; without a card nothing is."""
    if loading.verdicts is None or not lowering.target.on_gpu:
        return None
    from stator.codegen.triton.card import Card  # Triton is for GPUs alone
    from stator.codegen.triton.tune import Tuner
    from stator.codegen.triton.tune_product import product_shape

    return product_shape(trial, Tuner(Card(lowering.target.device), loading.verdicts, notes))


def _trial(
    found: Joinable, groups: Sequence[Group], lowering: Lowering, wanted: Wanted
) -> ProductTrial | None:
    from stator.codegen.triton.tune_product import LibraryCall, ProductTrial

    after = wanted(found.applied(groups))[found.joined]
    joined = build_gpu_kernel("joined", found.joined, after, lowering.sizes)
    loops = build_gpu_kernel("loops", found.loops, wanted(groups)[found.loops], lowering.sizes)
    one, other = (canonical(kernel, any_length=False) for kernel in (joined, loops))
    if product_of(one.kernel) is None or one.sizes or other.sizes:
        return None
    node = found.node
    values: list[Any] = [(source.name, source.meta["val"]) for source in node.args]
    operands = tuple((name, tuple(v.size()), tuple(v.stride())) for name, v in values)
    size = node.meta["val"].size()
    function = torch.addmm if len(operands) > 2 else torch.mm
    call = LibraryCall(node.name, function, operands, (size[0], size[1]))
    return ProductTrial(one, other, call)
