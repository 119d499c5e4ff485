"""Operators with arguments of type `Scalar`, and numbers in the places of tensors, in libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import special

import stator
from stator.errors import Unsupported

X: Final = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
WHOLE: Final = torch.arange(16).view(4, 4)
WAVES: Final = torch.complex(X, X.t())
BATCHES: Final = torch.stack([X, X + 1])
BYTES: Final = torch.tensor([1, 44, 3], dtype=torch.uint8)


class Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """What it returns."""
        return self.function(x)


def built(function: Callable[[torch.Tensor], Any], folder: Path, **options: Any) -> str:
    """The package of a function of a matrix."""
    wishes = {"output_path": folder / "model.pt2", "levels": (1,), **options}
    with torch.no_grad():
        return stator.aot_compile(Called(function), (X,), options=wishes)


FUNCTIONS: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    # By torch's C functions, which take a Scalar as a double.
    "histc": lambda x: torch.histc(x, 5, -1, 1),
    "addbmm": lambda x: torch.addbmm(x, BATCHES, BATCHES, beta=0.5, alpha=2),
    "addmv": lambda x: torch.addmv(x[0], x, x[1], beta=0.5, alpha=0.3),
    "segment_reduce": lambda x: torch.segment_reduce(
        x, "sum", lengths=torch.tensor([2, 2]), axis=0, initial=1
    ),
    "add of complex numbers": lambda x: torch.add(WAVES, WAVES + x, alpha=0.3) + 0.5,
    "sub of complex numbers": lambda x: torch.sub(WAVES, WAVES - x, alpha=0.3) - 1,
    "rsub of complex numbers": lambda x: 1 - torch.rsub(WAVES * x, 2, alpha=3),
    # By overloads that take tensors.
    "searchsorted": lambda x: torch.searchsorted(x.sort(-1)[0][0], 0.3),
    "bucketize": lambda x: torch.bucketize(3.5, WHOLE.flatten() + x.int().sum(), out_int32=True),
    "isin, a number among": lambda x: torch.isin(2, x),
    "isin, among bytes": lambda x: (torch.isin(BYTES, 300), torch.isin(BYTES, 2.5), x + 1),
    "zeta": lambda x: (special.zeta(x.abs() + 2, 2.3), special.zeta(2.3, x.double().abs())),
    "zeta of whole numbers": lambda x: special.zeta(WHOLE + x.int() + 9, 2.5),
    "zeta of one number": lambda x: special.zeta(x.abs().sum(), 2.5),
    "polynomial": lambda x: special.chebyshev_polynomial_t(x, 3),
    "pow of complex numbers": lambda x: ((WAVES * x) ** (2 + 1j), 2 ** (WAVES * x)),
    # Numbers in the places of tensors.
    "mul of complex numbers": lambda x: (WAVES + x) * (2 + 1j) / 3,
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2 - 1),
    # What depends on no tensor.
    "logspace": lambda x: torch.logspace(0.1, 2.7, 4, dtype=torch.float64) + x,
    "range": lambda x: torch.range(0, 3) * x,
    "where of complex numbers": lambda x: torch.where(x > 0, WAVES, 2j),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_reach_operators_without_kernels(name: str, tmp_path: Path) -> None:
    loaded = stator.load(built(FUNCTIONS[name], tmp_path, linker=False))
    for _ in range(2):
        torch.testing.assert_close(loaded(X), FUNCTIONS[name](X))


def test_torchs_own_loader_runs_them(tmp_path: Path) -> None:
    function = FUNCTIONS["sub of complex numbers"]
    loaded = torch._inductor.aoti_load_package(built(function, tmp_path))
    torch.testing.assert_close(loaded(X), function(X))


def test_what_was_made_when_it_was_built_may_be_written_to(tmp_path: Path) -> None:
    def ones_and_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.full((4, 4), 1j)
        return ones, torch.full((4, 4), 2j).add_(x)

    loaded = stator.load(built(ones_and_more, tmp_path, linker=False))
    first, second = loaded(X)
    first.zero_()
    second.zero_()
    torch.testing.assert_close(loaded(X), ones_and_more(X))


FACTORS: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "addr": lambda x: torch.addr(x, x[0], x[1], beta=0.5, alpha=2),
    "addr, nothing of the first": lambda x: torch.addr(x * torch.nan, x[0], x[1], beta=0),
    "addr of integers": lambda x: torch.addr(WHOLE, WHOLE[0], x[1].int(), beta=2, alpha=3),
    "addr of truths": lambda x: (
        torch.addr(x > 1, x[0] > 0, x[1] > 0),
        torch.addr(x > 1, x[0] > 0, x[1] > 0, beta=False, alpha=True),
        torch.addr(x > 1, x[0] > 0, x[1] > 0, alpha=False),
    ),
    "addr of two types": lambda x: torch.addr(x.double(), x[0], WHOLE[1], beta=2, alpha=0.5),
    "addr of complex numbers": lambda x: torch.addr(WAVES, WAVES[0], x[1], beta=2j, alpha=0.5),
    "addmv of integers": lambda x: torch.addmv(WHOLE[0], WHOLE, x[1].long(), beta=2, alpha=3),
    "addmm of integers": lambda x: torch.addmm(WHOLE, WHOLE, x.long(), beta=2, alpha=3),
    "baddbmm of integers": lambda x: torch.baddbmm(
        WHOLE[None], WHOLE[None], x.long()[None], beta=0, alpha=3
    ),
    "addbmm of integers": lambda x: torch.addbmm(
        WHOLE, torch.stack([WHOLE] * 2), torch.stack([x.long()] * 2), beta=2, alpha=3
    ),
    "addmm, a complex factor": lambda x: torch.addmm(WAVES, WAVES, WAVES * x, alpha=2 + 1j),
    "addmv, a complex factor": lambda x: torch.addmv(WAVES[0], WAVES, WAVES[1] * x[0], beta=1j),
    "addcmul of complex numbers": lambda x: torch.addcmul(WAVES, WAVES, WAVES * x, value=0.3),
    "addcdiv of complex numbers": lambda x: torch.addcdiv(WAVES, WAVES * x, WAVES, value=2j),
    "add, a complex factor": lambda x: torch.add(WAVES, WAVES * x, alpha=2j),
    "sub, a complex factor": lambda x: torch.sub(WAVES, WAVES * x, alpha=2j),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_no_c_function_takes(name: str, tmp_path: Path) -> None:
    loaded = stator.load(built(FACTORS[name], tmp_path, linker=False))
    for x in (X, X + 2):
        torch.testing.assert_close(loaded(x), FACTORS[name](x))


def test_what_no_c_function_takes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"aten.var.correction.*type .* cannot be passed"):
        built(lambda x: torch.var(WAVES * x, correction=2), tmp_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            "cond, .*it takes functions",
        ),
        (lambda x: x.to(torch.float8_e4m3fnuz).float(), "ScalarType.*float8_e4m3fnuz"),
    ],
    ids=["functions", "types"],
)
def test_what_cannot_be_passed_is_refused_by_name(
    function: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=message):
        built(function, tmp_path)


def test_a_type_without_a_number_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(3, dtype=torch.float8_e4m3fnuz)
    wishes = {"output_path": tmp_path / "model.pt2"}
    with pytest.raises(Unsupported, match=r"x is of torch\.float8_e4m3fnuz"):
        stator.aot_compile(Called(torch.clone), (x,), options=wishes)


def test_a_type_that_a_schema_names_is_passed(tmp_path: Path) -> None:
    loaded = stator.load(built(lambda x: torch.randperm(4) + x, tmp_path))
    assert (loaded(X) - X).round().sort().values[0].tolist() == [0, 1, 2, 3]
