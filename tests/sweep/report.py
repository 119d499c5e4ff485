"""The report of a sweep: totals, exceptions with their reasons, and what was not run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.sweep.cases import BACKWARD, DTYPES, Unit, operators, units
from tests.sweep.exceptions import KNOWN, LARGEST_SHARE, Known, reason_for
from tests.sweep.judge import BOTH_FAIL, EXCEPTION, PASS, Outcome
from tests.sweep.results import Conditions, UnitResult

MOST_CALLED: Final = 30
_VERDICTS: Final = (PASS, BOTH_FAIL, EXCEPTION)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures that decide whether a sweep is good."""

    cases: int
    both_fail: int
    exceptions: int
    unlisted: tuple[tuple[Unit, Outcome], ...]
    stale: tuple[Known, ...]  # listed, and yet everything they cover passes

    @property
    def share(self) -> float:
        """Exceptions as a part of all cases."""
        return self.exceptions / self.cases if self.cases else 0.0

    @property
    def is_good(self) -> bool:
        """Nothing fails without a reviewed reason, and not much with one."""
        return self.cases > 0 and not self.unlisted and self.share <= LARGEST_SHARE


def summarise(results: Sequence[UnitResult]) -> Summary:
    """Count the outcomes and hold the exceptions against the reviewed list."""
    failed = list(_outcomes(results, EXCEPTION))
    return Summary(
        cases=sum(len(result.outcomes) for result in results),
        both_fail=sum(1 for _ in _outcomes(results, BOTH_FAIL)),
        exceptions=len(failed),
        unlisted=tuple(failure for failure in failed if reason_for(failure[0]) is None),
        stale=tuple(
            known
            for known in KNOWN
            if any(known.covers(result.unit) for result in results)
            and not any(known.covers(unit) for unit, _ in failed)
        ),
    )


def write_report(results: Sequence[UnitResult], conditions: Conditions) -> str:
    """The report as Markdown."""
    summary = summarise(results)
    sections = (
        _introduction(results, conditions, summary),
        _totals(results),
        _shares(results),
        _exceptions(results, summary),
        _common_failures(results, conditions),
        _not_run(results),
        _unseen(results),
    )
    return "\n".join(line for section in sections for line in (*section, ""))


def _introduction(
    results: Sequence[UnitResult], conditions: Conditions, summary: Summary
) -> Iterator[str]:
    names = {result.unit.op for result in results}
    yield "# Operator coverage"
    yield ""
    yield "Written by `make sweep`; not edited by hand."
    yield ""
    yield (
        f"Every operator of torch's own database (torch {conditions.torch}, CPU), {len(names)} of "
        f"{len(operators())}, with at most {conditions.samples} of its samples for each dtype and "
        f'direction, through `backend="{conditions.backend}"`, held against eager: structure, '
        "dtype, shape, strides, requires_grad, shared storage, mutated inputs, the random "
        "generator's state, and values (error against a float64 run at most twice eager's plus "
        "one ulp of the largest value). Where eager raises, the same type must be raised. "
        f'"{BOTH_FAIL.capitalize()}" means that `backend="{conditions.peer}"` differs from eager '
        f"in the same way; an {EXCEPTION} is a case in which it does not."
    )
    yield ""
    yield (
        f"{summary.cases} cases, {summary.exceptions} exceptions: {summary.share:.2%} "
        f"(at most {LARGEST_SHARE:.1%} are allowed)."
    )


def _totals(results: Sequence[UnitResult]) -> Iterator[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for result in results:
        for outcome in result.outcomes:
            counts[result.unit.dtype, _direction(result.unit), outcome.verdict] += 1
    directions = sorted({direction for _, direction, _ in counts}, reverse=True)
    yield "| dtype | direction | cases | pass | both fail | exceptions |"
    yield "|---|---|--:|--:|--:|--:|"
    for dtype in DTYPES:
        for direction in directions:
            row = [counts[dtype, direction, verdict] for verdict in _VERDICTS]
            if any(row):
                yield _row(dtype, direction, sum(row), *row)
    total = [sum(counts[key] for key in counts if key[2] == verdict) for verdict in _VERDICTS]
    yield _row("all", "", sum(total), *total)


def _shares(results: Sequence[UnitResult]) -> Iterator[str]:
    """What the graphs of the sweep were made into."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    generated = sum(outcome.generated for outcome in outcomes)
    called = Counter(name for outcome in outcomes for name in outcome.called)
    everything = generated + called.total()
    yield "## Generated and called"
    yield ""
    if not everything:
        yield "Nothing was compiled to kernels."
        return
    yield (
        f"The graphs have {everything} operators. {generated} ({generated / everything:.1%}) "
        f"became loops of native kernels; {called.total()} ({called.total() / everything:.1%}) are "
        f"calls of {len(called)} operators of torch's: products, convolutions, attention, sorting, "
        "linear algebra, complex numbers, and what has no rule yet. Those called most:"
    )
    yield ""
    yield "| operator | calls |"
    yield "|---|--:|"
    for name, count in called.most_common(MOST_CALLED):
        yield _row(f"`{name}`", count)


def _exceptions(results: Sequence[UnitResult], summary: Summary) -> Iterator[str]:
    yield "## Exceptions"
    yield ""
    if not summary.exceptions:
        yield "None."
    else:
        yield "| operator | dtype | direction | cases | differs in | reason |"
        yield "|---|---|---|--:|---|---|"
        by_unit: dict[Unit, list[Outcome]] = defaultdict(list)
        for unit, outcome in _outcomes(results, EXCEPTION):
            by_unit[unit].append(outcome)
        for unit in sorted(by_unit, key=str):
            reason = reason_for(unit) or "**not reviewed**"
            failed = by_unit[unit]
            where = (f"`{unit.op}`", unit.dtype, _direction(unit))
            yield _row(*where, len(failed), _aspects(failed), reason)
    for known in summary.stale:
        yield ""
        yield f"Listed and passing: `{known.op}` {known.dtype} {known.direction}."


def _common_failures(results: Sequence[UnitResult], conditions: Conditions) -> Iterator[str]:
    by_op: dict[str, list[tuple[Unit, Outcome]]] = defaultdict(list)
    for unit, outcome in _outcomes(results, BOTH_FAIL):
        by_op[unit.op].append((unit, outcome))
    yield f"## Cases that fail with `{conditions.peer}` too"
    yield ""
    if not by_op:
        yield "None."
        return
    yield "| operator | dtypes | cases | differs in |"
    yield "|---|---|--:|---|"
    for op, failed in sorted(by_op.items()):
        dtypes = [dtype for dtype in DTYPES if any(unit.dtype == dtype for unit, _ in failed)]
        aspects = _aspects([outcome for _, outcome in failed])
        yield _row(f"`{op}`", ", ".join(dtypes), len(failed), aspects)


def _not_run(results: Sequence[UnitResult]) -> Iterator[str]:
    listed = units()
    pairs = {(unit.op, unit.dtype) for unit in listed}
    backward = sum(unit.direction == BACKWARD for unit in listed)
    yield "## Not run"
    yield ""
    yield (
        f"Of {len(operators())} × {len(DTYPES)} pairs of operator and dtype the database lists "
        f"{len(pairs)} for the CPU, {backward} of them with a derivative; the others are not run. "
        "Its marks for skipping single tests of torch's own suite are not heeded."
    )
    ran = sum(len(result.outcomes) for result in results)
    available = sum(result.available for result in results)
    yield f"Of the {available} samples of the pairs that were run, {ran} were run."
    without = sorted((result for result in results if result.why_none), key=lambda r: str(r.unit))
    yield f"Without samples: {len(without)} of {len(results)} (operator, dtype, direction)."
    if without:
        yield ""
    for result in without:
        yield f"- `{result.unit}`: {_plain(result.why_none or '')}"


def _unseen(results: Sequence[UnitResult]) -> Iterator[str]:
    unseen: Counter[str] = Counter()
    for result in results:
        unseen[result.unit.op] += sum(outcome.graphs == 0 for outcome in result.outcomes)
    names = sorted(op for op, count in unseen.items() if count)
    yield "## Never handed to the compiler"
    yield ""
    yield (
        f"In {unseen.total()} cases TorchDynamo captured no graph, so eager ran and the case says "
        "nothing about the compiler:"
    )
    yield ", ".join(f"`{op}` ({unseen[op]})" for op in names) + "."


def _outcomes(results: Sequence[UnitResult], verdict: str) -> Iterator[tuple[Unit, Outcome]]:
    for result in results:
        for outcome in result.outcomes:
            if outcome.verdict == verdict:
                yield result.unit, outcome


def _direction(unit: Unit) -> str:
    return f"{unit.direction}, in place" if unit.in_place else unit.direction


def _aspects(outcomes: Sequence[Outcome]) -> str:
    """What differs, with one instance of how."""
    first: dict[str, str] = {}
    for outcome in outcomes:
        for aspect, how in outcome.differences.items():
            first.setdefault(aspect, how)
    return "; ".join(f"{aspect} ({_plain(how)})" for aspect, how in sorted(first.items()))


def _plain(text: str) -> str:
    """Text that cannot break a table, at a readable length."""
    text = " ".join(text.split()).replace("|", "/").replace("`", "'")
    return text if len(text) <= 140 else f"{text[:139]}…"


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"
