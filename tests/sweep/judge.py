"""Compare what two runs of a case showed, and decide whether the backend passed it."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from tests.sweep.observe import Case, Observation, run_compiled, run_eager, run_wide

PASS: Final = "pass"
BOTH_FAIL: Final = "both fail"
EXCEPTION: Final = "exception"

Differences = dict[str, str]  # what differs ("outputs: strides") -> how
Reference = Callable[[], Observation | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one case, and what differed from eager."""

    sample: int
    verdict: str
    differences: Differences = field(default_factory=dict)
    graphs: int = 0
    seconds: float = 0.0
    generated: int = 0  # operators that became kernels
    called: list[str] = field(default_factory=list)  # operators that torch ran


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares a backend with eager and, where it fails, with its peer."""

    backend: str
    peer: str = "aot_eager"
    limit: float = 60.0  # seconds that one run of one case may take
    # Told what begins, so that when the process dies it is known under whose hands.
    announce: Callable[[str], None] = field(default=lambda phase: None)
    bits: bool = False  # values have to be eager's, bit for bit, whatever a peer does

    def __call__(self, case: Case, cause_of_death: str | None = None) -> Outcome:
        """Judge a case; `cause_of_death` says that the backend took a process down with it."""
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = self._judge(case, cause_of_death)
        return replace(outcome, seconds=round(time.perf_counter() - start, 3))

    def _judge(self, case: Case, cause_of_death: str | None) -> Outcome:
        self.announce("eager")
        eager = run_eager(case, self.limit)
        reference = None if self.bits else _Reference(case, eager, self.limit)
        found = Outcome(case.index, PASS)
        ours = {"raises": cause_of_death} if cause_of_death else {}
        if not cause_of_death:
            self.announce(self.backend)
            observed = run_compiled(case, self.backend, eager, self.limit)
            found = replace(
                found,
                graphs=observed.graphs,
                generated=observed.generated,
                called=list(observed.called),
            )
            ours = differences(case, eager, observed, reference)
        if not ours:
            return found
        if self.bits:  # how results lie is the ordinary sweep's to judge
            other = {what: how for what, how in ours.items() if _is_about_values(what)}
            return replace(found, verdict=EXCEPTION if other else PASS, differences=other)
        if self.backend == self.peer:
            return replace(found, verdict=BOTH_FAIL, differences=ours)
        self.announce(self.peer)
        peers = differences(
            case, eager, run_compiled(case, self.peer, eager, self.limit), reference
        )
        ours_alone = {what: how for what, how in ours.items() if what not in peers}
        if "raises" in peers:  # then nothing else of the peer could be seen
            ours_alone = {}
        if ours_alone:
            return replace(found, verdict=EXCEPTION, differences=ours_alone)
        return replace(found, verdict=BOTH_FAIL, differences=ours)


class _Reference:
    """The float64 run of a case, made when first asked for; None where it says nothing."""

    def __init__(self, case: Case, eager: Observation, limit: float) -> None:
        self._case, self._eager, self._limit = case, eager, limit
        self._made = False
        self._observation: Observation | None = None

    def __call__(self) -> Observation | None:
        if not self._made:
            self._made = True
            self._observation = self._make()
        return self._observation

    def _make(self) -> Observation | None:
        wide = run_wide(self._case, self._eager, self._limit)
        if wide.error or wide.structure != self._eager.structure:
            return None
        # Some random numbers are the same in every dtype; others take more bits in float64.  What
        # is drawn from as many bits and is another number after all is no reference: see below.
        if wide.random_state != self._eager.random_state:
            return None
        return wide if len(wide.gradients) == len(self._eager.gradients) else None


def differences(
    case: Case, eager: Observation, actual: Observation, reference: Reference | None
) -> Differences:
    """All that a caller could tell apart, one entry an aspect (the first place it shows).

    Without a reference every bit of a value counts.
    """
    if eager.error or actual.error:
        why = _why_errors_differ(eager.error, actual.error)
        return {"raises": why} if why else {}
    if actual.structure != eager.structure:
        return {"outputs: structure": f"{actual.structure}, in eager {eager.structure}"}
    found: Differences = {}
    for what in ("outputs", "gradients", "inputs"):
        for aspect, how in _compare_all(case, what, (eager, actual), reference):
            found.setdefault(f"{what}: {aspect}", how)
    for aspect in ("sharing", "mutated"):
        if getattr(actual, aspect) != getattr(eager, aspect):
            found[aspect] = f"{getattr(actual, aspect)}, in eager {getattr(eager, aspect)}"
    if actual.random_state != eager.random_state:
        found["random state"] = "another state of the generator than eager leaves"
    return found


def _why_errors_differ(eager: BaseException | None, actual: BaseException | None) -> str | None:
    if actual is None:
        return f"nothing, in eager {_shown(eager)}"
    if eager is None:
        return _shown(actual)
    if any(_is_alike(error, eager) for error in _unwrapped(actual)):
        return None
    return f"{_shown(actual)}, in eager {_shown(eager)}"


def _is_alike(error: BaseException, eager: BaseException) -> bool:
    # Dynamo raises its own subclass of RuntimeError for what an operator raises while captured.
    is_captured = isinstance(error, TorchDynamoException) and isinstance(error, type(eager))
    return type(error) is type(eager) or is_captured


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, without the wrappers of a failed compilation."""
    step: BaseException | None = error
    while step is not None:
        if isinstance(step, BackendCompilerFailed):
            step = step.inner_exception
            continue
        if type(step).__name__ != "CompileError":
            yield step
        step = step.__cause__ or step.__context__


def _shown(error: BaseException | None) -> str:
    if isinstance(error, BackendCompilerFailed):
        return f"BackendCompilerFailed from {_shown(error.inner_exception)}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _compare_all(
    case: Case, what: str, runs: tuple[Observation, Observation], reference: Reference | None
) -> Iterator[tuple[str, str]]:
    """Compare a kind of values ("outputs", "gradients", "inputs") one by one."""
    eager, actual = (getattr(run, what) for run in runs)
    for place, (expected, got) in enumerate(zip(eager, actual, strict=True)):
        for aspect, how in _compare(expected, got):
            yield aspect, f"#{place}: {how}"
        if case.unit.gives_any_values and what == "outputs":
            continue  # uninitialised memory
        if reference is None:
            why = _why_bits_differ(expected, got)
        else:
            wide = functools.partial(_at, reference, what, place)
            why = _why_values_differ(expected, got, wide)
        if why:
            yield "values", f"#{place}: {why}"


def _at(reference: Reference, what: str, place: int) -> Any:
    wide = reference()
    return getattr(wide, what)[place] if wide else None


def _compare(expected: Any, got: Any) -> Iterator[tuple[str, str]]:
    """The aspects of two leaves that differ, values apart."""
    if type(expected) is not type(got):
        yield "type", f"{type(got).__name__}, in eager {type(expected).__name__}"
        return
    if not isinstance(expected, torch.Tensor):
        return
    for aspect in ("dtype", "layout", "shape", "requires_grad"):
        if getattr(got, aspect) != getattr(expected, aspect):
            yield aspect, f"{getattr(got, aspect)}, in eager {getattr(expected, aspect)}"
    if got.shape == expected.shape and _strides(got) != _strides(expected):
        yield "strides", f"{got.stride()}, in eager {expected.stride()} of {tuple(got.shape)}"


def _strides(tensor: Any) -> list[int]:
    """The strides that matter: none of an empty tensor, none of a dimension of size one."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return []
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _why_values_differ(expected: Any, got: Any, wide: Callable[[], Any]) -> str | None:
    if type(expected) is not type(got):
        return None  # said already
    if not isinstance(expected, torch.Tensor):
        return None if _same_plain(expected, got) else f"{got!r}, in eager {expected!r}"
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return None  # said already
    expected, got = _dense(expected), _dense(got)
    if _why_not_close(expected, got, exactly=True) is None:
        return None
    exact = wide()
    if exact is None or not _is_comparable(_dense(exact), expected):
        return _why_not_close(expected, got, exactly=False)
    exact = _dense(exact)
    if not _is_reference_for(exact, expected) and not _is_nearer(got, expected, exact):
        return _why_not_close(expected, got, exactly=False)
    return _why_less_accurate(expected, got, exact)


def _is_about_values(aspect: str) -> bool:
    return aspect in ("raises", "random state") or aspect.endswith(
        (": values", ": structure", ": dtype", ": shape", ": type")
    )


def _why_bits_differ(expected: Any, got: Any) -> str | None:
    """Zeros have signs here; all NaN are one."""
    if not isinstance(expected, torch.Tensor):
        return _why_values_differ(expected, got, lambda: None)
    if type(expected) is not type(got) or (expected.dtype, expected.shape) != (
        got.dtype,
        got.shape,
    ):
        return None  # said already
    expected, got = _dense(expected), _dense(got)
    if expected.is_complex():
        expected, got = torch.view_as_real(expected), torch.view_as_real(got)
    if not expected.is_floating_point():
        return _why_not_close(expected, got, exactly=True)
    either = (expected == got) & (expected.signbit() == got.signbit())
    other = ~(either | (expected.isnan() & got.isnan()))
    if not other.any():
        return None
    one, two = (float(value[other][0]) for value in (got, expected))
    return f"{int(other.sum())} of {other.numel()} have other bits: {one!r}, in eager {two!r}"


def _same_plain(expected: Any, got: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return math.isnan(got)
    return bool(expected == got)


def _dense(tensor: Any) -> Any:
    tensor = tensor.detach()
    return tensor.resolve_conj() if tensor.layout == torch.strided else tensor.to_dense()


def _why_not_close(expected: Any, got: Any, exactly: bool) -> str | None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {}
    try:
        torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _is_comparable(exact: Any, expected: Any) -> bool:
    """Whether a float64 result is of the same kind as eager's."""
    wider = (torch.float64, torch.complex128)
    if exact.dtype not in wider or expected.dtype in wider or exact.shape != expected.shape:
        return False
    return bool(exact[expected.isfinite()].isfinite().all())


def _is_reference_for(exact: Any, expected: Any) -> bool:
    """Whether a float64 result can say how accurate eager is."""
    finite = expected.isfinite()
    # Far apart, they answer different questions: a sign or an order that rounding decides.
    return _error(expected, exact, finite) <= 0.25 * _largest(exact[finite])


def _is_nearer(got: Any, expected: Any, exact: Any) -> bool:
    """Whether our answer is float64's rather than eager's."""
    finite = expected.isfinite()
    return _error(got, exact, finite) < 0.01 * _error(expected, exact, finite)


def _why_less_accurate(expected: Any, got: Any, exact: Any) -> str | None:
    finite = expected.isfinite()
    if why := _why_not_close(expected[~finite], got[~finite], exactly=True):
        return why
    eagers, ours = _error(expected, exact, finite), _error(got, exact, finite)
    ulp = torch.finfo(expected.dtype).eps * _largest(exact[finite])
    if ours <= 2 * eagers + ulp:
        return None
    return f"error {ours:.2e} against float64, eager's is {eagers:.2e}, one ulp {ulp:.2e}"


def _error(tensor: Any, exact: Any, where: Any) -> float:
    return _largest(tensor[where].to(exact.dtype) - exact[where])


def _largest(tensor: Any) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
