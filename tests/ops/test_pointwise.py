"""Every formula of the table against eager, on values that break formulas.

The primitives are evaluated by torch here: see test_pointwise_kernels.py for the machine code.  An
operator with an argument that the lists of pointwise_cases.py do not know fails, as does one that
no case reached.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import stator.ops  # noqa: F401  importing it fills the table
from stator.loops.prims import Prim
from stator.ops.table import POINTWISE, Pointwise
from tests.ops.evaluate import EVALUATE, lowered
from tests.ops.pointwise_cases import REFUSALS, Case, cases_of, require_as_good

aten = torch.ops.aten

# Operators whose formula takes floats, but not every argument that eager takes.
PARTIAL: Final = {
    aten.div.Tensor_mode: "integers by a tensor: eager raises on zero",
    aten.floor_divide.default: "integers by a tensor: eager raises on zero",
    aten.remainder.Tensor: "integers by a tensor: eager raises on zero",
    aten.remainder.Scalar_Tensor: "integers by a tensor: eager raises on zero",
    aten.fmod.Tensor: "integers by a tensor: eager raises on zero",
    aten.div.Scalar_mode: "integers by the number zero: eager raises",
    aten.floor_divide.Scalar: "integers by the number zero: eager raises",
    aten.remainder.Scalar: "integers by the number zero: eager raises",
    aten.fmod.Scalar: "integers by the number zero: eager raises",
    aten.pow.Tensor_Tensor: "integers to the power of a tensor",
    aten.pow.Tensor_Scalar: "integers to a negative power: eager raises",
    aten.pow.Scalar: "integers to the power of a tensor",
    aten.bitwise_left_shift.Tensor: "floats and bools: eager raises",
    aten.bitwise_left_shift.Tensor_Scalar: "floats and bools: eager raises",
    aten.bitwise_left_shift.Scalar_Tensor: "floats and bools: eager raises",
    aten.bitwise_right_shift.Tensor: "floats and bools: eager raises",
    aten.bitwise_right_shift.Tensor_Scalar: "floats and bools: eager raises",
    aten.bitwise_right_shift.Scalar_Tensor: "floats and bools: eager raises",
}

# Operators that compute where eager raises.
LENIENT: Final = {
    aten.sub.Scalar: "bools and a number: the formula sees what they are promoted to",
    aten.rsub.Scalar: "bools and a number: the formula sees what they are promoted to",
    aten.pow.Scalar: "True to the power of bools: the formula sees integers",
    aten.threshold_backward.default: "bools: the result would be of integers",
    aten.mish_backward.default: "integers: the result would be of floats",
    aten.hardtanh_backward.default: "integers: eager has code for them from torch 2.13 on",
    aten.gelu_backward.default: "sizes that are broadcast: oneDNN has no code for them",
}


def check(entry: Pointwise, case: Case) -> str:
    """Compare one call; say whether it was compared, refused by us, or refused by eager."""
    try:
        like = case.on(lambda tensor: tensor.to("meta")).run()
    except REFUSALS:
        return "raises"
    try:
        formula = lowered(entry, case.args, case.kwargs, like)
    except (NotImplementedError, OverflowError, ValueError):
        if entry.target in PARTIAL:  # not asked of eager: integers divided could end the process
            return "refused"
        return "raises" if eager_or_none(case) is None else "refused"
    eager = eager_or_none(case)
    if eager is None:
        assert case.is_mixed or entry.target in LENIENT, f"{case}: eager raises"
        return "raises"
    if (like.dtype, like.shape) != (eager.dtype, eager.shape):  # torch is not sure itself
        formula = lowered(entry, case.args, case.kwargs, eager)
    require_as_good(case, formula.run(), eager)
    return "compared"


def eager_or_none(case: Case) -> Tensor | None:
    """Eager's result; None where it raises."""
    try:
        return case.run()
    except REFUSALS:
        return None


# ---------------------------------------------------------------------------------------------
# Tests


def outcomes(entry: Pointwise) -> set[str]:
    """What became of the operator's calls; one that is wrong fails the test."""
    return {check(entry, case) for case in cases_of(entry.target)}


@pytest.mark.parametrize("target", POINTWISE, ids=str)
def test_operator_is_as_good_as_eager(target: Any) -> None:
    found = outcomes(POINTWISE[target])

    assert "compared" in found, "no call reached the formula"
    assert ("refused" in found) == (target in PARTIAL)


@pytest.mark.parametrize("target", POINTWISE, ids=str)
def test_defaults_are_those_of_the_schema(target: Any) -> None:
    """Graphs leave out arguments that have their default."""
    parameters = list(inspect.signature(POINTWISE[target].body).parameters.values())[1:]
    for argument, parameter in zip(target._schema.arguments, parameters, strict=False):
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name


def test_every_primitive_can_be_evaluated() -> None:
    assert set(EVALUATE) == set(Prim)


def test_numbers_are_compared_in_the_type_of_the_tensor() -> None:
    tenth = torch.tensor([0.1], dtype=torch.bfloat16)
    formula = lowered(POINTWISE[aten.eq.Scalar], (tenth, 0.1), {}, tenth == 0.1)

    assert formula.run().tolist() == (tenth == 0.1).tolist() == [True]


@pytest.mark.parametrize(
    ("target", "formula"),
    [
        (aten.relu.default, lambda b, x: b.where(b.gt(x, 0), x, 0)),  # loses NaN
        (aten.relu.default, lambda b, x: b.add(b.where(b.lt(x, 0), 0, x), 0)),  # loses -0.0
        (aten.expm1.default, lambda b, x: b.sub(b.exp(x), 1)),  # cancels
        (aten.mul.Tensor, lambda b, x, y: b.mul(b.max(x, -(2**31)), y)),  # does not wrap
        (aten.gt.Tensor, lambda b, x, y: b.not_(b.le(x, y))),  # NaN is greater
    ],
)
def test_a_wrong_formula_is_found(target: Any, formula: Any) -> None:
    entry = dataclasses.replace(POINTWISE[target], body=formula)

    with pytest.raises(pytest.fail.Exception, match="wrong"):
        outcomes(entry)


def test_a_formula_that_takes_nothing_is_found() -> None:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError

    entry = dataclasses.replace(POINTWISE[aten.exp.default], body=refuse)

    assert outcomes(entry) == {"refused"}


def test_an_argument_without_values_is_found() -> None:
    with pytest.raises(KeyError, match="dtype"):
        next(cases_of(aten._to_copy.default))
