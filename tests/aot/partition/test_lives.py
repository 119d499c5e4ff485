"""When what is in memory while a half runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from stator.aot.partition.lives import ARENA, POOL, Fact, Lives, Span

SIZE = 1 << 20


def call(number: int, *reads: int, size: int = SIZE) -> Fact:
    """A library's, which writes where it is told."""
    return Fact(number, number, reads, size, size, True, False, True, False, False)


def kernel(number: int, *reads: int, brief: bool = False, reduced: tuple[int, ...] = ()) -> Fact:
    """A kernel that may store over what it reads."""
    return Fact(number, number, reads, SIZE, SIZE, True, brief, False, True, False, list(reduced))


def lives(*facts: Fact) -> Lives:
    return Lives(facts, range(len(facts)), ())


def most(spans: list[Span], steps: int) -> int:
    """How many values there are at once."""
    changes = [0] * (steps + 2)
    for span in spans:
        changes[span.first] += 1
        changes[span.end] -= 1
    return max(accumulate(changes))


def test_a_kernel_stores_over_what_it_reads_last() -> None:
    found = lives(call(0), kernel(1, 0), call(2, 1))

    assert found.spans((), ()) == [
        Span(0, POOL, SIZE, 0, 1),
        Span(1, POOL, SIZE, 1, 3),
        Span(2, POOL, SIZE, 2, 3),
    ]


def test_what_outlives_the_half_is_not_stored_over() -> None:
    spans = lives(call(0), kernel(1, 0), call(2, 1)).spans((), [0])

    assert spans[0].end == 4


def test_what_a_kernel_reads_itself_is_nowhere() -> None:
    spans = lives(call(0), kernel(1, 0, brief=True), kernel(2, 1), call(3, 2)).spans((), ())

    assert [span.node for span in spans] == [0, 2, 3]
    assert spans[0].end == 2, "the second stores over it"


def test_an_activation_and_its_backward_store_over_both_that_they_read() -> None:
    found = lives(call(0), call(1), kernel(2, 0), kernel(3, 0, 1), call(4, 2), call(5, 3))

    spans = found.spans((), ())

    assert most(spans[:4], 6) == 2


def test_what_a_kernel_reads_again_is_stored_over_what_it_reads_last() -> None:
    facts = [call(0), kernel(1, 0, reduced=(2,)), kernel(2, 1), call(3, 2), call(4, 1)]

    spans = {span.node: span for span in lives(*facts).spans((), ())}

    assert (spans[0].first, spans[0].end) == (0, 1)
    assert spans[1].first == 1
    assert spans[2].first == 2, "its mean lies apart"


def test_what_a_kernel_reads_again_along_long_rows_is_in_memory() -> None:
    """As the gradient of what was pooled is, and a batch norm's in the place of what that reads."""
    pooled, grad = call(0, size=SIZE // 4), kernel(2, 0, reduced=(3,), brief=True)
    norm, image = kernel(3, 2, 1), call(1)
    facts = [pooled, image, grad, norm, call(4, 3)]

    assert 2 not in {span.node for span in lives(*facts).spans((), ())}

    facts[2] = replace(grad, far=[3])
    spans = {span.node: span for span in lives(*facts).spans((), ())}

    assert (spans[2].first, spans[2].end) == (2, 4)
    assert (spans[1].end, spans[3].first) == (3, 3)


def test_small_values_lie_in_the_arena() -> None:
    small = Fact(0, 0, (), 64, 64, False, False, False, True, False)

    (span,) = Lives([small, call(1, 0)], [0], ()).spans((), ())

    assert span.place == ARENA


def test_parts_of_a_result_are_there_with_the_whole() -> None:
    def part(number: int) -> Fact:
        return Fact(number, number, (), SIZE, SIZE, True, False, True, False, True, part_of=0)

    whole = Fact(0, 0, (), 0, 0, False, False, True, False, True)
    found = lives(whole, part(1), call(2, 1), part(3), call(4, 3)).spans((), ())

    assert [(span.node, span.first) for span in found if span.node in (1, 3)] == [(1, 0), (3, 0)]
