"""When a kernel may store right into an input, and when somebody would read too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stator.core.dump import Dump
from stator.core.events import Compilation
from stator.loops.verify import verify
from stator.runtime.fused import plan_kernels
from stator.runtime.plan import Call, Launch, Plan, Together
from stator.runtime.python import load_plan
from stator.schedule.in_place import InPlace, update_in_place
from tests.lower.graphs import traced
from tests.schedule.programs import scheduled

Fn = Callable[..., Any]
SIZE: Final = (6, 8)


def matrices(count: int, dtype: torch.dtype = torch.float32, *size: int) -> list[Tensor]:
    values = [torch.randint(-20, 20, size or SIZE).double() / 4 for _ in range(count)]
    return [value.to(dtype) for value in values]


def updated(fn: Fn, *inputs: Tensor) -> InPlace:
    """What stores into inputs."""
    program = scheduled(fn, *inputs)
    (output,) = program.module.graph.find_nodes(op="output")
    returned = {node.name for node in output.all_input_nodes}
    found = update_in_place(program.groups, program.kernels, program.sizes, returned)
    for kernel in found.kernels.values():
        verify(kernel)
    return found


def stored_into(fn: Fn, *inputs: Tensor) -> list[str]:
    """Inputs that kernels store into, by the names of the function's parameters."""
    return sorted(target.removesuffix("_1") for target in updated(fn, *inputs).targets.values())


def plan_of(fn: Fn, *inputs: Tensor) -> Plan:
    def returning(*given: Tensor) -> Any:
        return fn(*given) or ()

    return plan_kernels(traced(returning, *inputs), Compilation(), "forward", Dump(None))


def require_same(fn: Fn, *inputs: Tensor) -> None:
    """Machine code writes to inputs what eager does, and returns the same; at any thread count."""
    run = load_plan(plan_of(fn, *inputs), "forward")
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        ours, theirs = ([value.clone() for value in inputs] for _ in range(2))
        result, expected = run(list(ours)), fn(*theirs) or ()
        torch.set_num_threads(before)
        torch.testing.assert_close([*ours, *result], [*theirs, *expected], rtol=0, atol=0)


# Yes


def step(x: Tensor, g: Tensor) -> None:
    x.copy_(x - g * 2)


def momentum(x: Tensor, m: Tensor, g: Tensor) -> None:
    new = m * 2 + g
    m.copy_(new)
    x.copy_(x - new)


def overwritten(x: Tensor, g: Tensor) -> None:
    """The old value is not read at all."""
    x.copy_(g * 2 + 1)


def read_each_other(x: Tensor, y: Tensor) -> None:
    """Each new value is made from both old ones."""
    a, b = x + y * 2, y - x
    x.copy_(a)
    y.copy_(b)


def turned(x: Tensor, y: Tensor) -> None:
    """Another input is read transposed: that is none of the stored one's business."""
    x.copy_(x + y.t())


YES: Final[dict[str, tuple[Fn, int, list[str]]]] = {
    "step": (step, 2, ["x"]),
    "momentum": (momentum, 3, ["m", "x"]),
    "overwritten": (overwritten, 2, ["x"]),
    "two updates that read each other": (read_each_other, 2, ["x", "y"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", YES)
def test_an_update_stores_right_into_the_input(name: str, dtype: torch.dtype) -> None:
    fn, count, targets = YES[name]
    inputs = matrices(count, dtype)
    assert stored_into(fn, *inputs) == targets
    require_same(fn, *inputs)


def test_the_copy_is_gone_and_nothing_is_allocated() -> None:
    plan = plan_of(step, *matrices(2))

    assert not [s for s in plan.steps if isinstance(s, Call)]
    (launch,) = [s for s in plan.steps if isinstance(s, Launch)]
    assert launch.makes == ()
    assert len(launch.writes) == 1


def test_an_input_that_lies_otherwise_is_refused_at_the_call() -> None:
    """A copy that lies as planned would not be the caller's tensor."""
    run = load_plan(plan_of(step, *matrices(2)), "forward")
    x, g = matrices(2)

    with pytest.raises(RuntimeError, match="compile the function again"):
        run([x.t().contiguous().t(), g])


def test_a_transposed_input_is_stored_into_as_it_lies() -> None:
    x, g = (value.t() for value in matrices(2))

    assert stored_into(step, x, g) == ["x"]
    require_same(step, x, g)


def test_another_input_read_transposed_is_no_hindrance() -> None:
    x, y = matrices(2, torch.float32, 33, 33)

    assert stored_into(turned, x, y) == ["x"]
    require_same(turned, x, y)


def test_every_load_comes_before_the_first_store() -> None:
    kernels = updated(read_each_other, *matrices(2)).kernels

    (kernel,) = kernels.values()
    assert len(kernel.shares) == 2


# No


def read_later(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The kernel runs early, for what is sorted first; then torch reads the old value."""
    first = torch.sort(x + g)[0]
    old = torch.sort(x)[0]
    x.copy_(x - g)
    return first, old


def read_reversed(x: Tensor, g: Tensor) -> None:
    x.copy_(x.flip(0) - g)


def read_transposed(x: Tensor, g: Tensor) -> None:
    x.copy_(x.t() + g)


def read_by_a_reduction(x: Tensor, g: Tensor) -> None:
    x.copy_(x - x.sum(1, keepdim=True) + g)


def viewed(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A view that torch takes and sorts."""
    new = x - g
    part = torch.sort(x[1:])[0]
    x.copy_(new)
    return (part,)


def returned(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    new = x - g
    x.copy_(new)
    return (new,)


def copied_twice(x: Tensor, y: Tensor) -> None:
    new = x - y * 2
    x.copy_(new)
    y.copy_(new)


def read_by_a_call(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The new value goes to torch as well."""
    new = x - g
    x.copy_(new)
    return (torch.sort(new)[0],)


def part_of_it(x: Tensor, g: Tensor) -> None:
    """Not the input itself is written to."""
    x[1:].copy_(x[1:] - g[1:])


def other_type(x: Tensor, g: Tensor) -> None:
    x.copy_((x - g).double())


def broadcast(x: Tensor, g: Tensor) -> None:
    x.copy_(g[:1] * 2)


NO: Final[dict[str, Fn]] = {
    "read later": read_later,
    "read at another index": read_reversed,
    "read transposed": read_transposed,
    "read by a reduction": read_by_a_reduction,
    "a view of it read": viewed,
    "the new value returned": returned,
    "copied to two inputs": copied_twice,
    "the new value read by a call": read_by_a_call,
    "only a part written": part_of_it,
    "another type": other_type,
    "another size": broadcast,
}


@pytest.mark.parametrize("name", NO)
def test_an_update_that_somebody_would_notice_is_a_copy(name: str) -> None:
    inputs = matrices(2, torch.float32, 6, 6)

    assert stored_into(NO[name], *inputs) == []
    require_same(NO[name], *inputs)


def test_an_input_of_another_layout_is_copied() -> None:
    """The result lies in rows, the input in columns."""
    x, g = matrices(2, torch.float32, 6, 6)
    turned_x = x.t()

    def fn(x: Tensor, g: Tensor) -> None:
        x.copy_((g * 2).contiguous())

    assert stored_into(fn, turned_x, g) == []
    require_same(fn, turned_x, g)


def test_a_rounded_value_that_is_read_again_is_not_stored_over() -> None:
    """In bf16 the second statement loads what the first one rounded: it would load the new one."""

    def fn(m: Tensor, x: Tensor, g: Tensor) -> None:
        new = (m * 0.5 + g).exp()
        m.copy_(new)
        x.copy_(x - new * new)

    inputs = matrices(3, torch.bfloat16)

    require_same_up_to_rounding(fn, *inputs)


def require_same_up_to_rounding(fn: Fn, *inputs: Tensor) -> None:
    ours, theirs = ([value.clone() for value in inputs] for _ in range(2))
    load_plan(plan_of(fn, *inputs), "forward")(list(ours))
    fn(*theirs)
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


# One after the other


def test_two_kernels_that_read_each_other_s_input_store_into_one_of_them() -> None:
    """The first would overwrite what the second still reads; the second comes last."""

    def fn(x: Tensor, y: Tensor) -> None:
        a = y.sum(1) + x.sum(1)
        new_x = x - a[:, None]
        b = torch.sort(new_x)[0]
        new_y = y - x + b
        x.copy_(new_x)
        y.copy_(new_y)

    inputs = matrices(2)

    assert "x" not in stored_into(fn, *inputs)
    require_same(fn, *inputs)


def test_two_inputs_that_swap_are_right() -> None:
    """Whichever is stored into, the other one is read before."""

    def fn(x: Tensor, y: Tensor) -> None:
        a, b = y + 1, x + 2
        x.copy_(a)
        y.copy_(b)

    inputs = matrices(2)

    assert len(stored_into(fn, *inputs)) == 1
    require_same(fn, *inputs)


def test_many_updates_run_as_one_launch_over_a_list() -> None:
    def fn(*tensors: Tensor) -> None:
        half = len(tensors) // 2
        for x, g in zip(tensors[:half], tensors[half:], strict=True):
            x.copy_(x - g * 0.5)

    sizes = ((6, 8), (3,), (100, 7), (70,))
    inputs = [
        value for _ in range(2) for size in sizes for value in matrices(1, torch.float32, *size)
    ]

    plan = plan_of(fn, *inputs)

    assert not [s for s in plan.steps if isinstance(s, Call)]
    assert len([s for s in plan.steps if isinstance(s, Launch | Together)]) == 1
    require_same(fn, *inputs)
