"""What follows from a row that was measured; a row survives its file."""

from pathlib import Path

import pytest

from benchmarks.record import EAGER, INDUCTOR, STATOR, Outcome, Row, load, store
from benchmarks.work import PRODUCT_FLOPS


def outcome(*times: float) -> Outcome:
    return Outcome(times=times, first_call=2.0, backend=1.0, graphs=1)


def row(*, stator: float = 1.0, inductor: float = 1.0, flops: int = 0) -> Row:
    """Two rounds, the second twice as slow for all; a copy of all bytes takes half a second."""
    return Row(
        "softmax",
        "micro",
        "a machine",
        "2024-05-06",
        outcomes={
            EAGER: outcome(2.0, 4.0),
            STATOR: outcome(stator, 2 * stator),
            INDUCTOR: outcome(inductor, 2 * inductor),
        },
        moved=800,
        flops=flops,
        copies=(0.5, 1.0),
        products=(0.25, 0.5) if flops else (),
        foreign=0.01,
    )


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "row.json"
    store(row(), file)

    assert load(file) == row()


def test_speed_is_over_another_contender() -> None:
    speed = row(stator=0.5).speed(STATOR, EAGER)

    assert speed is not None
    assert speed.median == pytest.approx(4.0)


def test_there_is_no_speed_of_one_that_failed() -> None:
    failed = Row("a", "micro", "", "", outcomes={EAGER: outcome(1.0), STATOR: Outcome(error="x")})

    assert failed.speed(STATOR, EAGER) is None
    assert failed.milliseconds(STATOR) is None
    assert failed.over_limit(STATOR) is None
    assert failed.ahead_of_stator() == []


def test_the_limit_is_what_a_copy_takes() -> None:
    assert row().limits() == [0.5, 1.0]
    assert row(stator=1.0).over_limit(STATOR) == pytest.approx(2.0)
    assert row().copy_rate() == pytest.approx(800 / 0.75)


def test_the_limit_is_what_products_take_if_that_is_longer() -> None:
    assert row(flops=4 * PRODUCT_FLOPS).limits() == [1.0, 2.0]
    assert row(flops=PRODUCT_FLOPS).limits() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("stator", "inductor", "ahead"),
    [(1.0, 2.0, []), (1.0, 0.5, [INDUCTOR]), (3.0, 1.0, [EAGER, INDUCTOR]), (1.0, 0.99, [])],
)
def test_those_ahead_are_named_but_a_tie_is_none(
    stator: float, inductor: float, ahead: list[str]
) -> None:
    assert row(stator=stator, inductor=inductor).ahead_of_stator() == ahead
