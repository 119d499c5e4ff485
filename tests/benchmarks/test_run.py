"""The command line names rows; who begins a round changes."""

from functools import partial
from itertools import groupby

import pytest
import typer

from benchmarks.row import SETTLING_ROUNDS, Budget, Series, interleave
from benchmarks.run import chosen


def test_rows_are_chosen_by_kind_and_name() -> None:
    assert [case.name for case in chosen("micro", "rmsnorm,softmax")] == ["softmax", "rmsnorm"]
    assert [case.kind for case in chosen("all", "bert")] == ["infer", "train"]


@pytest.mark.parametrize(("kind", "only"), [("tiny", ""), ("micro", "bert")])
def test_an_unknown_row_is_an_error(kind: str, only: str) -> None:
    with pytest.raises(typer.BadParameter):
        chosen(kind, only)


def test_who_begins_a_round_changes() -> None:
    called: list[str] = []
    series = [Series(partial(called.append, name)) for name in "abc"]

    interleave(series, Budget(rounds=3, seconds=60))

    turns = "".join(name for name, _ in groupby(called))  # a turn is several calls
    assert turns == "abc" * SETTLING_ROUNDS + "abcbcacab"
    assert all(len(one.seconds) == 3 for one in series)
