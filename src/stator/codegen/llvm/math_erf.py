"""The error function and its complement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.math_exp import exp2_of_moderate, exp_of_moderate, exp_of_sum_times
from stator.codegen.llvm.math_value import (
    DOUBLE,
    FLOAT,
    Value,
    absolute,
    at_most,
    copy_sign,
    fma,
    polynomial,
    select,
    widened,
)


@dataclass(frozen=True, slots=True)
class _Constants:
    """What differs between the widths."""

    middle: float
    one_above: float  # erf is 1 there
    small: tuple[float, ...]  # erf(x)/x - 1 in x² below the middle
    large: tuple[float, ...]  # (log(erfc(x)) + x) / x above it


_OF: Final[Mapping[str, _Constants]] = {
    FLOAT: _Constants(
        middle=475 / 512,
        one_above=4.0,
        small=(
            0.128379166, -0.376126319, 0.112836972, -0.0268601142, 0.00520336209,
            -0.000817073043, 8.48661293e-05,
        ),
        large=(
            -0.128652915, -0.635133386, -0.106266461, 0.0237874798, -0.00365444389,
            0.000325743051, -1.152408e-05,
        ),
    ),
    DOUBLE: _Constants(
        middle=1.0,
        one_above=6.0,
        small=(
            0.1283791670955126, -0.3761263890318375, 0.11283791670954857, -0.0268661706450729,
            0.0052239776247809165, -0.000854832697874482, 0.000120553310369868,
            -1.4925593508793783e-05, 1.646097284462247e-06, -1.6350025485644356e-07,
            1.4657881423006846e-08, -1.1365671386669372e-09, 5.945269835616447e-11,
        ),
        large=(
            -0.12837920142235767, -0.636619361259688, -0.10277491579821157, 0.01913657408292447,
            0.00018917439767476713, -0.0016594554523437556, 0.0005379769801420125,
            3.263488368662215e-05, -0.00011709266559462771, 6.77830840540395e-05,
            -2.5448038001283724e-05, 7.146699488787154e-06, -1.5593443165130609e-06,
            2.655316532365394e-07, -3.478276276625902e-08, 3.3929809546404765e-09,
            -2.3234189021613375e-10, 9.96641914031671e-12, -2.0144302375658853e-13,
        ),
    ),
}  # fmt: skip

# exp(a²) erfc(a) in (a - 3) / (a + 3) = 1 - 6 / (a + 3) for 0 ≤ a ≤ 10.1
_SCALED_ERFC: Final = (
    0.1790011512599081, -0.32623356382267577, 0.24560379808126803, -0.15011578175371249,
    0.07166585570979946, -0.024394237797628903, 0.004268919715439539, 0.0007157859474500248,
    -0.0005946269368642922, 2.8757907275395877e-05, 5.586402699788199e-05,
)  # fmt: skip


# log2 of the normal distribution at -x for 0 ≤ x ≤ 5.75, exact to 4e-8 of the distribution
_LOG2_TAIL: Final = (
    -1.0, -1.15110457, -0.459217817, -0.0524500236, 0.00696259644, -2.04995395e-05, -0.0002615228,
    6.66676569e-05, -7.97670691e-06, 3.90550383e-07,
)  # fmt: skip
_TAIL_ENDS: Final = 5.75  # what is beyond is less than a rounding of the other end


def erf(x: Value) -> Value:
    """x + x p(x²) below the middle, 1 - exp(x q(x) - x) above"""
    constants = _OF[x.type]
    size = at_most(absolute(x), constants.one_above)
    small = fma(polynomial(size * size, constants.small), size, size)
    large = 1.0 - exp_of_moderate(fma(polynomial(size, constants.large), size, -size))
    return copy_sign(select(size > constants.middle, large, small), x)


def normal_cdf_f32(x: Value) -> Value:
    """2**p(|x|) below 0, 1 less that above"""
    size = absolute(x)
    tail = exp2_of_moderate(polynomial(at_most(size, _TAIL_ENDS), _LOG2_TAIL))
    tail = select(size > _TAIL_ENDS, 0.0, tail)
    return select(x < 0.0, tail, 1.0 - tail)


def normal_cdf_f64(x: Value) -> Value:
    """(1 + erf(x / sqrt 2)) / 2"""
    return fma(erf(x * 0.7071067811865476), 0.5, 0.5)


def erfc_f32(x: Value) -> Value:
    """exp(-x²) p, reflected below 0; p in f64, as its roundings alone would make two ulp"""
    size = at_most(absolute(x), 10.1)  # where the result is 0
    square = size * size
    lost = fma(size, size, -square)  # what rounding took off the square: exp would magnify it
    # A quotient of f32, made exact enough by one step of Newton: cheaper than one of f64.
    divisor, inverse = widened(size) + 3.0, widened(1.0 / (size + 3.0))
    inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse)
    p = polynomial(fma(inverse, -6.0, 1.0), _SCALED_ERFC)
    complement = exp_of_sum_times(-square, -lost, p)
    return select(x < 0.0, 2.0 - complement, complement)
