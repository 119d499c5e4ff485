"""Recorded calls: what is copied, what stays, when another recording is made, and when none is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stator.runtime import cuda_graphs
from stator.runtime.cuda_graphs import MOST_AGAIN, MOST_SIZES, Pool
from tests.runtime.recorder import Again, Program

CPU: Final = torch.device("cpu")


HELD: Final[list[Tensor]] = []  # of one test: none of its tensors lies where another did by chance


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    HELD.clear()


def ones(*size: int) -> Tensor:
    HELD.append(torch.ones(size or (4,)))
    return HELD[-1]


def doubled(x: Tensor) -> list[Tensor]:
    return [x * 2]


# --- calls without a backward ---


def test_the_first_call_runs_as_usual_and_the_second_is_recorded() -> None:
    program = Program(doubled)
    call = program.recorded()
    x = ones()

    assert torch.equal(call([x])[0], x * 2)
    assert (program.pool.recorded, program.pool.replayed) == (0, 0)
    for count in (1, 2, 3):
        arguments = [x]
        assert torch.equal(call(arguments)[0], x * 2)
        assert arguments == []
        assert (program.pool.recorded, program.pool.replayed) == (1, count)
    assert program.recorder.orders == 3


def test_an_argument_that_stays_is_read_where_it_lies() -> None:
    program = Program(doubled)
    call = program.recorded()
    x = ones()
    for _ in range(4):
        x.add_(1)  # as an optimizer does
        assert torch.equal(call([x])[0], x * 2)

    (size,) = call.sizes
    assert size.recording.buffers == ()


def test_an_argument_that_lies_elsewhere_is_copied() -> None:
    program = Program(doubled)
    call = program.recorded()
    given = [ones() * number for number in range(5)]

    for x in given:
        assert torch.equal(call([x])[0], x * 2)
    assert program.pool.recorded == 1


def test_an_argument_that_moves_later_is_copied_from_then_on() -> None:
    program = Program(lambda x, w: [x + w])
    call = program.recorded()
    weight, given = ones(), [ones() * number for number in range(4)]
    for x in (given[0], given[0], *given):
        assert torch.equal(call([x, weight])[0], x + weight)

    assert program.pool.recorded == 2
    (size,) = call.sizes
    assert size.recording.in_place == (1,)


def test_arguments_that_move_one_after_the_other_are_given_up() -> None:
    program = Program(lambda *given: [sum(given)])
    call = program.recorded()
    given = [ones() for _ in range(MOST_AGAIN + 2)]
    call(list(given))
    call(list(given))
    moved = []
    for place in range(MOST_AGAIN):
        moved.append(given[place])
        given[place] = ones() * 2
        assert torch.equal(call(list(given))[0], sum(given))

    assert program.pool.recorded == MOST_AGAIN
    assert program.pool.notes == [
        "forward: calls are not recorded any more: arguments lie elsewhere again and again"
    ]
    before = program.runs
    assert torch.equal(call(list(given))[0], sum(given))
    assert program.runs == before + 1


def test_results_are_the_callers_own() -> None:
    program = Program(doubled)
    call = program.recorded()
    found = [call([ones() * number])[0] for number in range(5)]

    for number, result in enumerate(found):
        assert torch.equal(result, ones() * 2 * number)
    assert len({result.data_ptr() for result in found}) == 5


def test_each_size_has_its_own_recording() -> None:
    program = Program(lambda n, x: [x * n])
    call = program.recorded(shaped=(0, 1))
    for _ in range(3):
        for length in (2, 3):
            x = torch.arange(float(length))
            assert torch.equal(call([length, x])[0], x * length)

    assert program.pool.recorded == 2
    assert program.recorder.pools == 1


def test_a_number_of_another_kind_is_another_size() -> None:
    program = Program(lambda n, x: [x * n, type(n)])
    call = program.recorded(shaped=(0,))
    for number in (1, 1, 1.0, 1.0, True):
        assert call([number, ones()])[1] is type(number)


def test_what_is_not_recorded_is_said_once_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(cuda_graphs.log, "debug", lambda text, *given: said.append(text % given))
    unsafe = Program(doubled).recorded(reason="it waits")
    call = Program(lambda *given: [sum(given)]).recorded()
    given = [ones() for _ in range(MOST_AGAIN)]
    for place in range(-2, MOST_AGAIN):
        unsafe([ones()])
        given[place] = given[place] if place < 0 else ones() * 2
        call(list(given))

    assert said == [
        "forward: calls are not recorded: it waits",
        *(f"forward: arguments [{n}] lie elsewhere" for n in range(MOST_AGAIN)),
        "forward: calls are not recorded any more: arguments lie elsewhere again and again",
    ]


def test_sizes_beyond_the_limit_run_as_usual() -> None:
    program = Program(doubled)
    call = program.recorded(shaped=(0,))
    for _ in range(3):
        for length in range(1, MOST_SIZES + 3):
            x = ones(length)
            assert torch.equal(call([x])[0], x * 2)

    assert program.pool.recorded == MOST_SIZES
    assert program.pool.notes == [
        f"forward: only calls of the first {MOST_SIZES} sizes are recorded"
    ]


def test_an_argument_that_is_written_to_is_written_to_at_the_callers() -> None:
    program = Program(lambda x, state: [])

    def write(x: Tensor, state: Tensor) -> list[Tensor]:
        if program.recorder.is_live:
            state.add_(x)
        return [state * 2]

    program.function = write
    call = program.recorded(written=(1,))
    kept, fresh = ones(), [ones() for _ in range(4)]
    for number in range(4):
        call([ones() * number, kept])
        assert torch.equal(call([ones(), fresh[number]])[0], ones() * 4)
        assert torch.equal(fresh[number], ones() * 2)

    assert torch.equal(kept, ones() * (1 + 0 + 1 + 2 + 3))


def test_results_that_are_arguments_are_those_of_the_call() -> None:
    program = Program(lambda x, w: [x, x[1:], w, w.view(2, 2), x + w])
    call = program.recorded()
    w = ones()
    for number in range(4):
        x = ones() * number
        results = call([x, w])
        assert results[0] is x
        assert results[2] is w
        assert results[1].data_ptr() == x[1:].data_ptr()
        assert (results[3].data_ptr(), results[3].shape) == (w.data_ptr(), (2, 2))
        assert torch.equal(results[4], x + w)


def test_numbers_and_equal_results_stay_what_they_are() -> None:
    def program(x: Tensor) -> list[Any]:
        y = x * 2
        return [3, None, y, y]

    call = Program(program).recorded()
    for _ in range(3):
        three, nothing, first, second = call([ones()])
        assert (three, nothing) == (3, None)
        assert first is second


@pytest.mark.parametrize(
    "laid",
    [
        lambda x: x.expand(3, 4),
        lambda x: torch.stack([x, x])[:, :3],
        lambda x: torch.stack([x, x]).t(),
        lambda x: x[::2],
        lambda x: x[:0],
    ],
)
def test_layouts_are_kept(laid: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor) -> list[Tensor]:
        room = (x * 2).contiguous()
        return [laid(room.flatten()[:4]) if room.numel() >= 4 else room, room.sum()]

    counted = Program(program)
    call = counted.recorded()
    for number in range(4):
        x = laid(torch.arange(4.0) + number)
        expected = program(x)
        found = call([x])
        assert torch.equal(found[0], expected[0])
        assert found[0].stride() == expected[0].stride()
        assert torch.equal(found[1], expected[1])
    assert counted.pool.replayed == 3


def test_gaps_that_lie_otherwise_run_as_usual() -> None:
    program = Program(doubled)
    call = program.recorded()
    wide, wider = torch.rand(3, 6), torch.rand(3, 9)
    for x in (wide[:, :2], wide.clone()[:, :2], wider[:, :2], wide.clone()[:, :2]):
        assert torch.equal(call([x])[0], x * 2)

    assert program.pool.replayed == 2


def test_inference_mode_comes_and_goes() -> None:
    call = Program(doubled).recorded()
    for mode in (True, True, False, True, False):
        with torch.inference_mode(mode):
            x = ones()
            (result,) = call([x])
        assert result.is_inference() == mode
        assert torch.equal(result, ones() * 2)


# --- what is not recorded ---


def test_a_graph_that_cannot_be_recorded_says_why() -> None:
    program = Program(doubled)
    call = program.recorded(reason="it runs on the CPU")
    for _ in range(3):
        call([ones()])

    assert program.runs == 3
    assert program.pool.notes == ["forward: calls are not recorded: it runs on the CPU"]


def test_an_argument_on_another_device_is_a_reason() -> None:
    program = Program(lambda x, y: [x * 2])
    call = program.recorded()
    for _ in range(3):
        call([ones(), torch.empty(2, device="meta")])

    assert program.pool.recorded == 0
    assert "an argument lies on meta" in program.pool.notes[0]


def test_a_result_on_another_device_is_a_reason() -> None:
    program = Program(lambda x: [torch.empty(2, device="meta")])
    call = program.recorded()
    for _ in range(3):
        call([ones()])

    assert "a result lies on meta" in program.pool.notes[0]


def test_a_recording_that_fails_leaves_the_call_as_it_was() -> None:
    program = Program(doubled, Again(fails="operation not permitted when stream is capturing"))
    call = program.recorded()
    for number in range(3):
        assert torch.equal(call([ones() * number])[0], ones() * 2 * number)

    assert program.runs == 3
    assert program.pool.notes == [
        "forward: calls are not recorded any more: operation not permitted when stream is capturing"
    ]


def test_within_a_recording_of_somebody_elses_calls_run_as_usual() -> None:
    program = Program(doubled)
    call = program.recorded()
    call([ones()])
    program.recorder.busy = True
    call([ones()])

    assert (program.runs, program.pool.recorded) == (2, 0)


# --- with a backward ---


@pytest.fixture(autouse=True)
def _ends_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward pass is running that could say whether its graph is kept: it is not."""
    monkeypatch.setattr(cuda_graphs, "keeps_graph", lambda: False)


@dataclass
class Step:
    """A forward that keeps two values, and its backward, in one pool."""

    recorder: Again = field(default_factory=Again)
    overwrites: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.ahead = Program(lambda x, w: [(x * w).sum(), x * 2, w * 3], self.recorder)
        self.back = Program(self._back, self.recorder)
        self.pool = Pool(self.recorder)
        self.forward = self.ahead.recorded(self.pool, kept=(1, 2))
        self.backward = self.back.recorded(
            self.pool, "backward", saved=(0, 1), overwrites=self.overwrites
        )

    def _back(self, double: Tensor, triple: Tensor, tangent: Tensor) -> list[Tensor]:
        grad = double * tangent + triple
        if self.overwrites and self.recorder.is_live:
            double.fill_(-1)
        return [grad]

    def check(self, x: Tensor, w: Tensor, **options: Any) -> None:
        _, *kept = self.forward([x, w])
        self.finish(kept, x, w)

    def finish(self, kept: list[Tensor], x: Tensor, w: Tensor) -> None:
        """The backward, which alone has what was kept."""
        arguments = [*kept, ones()]
        kept.clear()
        (grad,) = self.backward(arguments)
        assert torch.equal(grad, x * 2 + w * 3)


def test_a_step_is_replayed_forward_and_backward() -> None:
    step, w = Step(), ones()
    for number in range(6):
        step.check(ones() * number, w)

    assert step.pool.recorded == 2
    assert step.recorder.pools == 1
    assert (step.ahead.pool.notes, step.back.pool.notes) == ([], [])


def test_what_is_kept_stays_in_its_memory() -> None:
    step, w = Step(), ones()
    addresses = set()
    for number in range(5):
        _, *kept = step.forward([ones() * number, w])
        addresses |= {value.data_ptr() for value in kept} if number else set()
        step.finish(kept, ones() * number, w)

    assert len(addresses) == 2


HOLDERS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "itself": lambda value: value,
    "a list": lambda value: [value],
    "a view": lambda value: value[1:],
    "a detached one": lambda value: value.detach(),
    "its storage": lambda value: value.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_is_not_stored_over(holder: str) -> None:
    step, w = Step(), ones()
    for number in range(3):
        step.check(ones() * number, w)
    _, *kept = step.forward([ones() * 5, w])
    held = HOLDERS[holder](kept[0])
    del kept
    assert step.pool.pending() is not None
    before = step.ahead.runs
    _, *others = step.forward([ones() * 7, w])

    assert step.ahead.runs == before + 1
    step.finish(others, ones() * 7, w)
    if isinstance(held, Tensor):
        assert torch.equal(held, torch.full_like(held, 10))
    del held
    assert step.pool.pending() is None
    step.check(ones() * 8, w)
    assert step.pool.notes == [
        "forward: calls run as usual while the backward of an earlier one is to come"
    ]


def test_what_autograd_has_saved_is_not_stored_over() -> None:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.saved_tensors[0], None

    step, w = Step(), ones()
    for number in range(3):
        step.check(ones() * number, w)
    x = ones().requires_grad_()
    out = Kept.apply(x, step.forward([ones() * 5, w])[1])
    assert step.pool.pending() is not None
    out.sum().backward()

    assert torch.equal(x.grad, ones() * 10)
    del out
    assert step.pool.pending() is None


def test_two_forwards_before_their_backwards() -> None:
    step, w = Step(), ones()
    for _ in range(3):
        step.check(ones(), w)
    for number in range(4):
        first, second = ones() * number, ones() * (number + 10)
        _, *kept = step.forward([first, w])
        _, *others = step.forward([second, w])
        step.finish(others, second, w)
        step.finish(kept, first, w)


def test_a_forward_without_a_backward() -> None:
    step, w = Step(), ones()
    for number in range(6):
        loss, *_ = step.forward([ones() * number, w])
        assert loss == 4 * number
    step.check(ones(), w)


def test_a_backward_of_a_plain_forward_runs_as_usual() -> None:
    step, w = Step(), ones()
    for _ in range(4):
        step.check(ones(), w)
    before = step.back.runs
    replayed = step.pool.replayed
    step.finish([ones() * 2, w * 3], ones(), w)

    assert step.back.runs == before + 1
    assert step.pool.replayed == replayed


def test_a_backward_is_recorded_again_with_its_forward() -> None:
    step, w = Step(), ones()
    for number in range(5):
        step.check(ones() * number, w)
    assert step.pool.recorded == 2
    other = ones() * 4
    for number in range(4):
        step.check(ones() * number, other)

    assert step.pool.recorded == 4
    (size,) = step.backward.sizes
    assert {0, 1} <= {*size.recording.in_place}


def test_a_backward_without_sizes_is_recorded_for_each_size_of_its_forward() -> None:
    recorder = Again()
    ahead = Program(lambda x: [x.sum(), x.sum(0) * 2], recorder)
    back = Program(lambda kept, tangent: [kept * tangent], recorder)
    forward = ahead.recorded(shaped=(0,), kept=(1,))
    backward = back.recorded(ahead.pool, "backward", saved=(0,))
    for number in range(4 * MOST_AGAIN):
        x = ones((3, 5)[number % 2], 4)
        _, kept = forward([x])
        arguments = [kept, ones()]
        del kept
        assert torch.equal(backward(arguments)[0], x.sum(0) * 2)

    assert ahead.pool.recorded == 4
    assert ahead.pool.notes == []


def test_other_graphs_of_the_pool_wait_for_the_backward() -> None:
    step, w = Step(), ones()
    other = Program(doubled, step.recorder)
    call = other.recorded(step.pool, "other")
    for number in range(3):
        step.check(ones() * number, w)
        call([ones()])
    _, *kept = step.forward([ones() * 3, w])
    before = other.runs
    call([ones()])

    assert other.runs == before + 1
    step.finish(kept, ones() * 3, w)


def test_values_are_stored_over_where_nobody_needs_them() -> None:
    step, w = Step(overwrites=(0,)), ones()
    for number in range(5):
        step.check(ones() * number, w)

    assert step.pool.recorded == 2


def test_a_graph_that_is_kept_is_given_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    step, w = Step(overwrites=(0,)), ones()
    for number in range(4):
        step.check(ones() * number, w)
    _, *kept = step.forward([ones() * 6, w])
    monkeypatch.setattr(cuda_graphs, "keeps_graph", lambda: True)
    for _ in range(2):
        step.finish(list(kept), ones() * 6, w)
    monkeypatch.setattr(cuda_graphs, "keeps_graph", lambda: False)
    step.finish(kept, ones() * 6, w)


@pytest.mark.parametrize("replays", [False, True])
def test_a_value_that_somebody_holds_is_copied(replays: bool) -> None:
    step, w = Step(overwrites=(0,)), ones()
    for number in range(4 if replays else 0):
        step.check(ones() * number, w)
    _, *kept = step.forward([ones() * 6, w])
    held = kept[0]
    step.finish(kept, ones() * 6, w)

    assert torch.equal(held, ones() * 12)


def test_something_that_holds_results_from_the_start_is_a_reason() -> None:
    stolen: list[Tensor] = []

    def program(x: Tensor) -> list[Tensor]:
        stolen[:] = [x * 2]
        return [x.sum(), *stolen]

    counted = Program(program)
    call = counted.recorded(kept=(1,))
    for number in range(3):
        assert torch.equal(call([ones() * number])[1], ones() * 2 * number)

    assert "somebody else holds" in counted.pool.notes[0]


def test_a_value_that_is_returned_and_kept_is_both() -> None:
    def program(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [y, y, y[1:]]

    counted = Program(program)
    call = counted.recorded(kept=(1, 2))
    for number in range(4):
        value, same, part = call([ones() * number])
        assert torch.equal(value, ones() * 2 * number)
        assert torch.equal(same, value)
        assert torch.equal(part, value[1:])
        if number:
            assert value.data_ptr() != same.data_ptr()
        del value, same, part
    assert counted.pool.replayed == 3


def test_a_view_of_an_argument_can_be_kept() -> None:
    counted = Program(lambda x, w: [x + w, x[1:], w[1:]])
    call = counted.recorded(kept=(1, 2))
    w = ones()
    for number in range(4):
        x = ones() * number
        total, part, weight = call([x, w])
        assert torch.equal(total, x + w)
        assert torch.equal(part, x[1:])
        assert weight.data_ptr() == w[1:].data_ptr()
        del part, weight
    assert counted.pool.replayed == 3
