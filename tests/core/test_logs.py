"""Loggers by subject: silent, until asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stator.core.logs import logger, turn_on
from stator.errors import OptionError
from stator.options import LOGS, read_options


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    logging.getLogger("stator").handlers.clear()
    for subject in LOGS:
        logger(subject).setLevel(logging.NOTSET)


def step(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.softmax(x @ weight, -1)
    return y.sum(0) * (y @ weight).sum(1)


def compiled_with(logs: tuple[str, ...]) -> None:
    x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    compiled = torch.compile(step, backend="stator", options={"logs": logs} if logs else None)
    compiled(x, weight).sum().backward()


def test_nothing_is_written_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_with(())

    assert "[stator." not in capsys.readouterr().err


def test_each_subject_writes_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_with(LOGS)

    written = capsys.readouterr().err
    for part in (
        "[stator.stages] compilation",
        "[stator.passes] joint/drop_noops: ",
        "[stator.partition] saved: ",
        "[stator.fusion] forward: not fused: ",
        "[stator.calls] forward: mm stays with torch: no rule",
        "[stator.kernels] forward: kernel_",
        "[stator.memory] forward: ",
        "[stator.cache] compilation",
    ):
        assert part in written, part


def test_subjects_that_were_not_named_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_with(("memory",))

    heads = {line.split("]")[0] for line in capsys.readouterr().err.splitlines()}
    assert {head for head in heads if head.startswith("[stator")} == {"[stator.memory"}


def test_the_environment_names_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATOR_LOGS", "fusion, passes")

    assert read_options().logs == ("fusion", "passes")


def test_an_unknown_subject_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STATOR_LOGS", "fusoin")

    with pytest.raises(OptionError) as caught:
        read_options()
    assert "fusoin" in str(caught.value)
    for subject in LOGS:
        assert subject in str(caught.value)


def test_a_program_that_has_handlers_keeps_its_own() -> None:
    seen: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    root = logging.getLogger("stator")
    root.addHandler(Kept())
    turn_on(("cache",))
    turn_on(("cache",))
    logger("cache").debug("a word")

    assert len(root.handlers) == 1
    assert seen == ["a word"]
