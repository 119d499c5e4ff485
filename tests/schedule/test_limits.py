"""No kernel without a limit: long programs become many kernels of a size, on both targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.loops.access import nodes
from stator.loops.ir import Kernel
from stator.lower import realize
from stator.lower.items import Extern
from stator.lower.lower import Lowering
from stator.schedule import fuse
from tests.lower.graphs import lowered, traced
from tests.schedule.programs import gpu_kernels, scheduled

LONG: Final = 130  # operators: Python's own stack holds a thousand calls


def on_the_cpu(fn: Callable[..., object], *inputs: Tensor) -> list[Kernel]:
    """Kernels of the other target."""
    return list(scheduled(fn, *inputs).kernels.values())


def a_chain(count: int) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        for number in range(count):
            x = (x + number) * 1.5
        return x

    return fn


def a_sum(*parts: Tensor) -> Tensor:
    """One after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def shifts(x: Tensor) -> Tensor:
    """Nothing is computed; each reads where the one before it does."""
    for _ in range(LONG):
        x = F.pad(x.flip(-1)[..., 1:], (1, 0))
    return x


def turned(x: Tensor) -> Tensor:
    """Each divides what the one before it divided."""
    for _ in range(LONG):
        x = x.reshape(-1, 6).t().reshape(x.shape)
    return x


def followed(table: Tensor, place: Tensor) -> Tensor:
    """Each asks where the one before it led."""
    for _ in range(LONG):
        place = table[place]
    return place


@pytest.mark.parametrize("kernels_of", [on_the_cpu, gpu_kernels])
def test_a_chain_is_cut_where_python_would_go_too_deep(
    kernels_of: Callable[..., list[Kernel]],
) -> None:
    depth = max(
        s.value.depth for k in kernels_of(a_chain(LONG), torch.ones(8)) for s in k.statements
    )

    assert realize.MOST_OPERATIONS < depth <= fuse.DEEPEST


@pytest.mark.parametrize("kernels_of", [on_the_cpu, gpu_kernels])
def test_twice_the_program_is_twice_the_kernels_of_the_same_size(
    kernels_of: Callable[..., list[Kernel]],
) -> None:
    few, many = (kernels_of(a_chain(count), torch.ones(8)) for count in (LONG, 2 * LONG))

    def largest(kernels: list[Kernel]) -> int:
        return max(len(nodes(s)) for kernel in kernels for s in kernel.statements)

    assert len(many) <= 2 * len(few)
    assert largest(many) == largest(few)


def test_the_reason_is_given() -> None:
    refusals = scheduled(a_chain(LONG), torch.ones(8)).refusals

    assert all("would stand inside of each other: 128 are enough" in text for text in refusals)
    assert refusals


@pytest.mark.parametrize("fn", [shifts, turned])
def test_views_of_views_are_settled_in_memory(fn: Callable[[Tensor], Tensor]) -> None:
    lowering = lowered(fn, torch.ones(8, 48))

    made = {name for item in lowering.items for name in [item.name]}

    assert len(made) > LONG // realize.MOST_LINKS


def test_a_gather_of_gathers_is_settled_in_memory() -> None:
    table, place = torch.arange(50), torch.arange(64) % 50

    kernels = gpu_kernels(followed, table, place)

    assert max(s.value.depth for k in kernels for s in k.statements) <= fuse.DEEPEST


@pytest.mark.parametrize(("count", "is_called"), [(64, False), (65, True)])
def test_what_reads_too_many_tensors_is_called(count: int, is_called: bool) -> None:
    lowering = Lowering(traced(lambda *xs: torch.cat(xs), *(torch.ones(4) for _ in range(count))))

    items = lowering.run()

    assert any(isinstance(item, Extern) for item in items) is is_called
    assert ("it reads 65 tensors: 64 are enough" in lowering.reasons.values()) is is_called


def test_a_kernel_is_handed_so_many_tensors_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "MOST_BUFFERS", 30)
    parts = [torch.ones(8) for _ in range(100)]

    kernels = gpu_kernels(a_sum, *parts)

    assert max(len((*kernel.read, *kernel.written)) for kernel in kernels) <= 30
    assert len(kernels) <= 5


def test_what_is_read_at_ever_more_places_is_not_computed_at_all_of_them() -> None:
    """Each step reads the one before it twice, further and further apart."""

    def fn(x: Tensor, steps: int) -> Tensor:
        x = x.softmax(-1)
        for step in range(steps):
            x = torch.sin(x[:, : -(1 << step)] + x[:, 1 << step :])
        return x

    def operations(steps: int) -> int:
        kernels = gpu_kernels(lambda x: fn(x, steps), torch.ones(300, 4096))
        return sum(len(nodes(s)) for kernel in kernels for s in kernel.statements)

    few, more, many = (operations(steps) for steps in (6, 8, 10))

    assert many - more == more - few


def test_what_is_read_at_a_few_places_is_computed_at_each() -> None:
    kernels = gpu_kernels(
        lambda x: x.softmax(-1)[:, 1:] * x.softmax(-1)[:, :-1], torch.ones(300, 64)
    )

    assert len(kernels) == 1
