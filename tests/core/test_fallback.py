"""A failure inside of the compiler: told once, or raised."""

from __future__ import annotations

import warnings

import pytest

from stator.core.events import Compilation
from stator.core.fallback import explained, note_fallback
from stator.errors import CompileError, OptionError, StatorError, StatorWarning, Unsupported


def running(stage: str) -> Compilation:
    """The record of a compilation in the middle of `stage`."""
    return Compilation(running=stage)


class LinedError(RuntimeError):
    """An error that a stage has put the user's line on."""

    user_line = "model.py:12"


# explained


@pytest.mark.parametrize(
    "error",
    [StatorError("no"), OptionError("no"), CompileError("plan", "no"), Unsupported("trace", "no")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_ours_is_explained_already(error: StatorError) -> None:
    assert explained(error, running("partition")) is error


def test_another_error_gets_the_running_stage_and_says_what_it_was() -> None:
    found = explained(KeyError("sin"), running("partition"))

    assert isinstance(found, CompileError)
    assert found.stage == "partition"
    assert found.what == "partition: KeyError: 'sin'"
    assert found.where is None
    assert "Options.strict" in (found.hint or "")


def test_the_user_s_line_is_where_it_happened() -> None:
    found = explained(LinedError("sizes differ"), running("trace"))

    assert found.where == "model.py:12"
    assert "at: model.py:12" in str(found)


# note_fallback


def test_a_fallback_warns_once_with_stage_and_reason() -> None:
    with pytest.warns(StatorWarning) as caught:
        note_fallback(KeyError("sin"), running("partition"), strict=False)

    (warning,) = caught
    message = str(warning.message)
    assert "'partition'" in message
    assert "KeyError: 'sin'" in message
    assert "Options.strict" in message


def test_the_reason_stays_in_the_record() -> None:
    record = running("trace")

    with pytest.warns(StatorWarning):
        note_fallback(LinedError("sizes differ"), record, strict=False)

    assert record.fallback is not None
    assert "sizes differ" in record.fallback
    assert "model.py:12" in record.fallback


def test_an_error_that_knows_its_stage_names_that_one() -> None:
    error = Unsupported("trace", "the program resizes the storage of an input")

    with pytest.warns(StatorWarning, match="stage 'trace' failed"):
        note_fallback(error, running("executor"), strict=False)


def test_an_error_of_ours_without_a_stage_names_the_running_one() -> None:
    with pytest.warns(StatorWarning, match="stage 'executor' failed with no room"):
        note_fallback(StatorError("no room"), running("executor"), strict=False)


def test_strict_raises_the_explanation_with_its_cause_and_warns_of_nothing() -> None:
    cause, record = KeyError("sin"), running("partition")

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with pytest.raises(CompileError) as caught:
            note_fallback(cause, record, strict=True)

    assert caught.value.stage == "partition"
    assert caught.value.__cause__ is cause
    assert heard == []
    assert record.fallback is None
