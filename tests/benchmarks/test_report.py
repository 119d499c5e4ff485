"""Tables show ratios first, mark what is behind, and say what went wrong."""

from dataclasses import replace

from benchmarks.record import EAGER, INDUCTOR, STATOR, Outcome, Row
from benchmarks.report import geometric_mean, section, table, without_folders
from tests.benchmarks.test_record import row


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def broken() -> Row:
    whole = row()
    outcomes = {**whole.outcomes, STATOR: Outcome(error="CompileError: no rule")}
    return replace(whole, name="rotary", outcomes=outcomes)


def test_a_line_has_ratios_then_who_is_ahead_then_times() -> None:
    _, _, line, _ = table([row(stator=2.0, inductor=1.0)], "kernel").splitlines()

    assert cells(line) == [
        "softmax",
        "1.00 (1.00–1.00)",
        "2.00 (2.00–2.00)",
        "**Inductor**",
        *("3000.00", "3000.00", "1500.00"),
        *("4.0", "2.0"),
        *("1.00", "1.00"),
        *("2.00", "2.00"),
        "0 / 0 / 0",
        "1%",
    ]


def test_means_are_over_rows_that_all_finished() -> None:
    lines = table([row(stator=1.0), row(stator=0.25), broken()], "kernel").splitlines()

    assert cells(lines[-1])[:4] == ["**geometric mean** of 2", "4.00", "2.00", "0 rows"]
    assert cells(lines[-2])[:3] == ["rotary", "error", "2.00 (2.00–2.00)"]


def test_a_mean_of_nothing_is_nothing() -> None:
    assert geometric_mean([None]) is None
    assert geometric_mean([None, 2.0, 8.0]) == 4.0


def test_errors_are_told_below_the_table() -> None:
    text = section([row(), broken(), Row("gone", "micro", "", "", error="SIGSEGV")], "micro")

    assert "- rotary, stator: CompileError: no rule" in text
    assert "- gone: not measured: SIGSEGV" in text
    assert "disturbed," not in text


def test_a_program_that_was_not_captured_is_told() -> None:
    whole = row()
    outcomes = {**whole.outcomes, STATOR: replace(whole.outcomes[STATOR], graphs=0)}

    assert "- softmax, stator: Dynamo captured nothing" in section(
        [replace(whole, outcomes=outcomes)], "micro"
    )


def test_a_disturbed_row_is_starred_and_told() -> None:
    text = section([replace(row(), foreign=0.2, recompiled=True)], "micro")

    assert "| softmax \\* |" in text
    assert "- softmax: disturbed, others used 20% of the cores" in text
    assert "- softmax: disturbed, a graph was compiled while calls were timed" in text


def test_without_a_peer_it_has_no_columns() -> None:
    alone = row()
    del alone.outcomes[INDUCTOR]

    text = section([alone], "micro")

    assert "Inductor" not in text
    assert EAGER in text


def test_folders_of_a_machine_stay_out() -> None:
    inside = "/".join(["", "home", "ann", "stator", "ir.py"])

    assert (
        without_folders(f"No rule ({inside}:3), 3/4 of aten/x")
        == "No rule (ir.py:3), 3/4 of aten/x"
    )
