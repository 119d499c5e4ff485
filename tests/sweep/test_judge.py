"""The judge finds every fault of a backend, and none where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.sweep.cases import BACKWARD, FORWARD, Unit, samples, spread
from tests.sweep.judge import BOTH_FAIL, EXCEPTION, PASS, Judge, Outcome, differences
from tests.sweep.observe import Case, Observation


def _judge(backend: str, unit: Unit, limit: float = 60.0) -> Outcome:
    index, sample = samples(unit, 1).chosen[0]
    broken = f"tests.sweep.broken_backends:{backend}"
    return Judge(broken, limit=limit)(Case.of(unit, index, sample))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("op", ["exp", "nn.functional.dropout", "sort", "view_as_complex"])
def test_a_backend_without_fault_passes(op: str, direction: str) -> None:
    outcome = _judge("runs_eagerly", Unit(op, "float32", direction))

    assert (outcome.verdict, outcome.differences) == (PASS, {})
    assert outcome.graphs > 0


@pytest.mark.parametrize(
    ("backend", "unit", "aspect"),
    [
        ("loses_accuracy", Unit("exp", "float32", FORWARD), "outputs: values"),
        ("loses_accuracy", Unit("exp", "complex64", FORWARD), "outputs: values"),
        ("loses_accuracy", Unit("exp", "float64", FORWARD), "outputs: values"),
        ("loses_accuracy", Unit("exp", "float32", BACKWARD), "gradients: values"),
        ("loses_accuracy", Unit("nn.functional.dropout", "float32", FORWARD), "outputs: values"),
        ("loses_accuracy", Unit("argmax", "float32", FORWARD), "outputs: dtype"),
        ("loses_strides", Unit("expand", "float32", FORWARD), "outputs: strides"),
        ("loses_strides", Unit("expand", "float32", FORWARD), "sharing"),
        ("loses_gradients", Unit("exp", "float32", BACKWARD), "raises"),
        ("loses_mutations", Unit("exp", "float32", FORWARD, in_place=True), "inputs: values"),
        ("loses_mutations", Unit("exp", "float32", FORWARD, in_place=True), "mutated"),
        ("draws_twice", Unit("exp", "float32", FORWARD), "random state"),
        ("refuses", Unit("exp", "float32", FORWARD), "raises"),
    ],
)
def test_a_fault_is_an_exception(backend: str, unit: Unit, aspect: str) -> None:
    outcome = _judge(backend, unit)

    assert outcome.verdict == EXCEPTION
    assert aspect in outcome.differences


def test_a_backend_that_hangs_is_stopped() -> None:
    outcome = _judge("hangs", Unit("exp", "float32", FORWARD), limit=0.5)

    assert outcome.verdict == EXCEPTION
    assert "OutOfTimeError" in outcome.differences["raises"]


def test_what_fails_with_the_peer_too_is_no_exception() -> None:
    unit = Unit("exp", "float32", FORWARD)
    index, sample = samples(unit, 1).chosen[0]
    faults = "tests.sweep.broken_backends"

    judge = Judge(f"{faults}:loses_accuracy", peer=f"{faults}:loses_accuracy")
    assert judge(Case.of(unit, index, sample)).verdict == BOTH_FAIL
    judge = Judge(f"{faults}:loses_accuracy", peer=f"{faults}:draws_twice")
    assert judge(Case.of(unit, index, sample)).verdict == EXCEPTION


@pytest.mark.parametrize(("ours", "is_same"), [(-1e-6, True), (0.06, False), (0.125, True)])
def test_where_eager_is_rounding_noise_the_exact_result_passes(ours: float, is_same: bool) -> None:
    unit = Unit("exp", "float32", FORWARD)
    index, sample = samples(unit, 1).chosen[0]
    eager, actual, wide = (
        Observation(outputs=(torch.tensor([value], dtype=dtype),))
        for value, dtype in ((0.125, torch.float32), (ours, torch.float32), (0.0, torch.float64))
    )

    found = differences(Case.of(unit, index, sample), eager, actual, lambda: wide)

    assert ("outputs: values" not in found) == is_same


def _cholesky_of(matrix: torch.Tensor) -> Case:
    unit = Unit("linalg.cholesky", "float32", FORWARD)
    index, sample = samples(unit, 1).chosen[0]
    sample.input = matrix
    return Case.of(unit, index, sample)


def test_an_error_of_eager_must_be_raised_alike() -> None:
    not_positive, not_square = _cholesky_of(-torch.eye(3)), _cholesky_of(torch.ones(2, 3))

    # Not aot_eager: that of torch 2.11 does not look whether a factorization came about.
    assert Judge("stator")(not_positive).verdict == PASS
    assert Judge("aot_eager")(not_square).verdict == PASS
    refused = Judge("tests.sweep.broken_backends:refuses", peer="stator")(not_positive)
    assert refused.verdict == EXCEPTION
    assert "NotImplementedError" in refused.differences["raises"]


def test_samples_are_spread_over_the_list() -> None:
    assert spread(3, 4) == [0, 1, 2]
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(10, 1) == [0]
    assert spread(0, 4) == []


def test_sparse_inputs_are_judged() -> None:
    outcome = _judge("runs_eagerly", Unit("sparse.sampled_addmm", "float32", BACKWARD))

    assert (outcome.verdict, outcome.differences) == (PASS, {})
