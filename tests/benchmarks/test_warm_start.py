"""Starts are told in their parts, cold and warm, beside the peer's."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import warm_start
from benchmarks.case import Task
from benchmarks.record import INDUCTOR, STATOR
from benchmarks.warm_start import (
    MODELS,
    Row,
    Start,
    from_text,
    in_a_process,
    measure,
    report,
    start,
)
from tests.benchmarks.test_report import cells

COLD = Start(importing=0.1, dynamo=2.0, backend=1.5, first_run=0.2, process=9.0, graphs=1)
WARM = replace(COLD, backend=0.08, importing=0.05, first_run=0.1, process=5.0, cache="hit")

# In place of a start: a process that writes down how it was started.
TELLS = """
import json, os, sys
model, name, file, *options = sys.argv[1:]
folder = os.environ.get("STATOR_CACHE_DIR") or os.environ["TORCHINDUCTOR_CACHE_DIR"]
settings = os.environ.get("STATOR_CACHE")
told = f"{model} {name} {' '.join(options)} {os.path.exists(folder)} {settings}"
os.makedirs(folder, exist_ok=True)
open(file, "w").write(json.dumps({"cache": told}))
"""


def rows() -> list[Row]:
    peer = replace(WARM, backend=2.0, importing=1.0)
    return [
        Row("BERT-base", STATOR, COLD, (WARM, replace(WARM, backend=0.12))),
        Row("BERT-base", INDUCTOR, replace(COLD, backend=20.0), (peer, peer)),
    ]


def lines_of(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith("|")][2:]


def test_a_training_step_starts_in_parts() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    task = Task(lambda x: (x @ weight).relu().sum(), (x,), (weight,))

    found = start(STATOR, task)

    assert found.error is None
    assert found.graphs == 1
    assert found.backend > found.importing
    assert found.dynamo > 0
    assert from_text(json.dumps(asdict(found))) == found


def test_a_start_that_computes_something_else_is_an_error() -> None:
    wrong = Task(lambda x: x + 1, (torch.ones(4),), error=lambda expected, actual: 0.5)

    assert start(STATOR, wrong).error == "wrong by 5.0e-01 of eager's result"


def test_a_line_has_the_cold_parts_then_the_warm_ones() -> None:
    assert lines_of(report(rows(), 0.01)) == [
        [
            *("BERT-base", "stator"),
            *("2000", "1500", "200"),
            *("2000 (2000–2000)", "100 (90–110)", "100 (100–100)"),
            *("50 (50–50)", "0.050 (0.045–0.055)", "5000 (5000–5000)"),
        ],
        [
            *("BERT-base", "Inductor"),
            *("2000", "20000", "200"),
            *("2000 (2000–2000)", "2000 (2000–2000)", "100 (100–100)"),
            *("1000 (1000–1000)", "–", "5000 (5000–5000)"),
        ],
    ]


def test_what_went_wrong_is_told() -> None:
    ours, peer = rows()
    failed = replace(peer, cold=Start(error="CppCompileError: no"))
    missed = replace(ours, warm=(WARM, replace(WARM, cache="miss")))

    text = report([missed, failed], None)

    assert [len(line) for line in lines_of(text)] == [11, 11]
    assert "| BERT-base | Inductor | error |" in text
    assert "- BERT-base, Inductor: CppCompileError: no" in text
    assert "- BERT-base, stator: a warm start found no program, cache: miss" in text
    assert "Warm starts: 2; others used – of the cores" in text


def test_the_first_process_finds_no_cache_and_the_others_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "ONE_START", TELLS)
    for name in ("STATOR_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    ours, peer = measure("BERT-base", [STATOR, INDUCTOR], warm=2, tiny=True)

    assert ours.cold.cache == "BERT-base stator --tiny False None"
    assert peer.cold.cache == "BERT-base inductor --tiny False None"
    assert {one.cache for one in ours.warm} == {"BERT-base stator --tiny True None"}
    assert {one.cache for one in peer.warm} == {"BERT-base inductor --tiny True None"}
    assert min(one.process for one in (ours.cold, *peer.warm)) > 0


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(warm_start, "ONE_START", "raise SystemExit('no model')")

    assert in_a_process("ResNet-50", STATOR, tmp_path, tiny=True).error == "no model"


def test_the_models_are_those_of_the_tables() -> None:
    assert set(MODELS.values()) == {("infer", "bert"), ("train", "gpt2"), ("infer", "resnet50")}
