"""`stator.minifier`: the smallest graph and inputs that fail as the given ones do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from stator.debug.minify.case import Case, case_of
from stator.debug.minify.checks import Asked, Checker, Elsewhere, Fails, Here, needs_isolation
from stator.debug.minify.failure import Failure
from stator.debug.minify.inputs import consolidate_inputs
from stator.debug.minify.judge import How
from stator.debug.minify.local import find_local
from stator.debug.minify.record import fresh, record
from stator.debug.minify.script import Made, write_script
from stator.debug.minify.search import OutOfTime, Search
from stator.debug.minify.sizes import shrink_sizes, simplify_constants
from stator.debug.minify.state import State
from stator.debug.minify.structure import cut_windows, drop_dead, remove_outputs, truncate
from stator.debug.minify.tensors import make_up_inputs
from stator.debug.minify.worker import started_worker
from stator.errors import StatorError

Tell = Callable[[str, int, int], None]  # what is tried, nodes left, nodes at the beginning


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to minimise."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler
    dynamic: bool = False  # compile with symbolic sizes
    folder: Path | None = None  # the script goes here, and where the search stands
    failure: Failure | None = None  # what is wrong, if that is known
    isolate: bool | None = None  # in processes of their own; None: where that is needed
    timeout: float | None = None  # seconds until a graph hangs; None: by its size
    seconds: float | None = None  # that the search may take
    record_in: Path | None = None  # recorded values go to files here, not into memory
    tell: Tell = lambda what, left, begun: None


@dataclass(frozen=True, slots=True)
class Minified:
    """A minimised graph and its inputs, which unpack like a pair."""

    module: fx.GraphModule
    inputs: list[Any]
    failure: Failure
    script: Path | None  # that shows the failure, on its own
    begun: int  # nodes that computed something, at the beginning
    left: int  # and at the end
    tries: int
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.module, self.inputs))


def minifier(
    fx_graph: fx.GraphModule, inputs: Sequence[Any], fails: Fails | None = None, **wishes: Any
) -> Minified:
    """The smallest graph and inputs that fail as these do; `module, inputs = minifier(…)`.

    `fails(module, inputs)` says whether a graph fails.  Without it, graphs are compiled by Stator
    and compared with eager mode and float64.  Wishes are the fields of `Wishes`.
    """
    chosen = Wishes(**wishes)
    return minimise(case_of(fx_graph, inputs), fails, chosen)


def minimise(case: Case, fails: Fails | None, wishes: Wishes) -> Minified:
    """Minimise a case, in this process if that is safe."""
    start = time.perf_counter()
    found = _minimise_safely(case, fails, wishes)
    return replace(found, seconds=time.perf_counter() - start)


def _minimise_safely(case: Case, fails: Fails | None, wishes: Wishes) -> Minified:
    how = How(wishes.options, wishes.dynamic)
    if fails is not None:
        asked = Asked(fails)
        return _minimise(case, asked, how, wishes, asked.first(case))
    with ExitStack() as stack:
        known = wishes.failure
        if wishes.isolate is False or (known is not None and not needs_isolation(known)):
            known = known or Here(how).first(case)
            how = _plainest(how, known)
            return _minimise(case, Here(how), how, wishes, known)
        worker = stack.enter_context(started_worker())
        elsewhere = Elsewhere(how, worker, wishes.timeout)
        known = known or elsewhere.first(case)
        how = _plainest(how, known)
        needed = wishes.isolate or (known is not None and needs_isolation(known))
        checker: Checker = replace(elsewhere, how=how) if needed else Here(how)
        return _minimise(case, checker, how, wishes, known)


def _plainest(how: How, failure: Failure | None) -> How:
    """With symbolic sizes only if the failure needs them."""
    return how if failure is None or failure.dynamic else replace(how, dynamic=False)


def resume(folder: Path, **wishes: Any) -> Minified:
    """Go on with a search that was interrupted, from the smallest case that it had found."""
    state = State(folder / "state")
    if not state.exists:
        raise StatorError(f"no search was begun in {folder}", hint="start one without --resume")
    case, failure, how, begun = state.load()
    told = {"failure": failure, "folder": folder, "options": how.options, "dynamic": how.dynamic}
    found = minimise(case, None, Wishes(**{**wishes, **told}))
    return replace(found, begun=begun)


def _minimise(
    case: Case, checker: Checker, how: How, wishes: Wishes, wanted: Failure | None
) -> Minified:
    if wanted is None:
        raise StatorError(
            "the graph does not fail", hint="give the inputs, options and `dynamic` it fails with"
        )
    begun = len(case.calls)
    search = _search(case, checker, how, wishes, wanted)
    if wishes.seconds is not None:
        search.deadline = time.perf_counter() + wishes.seconds
    if wishes.record_in is not None:
        search.record_in(record(case, wishes.record_in))
    search.save(case)
    ways = _shrink(search)
    case, script = search.case, None
    if not needs_isolation(wanted):
        now = checker.first(case)
        wanted = now if now == wanted else wanted  # in the words of the smaller graph
    if wishes.folder is not None and not isinstance(checker, Asked):
        script = write_script(wishes.folder, case, wanted, how, ways)
    module = fx.GraphModule(case.module, case.graph)
    left = len(case.calls)
    return Minified(module, fresh(case.inputs), wanted, script, begun, left, search.tries)


def _search(case: Case, checker: Checker, how: How, wishes: Wishes, wanted: Failure) -> Search:
    begun = len(case.calls)
    state = State(wishes.folder / "state") if wishes.folder is not None else None

    def save(found: Case) -> None:
        if state is not None and not isinstance(checker, Asked):
            state.save(found, wanted, how, begun)

    return Search(
        case,
        lambda candidate: checker.shows(candidate, wanted),
        save,
        lambda what, best: wishes.tell(what, len(best.calls), begun),
    )


def _shrink(search: Search) -> dict[int, Made]:
    """All strategies; returns which inputs are made up."""
    try:
        find_local(search)
        _cut(search)
        while search.improve("inputs", consolidate_inputs, 1):
            pass
        shrink_sizes(search)
        simplify_constants(search)
        while search.improve("inputs", consolidate_inputs, 1):
            pass
        return make_up_inputs(search)
    except OutOfTime:
        return {}


def _cut(search: Search) -> None:
    """Cut the graph, in large pieces as long as that works, then in smaller ones."""
    granularity = _largest_power(len(search.case.calls))
    while granularity >= 1:
        if _cut_once(search, granularity):
            # Again from the largest pieces: what failed before may do now.
            granularity = _largest_power(len(search.case.calls))
        else:
            granularity //= 2


def _cut_once(search: Search, granularity: int) -> bool:
    top = granularity == _largest_power(len(search.case.calls))
    many = len(search.case.outputs) > len(search.case.calls) // 2
    if top and search.improve("dead code", drop_dead, granularity):
        return True
    if (top or many) and search.improve("outputs", remove_outputs, granularity):
        return True
    if search.improve(f"suffixes by {granularity}", truncate, granularity):
        return True
    if search.improve(f"windows of {granularity}", cut_windows, granularity):
        return True
    # The last resort.
    return granularity == 1 and search.improve("outputs", remove_outputs, 1)


def _largest_power(count: int) -> int:
    """The largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1) if count else 0
