"""About a minute of the sweep, for every run of the tests; the whole is `make sweep`."""

from __future__ import annotations

import zlib
from typing import Final

import pytest

from tests.parity import KERNELS
from tests.sweep.cases import BACKWARD, DTYPES, FORWARD, Unit, operators, samples, units
from tests.sweep.exceptions import reason_for
from tests.sweep.judge import EXCEPTION, Judge
from tests.sweep.observe import EAGER_BITS, Case

_ONE_IN: Final = 16  # of the operators that are not risky
_FIRST: Final = "float32"  # it stands for float64, too

# Views and aliases, mutation, random numbers, ties, indices, several outputs, complex numbers:
# where compilers of whole graphs have gone wrong before.
_RISKY: Final = """
    T H mH view view_as reshape expand expand_as broadcast_tensors permute transpose squeeze unbind
    as_strided as_strided_scatter as_strided.partial_views chunk split split_with_sizes tensor_split
    diagonal diagonal_scatter select_scatter slice_scatter select narrow unfold movedim contiguous
    real imag view_as_real view_as_complex conj resolve_conj resolve_neg complex polar angle to
    add mul div.no_rounding_mode pow clamp where lerp copysign sigmoid tanh exp masked_fill fill
    zero_ cauchy normal.in_place uniform bernoulli multinomial randn_like item equal nonzero
    __getitem__ index_put index_add index_copy index_select gather scatter scatter_add put take
    scatter_reduce.amax masked_scatter masked_select searchsorted bincount repeat_interleave
    sort argsort topk kthvalue median mode unique cumsum cumprod cummax logcumsumexp
    sum mean var std_mean amax max.reduction_with_dim prod norm logsumexp softmax matmul einsum
    fft.fft fft.rfft fft.irfftn fft.hfft stft istft
    linalg.cholesky linalg.det linalg.eigh linalg.eig linalg.svd linalg.qr linalg.solve linalg.inv
    linalg.lu linalg.lstsq linalg.norm linalg.pinv linalg.matrix_rank
    nn.functional.batch_norm nn.functional.layer_norm nn.functional.group_norm
    nn.functional.instance_norm nn.functional.rms_norm nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.fractional_max_pool2d
    nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward
    nn.functional.dropout nn.functional.alpha_dropout nn.functional.rrelu nn.functional.embedding
    nn.functional.embedding_bag nn.functional.ctc_loss nn.functional.cross_entropy
    nn.functional.nll_loss nn.functional.interpolate.bilinear nn.functional.grid_sample
    nn.functional.pad.reflect nn.functional.linear nn.functional.gelu nn.functional.one_hot
    """


def _risky() -> list[str]:
    return _RISKY.split()


def _others() -> list[str]:
    """A fixed part of the remaining operators; the hash mixes all kinds."""
    remaining = set(operators()) - set(_risky())
    return sorted(name for name in remaining if zlib.crc32(name.encode()) % _ONE_IN == 0)


def _dtypes(op: str) -> tuple[str, ...]:
    """float32, and one of the others that the operator takes; the hash mixes them."""
    taken = operators()[op].supported_dtypes("cpu")
    others = [n for n, dtype in DTYPES.items() if n not in (_FIRST, "float64") and dtype in taken]
    return (_FIRST, *(others[zlib.crc32(op.encode()) % len(others)] for _ in others[:1]))


def _sampled(op: str, dtypes: tuple[str, ...], in_place: bool = False) -> list[Unit]:
    """Both directions of float32; of the rest one, chosen so that all pairs of kinds are there.

    The way back compares what the way there returns as well.
    """
    found = units([op], dtypes, in_place)
    turning = {(unit.dtype, unit.in_place) for unit in found if unit.direction == BACKWARD}

    def is_needed(unit: Unit) -> bool:
        if unit.dtype == _FIRST and not unit.in_place:
            return True
        if unit.dtype != _FIRST and unit.in_place:
            return unit.direction == FORWARD
        return unit.direction == BACKWARD or (unit.dtype, unit.in_place) not in turning

    return list(filter(is_needed, found))


def _failures(op: str, cap: int, in_place: bool) -> list[str]:
    judge = Judge("stator+kernels" if KERNELS.get() else "stator+no-kernels")
    found = []
    for unit in _sampled(op, _dtypes(op), in_place):
        for index, sample in samples(unit, cap).chosen:
            outcome = judge(Case.of(unit, index, sample))
            if outcome.verdict == EXCEPTION and reason_for(unit) is None:
                found.append(f"{unit}, sample {index}: {outcome.differences}")
    return found


# Drawn from the whole, dropout and sums first: what `Options.numerics="eager"` promises.
_WITH_EAGER_BITS: Final = """
    nn.functional.dropout nn.functional.alpha_dropout nn.functional.feature_alpha_dropout add sub
    mul div.floor_rounding sum var softmax exp tanh sigmoid gelu nn.functional.gelu
    nn.functional.layer_norm nn.functional.cross_entropy nn.functional.linear norm.nuc where clamp
    """


@pytest.mark.sweep
@pytest.mark.parametrize("op", [name for name in _WITH_EAGER_BITS.split() if name in operators()])
def test_operator_has_eagers_bits(op: str) -> None:
    judge = Judge(EAGER_BITS, bits=True)
    for unit in _sampled(op, ("float32", "bfloat16", "int64")):
        for index, sample in samples(unit, 1).chosen:
            outcome = judge(Case.of(unit, index, sample))
            assert outcome.verdict != EXCEPTION, f"{unit}, sample {index}: {outcome.differences}"


@pytest.mark.sweep
@pytest.mark.parametrize("op", _risky())
def test_risky_operator_agrees_with_eager(op: str) -> None:
    assert _failures(op, cap=1, in_place=True) == []


@pytest.mark.sweep
@pytest.mark.parametrize("op", _others())
def test_operator_agrees_with_eager(op: str) -> None:
    assert _failures(op, cap=1, in_place=False) == []
