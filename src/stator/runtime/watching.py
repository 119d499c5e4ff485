"""What a program tells while it runs, as the options ask for it."""

from __future__ import annotations

from collections.abc import Mapping

from stator.core.events import Compilation
from stator.options import Options
from stator.runtime.memory import Memory
from stator.runtime.native.watch import Clock, Ranges, Times, Watch, Watches
from stator.runtime.origins import Programmed, labels_of
from stator.runtime.plan import Plan


def ranges_of(plan: Plan, options: Options, record: Compilation) -> Mapping[int, str]:
    """Names of the steps that torch's profiler shall see."""
    if not options.profile_ranges:
        return {}
    reason = Ranges.why_not() if options.executor == "native" else None
    if reason is not None:
        record.notes.append(f"no ranges for the profiler: {reason}")
        return {}
    return labels_of(plan)


def watch_of(plan: Plan, ranges: Mapping[int, str], times: Times | None) -> Watch | None:
    """What stands around the steps of a native program; None: nothing."""
    found: list[Watch] = []
    if ranges:
        found.append(Ranges(ranges))
    if times is not None:
        found.append(Clock(times, labels_of(plan)))
    return Watches(tuple(found)) if found else None


def note_plan(plan: Plan, memory: Memory, label: str, record: Compilation) -> Times | None:
    """Keep a plan for the explanation that is asked for; room for its times, or None."""
    if record.details is None:
        return None
    times = Times.of(len(plan.steps))
    record.details.plans[label] = Programmed(plan, memory, times)
    return times
