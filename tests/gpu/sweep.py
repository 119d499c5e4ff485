"""A sample of torch's operators on a GPU: `python -m tests.gpu.sweep --count 150 --seed 0`.

Each operator in float32 and bfloat16, forward and backward, compiled, beside eager and float64, by
the judge of tests/sweep and its tolerances.  Units are judged in processes: a kernel that breaks
the device costs its case alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tests.gpu.ready import register_backend, stand_in_for_expecttest

stand_in_for_expecttest()  # here, since the processes that judge import this module too

import torch  # noqa: E402

from tests.sweep.cases import BACKWARD, DTYPES, Unit, operators, units  # noqa: E402
from tests.sweep.exceptions import Known, reason_for  # noqa: E402
from tests.sweep.judge import BOTH_FAIL, EXCEPTION, PASS  # noqa: E402
from tests.sweep.results import Conditions, ResultsFile, UnitResult  # noqa: E402
from tests.sweep.workers import Setup, judge_units  # noqa: E402

register_backend()

FLOATS: Final = ("float32", "bfloat16")
OUT: Final = Path(__file__).resolve().parents[2] / ".sweep" / "gpu.jsonl"
SHOWN: Final = 60  # failures that are printed in the end
EVERY: Final = 50  # units, a line of progress
TEXT: Final = 220  # characters of a difference
KNOWN: Final = (  # reviewed, beside those of every device
    Known(
        "index_fill", "torch 2.11 guesses a size: it is refused, and left to eager", "*", BACKWARD
    ),
    Known(
        "torch.ops.aten._safe_softmax.default",
        "numbers that cancel: within one ulp of float32, in which the sum is taken",
        "bfloat16",
        BACKWARD,
    ),
)


def sampled(count: int, seed: int, device: str) -> list[str]:
    """Names of operators, the same for the same seed."""
    kinds = {DTYPES[name] for name in FLOATS}
    known = [name for name, info in operators().items() if kinds & info.supported_dtypes(device)]
    return sorted(random.Random(seed).sample(sorted(known), min(count, len(known))))


def matching(patterns: Sequence[str]) -> list[str]:
    """Names of operators that match a pattern."""
    return [n for n in operators() if any(fnmatchcase(n, pattern) for pattern in patterns)]


def wanted_units(names: Sequence[str], device: str) -> list[Unit]:
    """Their units in both types and both directions."""
    chosen = set(names)
    return [unit for unit in units(("*",), FLOATS, device=device) if unit.op in chosen]


def known(unit: Unit) -> str | None:
    """Why a unit may fail; None when it may not."""
    here = (one.reason for one in KNOWN if one.covers(unit))
    return reason_for(unit) or next(here, None)


def failures(result: UnitResult) -> Iterator[str]:
    """What is wrong of a unit, a line each; what was reviewed is said so."""
    reason = known(result.unit)
    why = f" (known: {reason})" if reason else ""
    for outcome in result.outcomes:
        if outcome.verdict == EXCEPTION:
            said = "; ".join(f"{what}: {how}"[:TEXT] for what, how in outcome.differences.items())
            yield f"{result.unit}, sample {outcome.sample}: {said}{why}"


def judged(
    todo: Sequence[Unit], setup: Setup, file: ResultsFile, deadline: float
) -> list[UnitResult]:
    """All that is done in time; each is kept as it comes."""
    begin = time.monotonic()
    results: list[UnitResult] = []
    for result in judge_units(todo, setup):
        file.add(result)
        results.append(result)
        for line in failures(result):
            print(line, flush=True)
        seconds = time.monotonic() - begin
        if len(results) % EVERY == 0:
            print(f"{seconds:6.1f} s  {len(results)} of {len(todo)} units", flush=True)
        if seconds > deadline:
            break
    return results


def summary(results: Sequence[UnitResult], todo: Sequence[Unit], seconds: float) -> str:
    """The figures, and every failure again."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    counts = Counter(outcome.verdict for outcome in outcomes)
    generated = sum(1 for outcome in outcomes if outcome.generated)
    lines = [line for result in results for line in failures(result)]
    none = [str(result.unit) for result in results if result.why_none]
    head = (
        f"{len({unit.op for unit in todo})} operators, {len(results)} of {len(todo)} units,"
        f" {len(outcomes)} cases in {seconds:.0f} s: {counts[PASS]} pass, {generated} with kernels,"
        f" {counts[BOTH_FAIL]} fail with the peer too, {counts[EXCEPTION]} wrong,"
        f" {len(none)} units without samples"
    )
    left_out = [f"… {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*lines[:SHOWN], *left_out, head])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sweep", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="operators")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--ops", nargs="+", metavar="PATTERN", help="these instead")
    parser.add_argument("--samples", type=int, default=2, help="at most so many of each unit")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one run of a case")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines, one a unit")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a sample; 0 if nothing is wrong without a reviewed reason, and all was done."""
    chosen = parsed(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu tries the script itself")
        return 2
    names = matching(chosen.ops or ()) or sampled(chosen.count, chosen.seed, chosen.device)
    todo = wanted_units(names, chosen.device)
    file = ResultsFile(chosen.out)
    file.begin(Conditions(torch.__version__, "stator", "aot_eager", chosen.samples))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        setup = Setup(
            backend="stator",
            peer="aot_eager",
            samples=chosen.samples,
            workers=chosen.workers,
            limit=chosen.limit,
            memory=0,
            logs=Path(logs),
            device=chosen.device,
        )
        results = judged(todo, setup, file, chosen.deadline)
    print(f"\n{summary(results, todo, time.monotonic() - begin)}", flush=True)
    wrong = [r for r in results if any(failures(r)) and known(r.unit) is None]
    return 0 if not wrong and len(results) == len(todo) else 1


if __name__ == "__main__":
    sys.exit(main())
