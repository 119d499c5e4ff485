"""Quartiles, and ratios taken round by round."""

from benchmarks.spread import Spread


def test_a_spread_is_written_with_its_quartiles() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])

    assert str(spread) == "3.0 (2.0–4.0)"
    assert f"{spread:.2f}" == "3.00 (2.00–4.00)"


def test_a_single_value_has_no_spread() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_ratios_are_taken_within_a_round() -> None:
    # The second round was slow for both: the ratio does not notice.
    spread = Spread.of_ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])

    assert spread == Spread(2.0, 2.0, 2.0)
