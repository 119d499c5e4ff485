"""The command line of the sweep: `python -m tests.sweep --help`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tests.sweep.cases import DTYPES, Unit, units
from tests.sweep.judge import BOTH_FAIL, EXCEPTION
from tests.sweep.observe import EAGER_BITS
from tests.sweep.report import Summary, summarise, write_report
from tests.sweep.results import Conditions, ConditionsDifferError, ResultsFile, UnitResult
from tests.sweep.workers import Setup, judge_units

_ROOT: Final = Path(__file__).resolve().parents[2]
_FOLDER: Final = _ROOT / ".sweep"
MOST_WITH_OTHER_BITS: Final = 0.01
_GIB: Final = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 when nothing fails without a reviewed reason."""
    chosen = _parsed(arguments)
    console = Console()
    todo = units(chosen.ops, chosen.dtypes, chosen.in_place)
    if not todo:
        console.print(f"no operator matches {' '.join(chosen.ops)}")
        return 2
    is_whole = chosen.ops == ["*"] and set(chosen.dtypes) == set(DTYPES)
    name = chosen.backend.replace(":", "-") + ("" if is_whole else "-slice")
    file = ResultsFile(_FOLDER / f"{name}.jsonl")
    conditions = Conditions(torch.__version__, chosen.backend, chosen.peer, chosen.samples)
    try:
        done = _earlier(file, conditions, todo) if chosen.resume else []
    except ConditionsDifferError as error:
        console.print(str(error))
        return 2
    if not done:
        file.begin(conditions)
    try:
        results = done + _run(_setup(chosen), file, todo, done, console)
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from here")
        return 130
    # Only a whole sweep of our own backend is coverage; a slice must not replace its figures.
    is_coverage = is_whole and chosen.backend == "stator"
    report = _ROOT / "docs" / "coverage.md" if is_coverage else _FOLDER / f"{name}.md"
    report.parent.mkdir(exist_ok=True)
    report.write_text(write_report(results, conditions))
    summary = summarise(results)
    if chosen.numerics == "eager":
        console.print(f"eager's bits in {1 - summary.share:.2%} of {summary.cases} cases")
        return 0 if summary.share <= MOST_WITH_OTHER_BITS else 1
    _tell(summary, report, console)
    return 0 if summary.is_good else 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    chosen = _parser().parse_args(arguments)
    if chosen.kernels is not None:
        chosen.backend = "stator+kernels" if chosen.kernels else "stator+no-kernels"
    if chosen.numerics == "eager":
        chosen.backend = EAGER_BITS
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--ops", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--in-place", action="store_true", help="in-place methods as well")
    parser.add_argument("--samples", type=int, default=4, help="at most so many of each")
    parser.add_argument("--backend", default="stator", help="a name, or module:function")
    parser.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="our own backend with native kernels on or off; neither: as users get it",
    )
    parser.add_argument(
        "--numerics",
        choices=["eager"],
        help="our own backend with eager's numerics: every bit of a value has to be eager's",
    )
    parser.add_argument("--peer", default="aot_eager", help="who is asked when we fail")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one run of a case")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="address space of a worker")
    parser.add_argument("--resume", action="store_true", help="keep what the last run passed")
    return parser


def _setup(chosen: argparse.Namespace) -> Setup:
    return Setup(
        backend=chosen.backend,
        peer=chosen.peer,
        samples=chosen.samples,
        workers=chosen.workers,
        limit=chosen.limit,
        memory=int(chosen.memory_gib * _GIB),
        logs=_FOLDER,
        bits=chosen.numerics == "eager",
    )


def _earlier(file: ResultsFile, conditions: Conditions, todo: list[Unit]) -> list[UnitResult]:
    """What need not be run again: all but the exceptions, which may have been mended since."""
    if not file.path.exists():
        return []
    latest = {result.unit: result for result in file.read(conditions)}
    return [latest[unit] for unit in todo if unit in latest and not _has_exception(latest[unit])]


def _has_exception(result: UnitResult) -> bool:
    return any(outcome.verdict == EXCEPTION for outcome in result.outcomes)


def _run(
    setup: Setup, file: ResultsFile, todo: list[Unit], done: list[UnitResult], console: Console
) -> list[UnitResult]:
    """Judge what is not done yet, keeping each result as it comes."""
    finished = {result.unit for result in done}
    rest = [unit for unit in todo if unit not in finished]
    results: list[UnitResult] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    verdicts = Counter(outcome.verdict for result in done for outcome in result.outcomes)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("sweep", total=len(todo), completed=len(done))
        for result in judge_units(rest, setup):
            file.add(result)
            results.append(result)
            verdicts.update(outcome.verdict for outcome in result.outcomes)
            _show_exceptions(result, console)
            counts = (
                f"{verdicts.total()} cases, {verdicts[BOTH_FAIL]} both fail, "
                f"{verdicts[EXCEPTION]} exceptions"
            )
            progress.update(bar, advance=1, description=counts)
    return results


def _show_exceptions(result: UnitResult, console: Console) -> None:
    for outcome in result.outcomes:
        if outcome.verdict == EXCEPTION:
            console.print(f"{result.unit}, sample {outcome.sample}", style="red", highlight=False)
            for aspect, how in outcome.differences.items():
                console.print(f"  {aspect}: {how}", markup=False, highlight=False)


def _tell(summary: Summary, report: Path, console: Console) -> None:
    console.print(
        f"{summary.cases} cases, {summary.both_fail} fail with the peer too, "
        f"{summary.exceptions} exceptions ({summary.share:.2%}), "
        f"{len(summary.unlisted)} of them not listed; report in {report.relative_to(_ROOT)}"
    )
    for known in summary.stale:
        console.print(f"listed and passing: {known}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
