"""The pool and the arenas: what is kept is safe, what dies is used again, nothing grows."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import stator
from stator.runtime.native.prelude import MemoryHeld, set_spare
from tests.runtime.native.executors import compiled

POOLED: Final = 1 << 16  # bytes from which on an output is the pool's
PAGE: Final = 4096
HUGE: Final = 1 << 21  # bytes from which on the system is asked for large pages
WAITING: Final = 1 << 26  # bytes that may wait, however little was used at once


@pytest.fixture(autouse=True)
def _own_pool() -> Iterator[None]:
    """Nothing of other tests waits in the pool."""
    gc.collect()
    stator.trim()
    yield
    stator.trim()


def chain() -> Callable[[Tensor], Tensor]:
    """Two products, so that there is a buffer in the arena."""
    found: Callable[[Tensor], Tensor] = compiled(lambda x: torch.sin(x @ x) @ x, "native")
    return found


def add() -> Callable[..., Tensor]:
    return compiled(lambda x: x + 1, "native")


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# --- outputs ---


@pytest.mark.parametrize("size", [8, 128, 200, 1000], ids=str)
def test_what_the_caller_keeps_is_never_used_again(size: int) -> None:
    run = chain()
    inputs = [torch.full((size, size), n / size) for n in range(50 if size < 1000 else 8)]

    kept = [run(x) for x in inputs]

    for x, out in zip(inputs, kept, strict=True):
        assert torch.equal(out, run(x))
    places = [out.data_ptr() for out in kept]
    ends = sorted((place, place + out.nbytes) for place, out in zip(places, kept, strict=True))
    assert all(first[1] <= second[0] for first, second in pairwise(ends))


@pytest.mark.parametrize(
    "keep",
    [lambda y: y[3:], lambda y: y.t(), lambda y: y.numpy()],
    ids=["slice", "transpose", "array"],
)
def test_what_looks_at_an_output_keeps_it(keep: Callable[[Tensor], Any]) -> None:
    run = add()
    kept = keep(run(torch.zeros(256, 256)))

    for _ in range(5):
        run(torch.full((256, 256), 7.0))

    assert (kept == 1).all()


def test_memory_of_the_dead_is_used_again() -> None:
    run = chain()
    x = torch.randn(300, 300)
    run(x)
    before = stator.memory()
    places = set()

    for _ in range(100):
        places.add(run(x).data_ptr())

    assert len(places) <= 2
    assert stator.memory() == before


def test_saved_values_are_used_again() -> None:
    run = compiled(lambda x: torch.sin(x @ x) @ x, "native")

    def step() -> None:
        x = torch.randn(200, 200, requires_grad=True)
        run(x).sum().backward()

    for _ in range(3):
        step()
    before = stator.memory()
    for _ in range(20):
        step()

    assert stator.memory() == before


@pytest.mark.parametrize("elements", [1, 16383, 16384, 16385, 100_000, HUGE // 4, HUGE // 4 + 1])
def test_outputs_are_aligned_and_as_large_as_eager_s(elements: int) -> None:
    used = stator.memory().used
    out = add()(torch.zeros(elements))

    assert out.data_ptr() % 64 == 0
    assert out.untyped_storage().nbytes() == 4 * elements
    assert (stator.memory().used > used) == (4 * elements >= POOLED)


@pytest.mark.parametrize("elements", [16384, 17000, 100_000, 500_000, 524_288, 3_000_000])
def test_little_is_wasted(elements: int) -> None:
    used = stator.memory().used
    out = add()(torch.zeros(elements))
    held = stator.memory().used - used

    assert out.nbytes <= held <= 1.125 * out.nbytes + 3 * PAGE


def test_counts_follow_what_is_alive() -> None:
    run, before = add(), stator.memory()
    first = run(torch.zeros(100_000))
    one = stator.memory()
    second = run(torch.zeros(100_000))
    two = stator.memory()
    del first, second
    none = stator.memory()

    assert before.used < one.used < two.used
    assert (before.idle, one.idle, two.idle) == (0, 0, 0)
    assert (none.used, none.idle) == (before.used, two.used - before.used)


def test_memory_says_itself_in_words() -> None:
    held = MemoryHeld(used=4 << 20, idle=0, arenas=3 << 19, peak=5 << 20)

    assert str(held) == "used 4.0 MiB, idle 0.0 MiB, arenas 1.5 MiB, peak 5.0 MiB"


# --- giving back ---


def test_trim_gives_everything_back_that_waits() -> None:
    run = chain()
    chain()(torch.randn(120, 120))  # leaves an arena: its buffers are not large
    x = torch.randn(1500, 1500)
    kept = run(x)
    run(x)
    before, held = stator.memory(), resident()
    assert before.idle > 8 << 20
    assert before.arenas > 1 << 15

    assert stator.trim() == before.idle + before.arenas

    after = stator.memory()
    assert (after.used, after.idle, after.arenas) == (before.used, 0, 0)
    assert resident() < held - before.idle * 0.9
    assert stator.trim() == 0
    assert torch.equal(kept, run(x))


def test_many_sizes_do_not_pile_up() -> None:
    run = compiled(lambda x: x * 2 + 1, "native", dynamic=True)
    sizes = [int(200_000 * 1.13**k) for k in range(28)]
    largest = 4 * sizes[-1]
    assert 4 * sum(sizes) > WAITING + 3 * largest, "the test is too small to tell"

    held = []
    for n in sizes:
        run(torch.zeros(n))
        held.append(stator.memory().idle)

    assert max(held) <= WAITING + 2.5 * largest


def test_sizes_that_take_turns_are_both_kept() -> None:
    set_spare(WAITING)  # a program with a limit may have run before
    run = compiled(lambda x: x * 2 + 1, "native", dynamic=True)
    sizes = (30_000, 1_000_000)
    for n in sizes * 2:
        run(torch.zeros(n))
    places = {n: set[int]() for n in sizes}

    for n in sizes * 10:
        places[n].add(run(torch.zeros(n)).data_ptr())

    assert len(places[1_000_000]) == 1


def test_a_call_that_asks_for_more_than_there_is() -> None:
    run = compiled(lambda x, n: x.expand(n, n) + 1, "native", dynamic=True)
    x = torch.zeros(1)
    assert run(x, 3).sum() == 9

    with pytest.raises((RuntimeError, MemoryError), match=r"(?i)memory|allocate"):
        run(x, 1 << 23)  # 2**48 bytes

    assert run(x, 400).sum() == 160_000


# --- arenas ---


@pytest.mark.parametrize("size", [8, 60, 200, 700])
def test_an_arena_is_mapped_once(size: int) -> None:
    run = chain()
    x = torch.randn(size, size)
    for _ in range(3):
        run(x)
    held, before = stator.memory().arenas, faults()

    for _ in range(50):
        run(x)

    assert stator.memory().arenas == held
    assert faults() - before < 50


def test_a_larger_arena_takes_the_place_of_a_smaller_one() -> None:
    run = chain()
    small, large = torch.randn(64, 64), torch.randn(120, 120)

    run(small)
    first = stator.memory().arenas
    run(large)
    second = stator.memory().arenas
    run(small)

    assert 0 < first < second
    assert stator.memory().arenas == second


def test_a_failed_call_gives_its_arena_back() -> None:
    def lookup(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return torch.nn.functional.embedding(i, w @ w) @ (x @ x)

    run = compiled(lookup, "native")
    x, good, bad = torch.randn(120, 120), torch.tensor([1, 2]), torch.tensor([1, 300])
    run(x, x, good)
    before = stator.memory()

    for _ in range(20):
        with pytest.raises(IndexError):
            run(x, x, bad)

    assert stator.memory() == before


# --- what eager's own tensors can do ---


def test_an_output_may_shrink_be_replaced_and_be_shared() -> None:
    run, x = add(), torch.zeros(300, 300)

    assert run(x).resize_(3, 3).shape == (3, 3)
    assert run(x).share_memory_().is_shared()
    assert run(x).set_(torch.ones(2)).shape == (2,)
    taken = run(x)
    taken.data = torch.ones(4)
    assert taken.shape == (4,)


@pytest.mark.xfail(
    raises=RuntimeError, reason="memory of the pool cannot be resized: torch has no way to say how"
)
def test_an_output_may_grow() -> None:
    assert add()(torch.zeros(300, 300)).resize_(600, 600).shape == (600, 600)


def test_a_small_output_may_grow() -> None:
    out = add()(torch.zeros(30, 30))

    assert out.resize_(600, 600)[0, :30].sum() == 30
