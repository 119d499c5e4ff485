"""What passes for eager's result, and what does not."""

import math

import torch

from benchmarks.closeness import TOLERANCE, dropout_error, relative_error


def test_a_rounding_is_close_and_a_sign_is_not() -> None:
    expected = torch.randn(100)

    assert relative_error(expected, expected * (1 + 1e-6)) < TOLERANCE
    assert relative_error(expected, -expected) > 1


def test_results_of_another_shape_or_number_are_infinitely_far() -> None:
    x = torch.ones(4)

    assert relative_error(x, x[None]) == math.inf
    assert relative_error([x, x], [x]) == math.inf
    assert relative_error([x, None], [x, x]) == math.inf
    assert relative_error(x, x.double()) == math.inf


def test_nan_is_infinitely_far() -> None:
    assert relative_error(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf


def test_a_gradient_of_rounding_errors_is_measured_against_its_neighbours() -> None:
    large, rounding = torch.ones(100), torch.full((100,), 1e-9)

    assert relative_error([large, rounding], [large, -rounding]) < TOLERANCE


def test_zeros_are_close_to_zeros_alone() -> None:
    zeros = torch.zeros(3, dtype=torch.bool)

    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros, ~zeros) == 1


def test_dropout_may_drop_others_but_not_more() -> None:
    x = torch.arange(1.0, 9.0)
    first, second = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).repeat(1, 2)

    assert dropout_error(x * first, x * second) == 0
    assert dropout_error(x * first, x * first * second) > 0.1
    assert dropout_error(x * first, 2 * x * second) > 0.1
