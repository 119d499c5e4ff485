"""Which cut is taken: as the options say, of those that candidates.py finds.

Of all cuts, those matter that no other beats in both time and peak.  Along them, from least memory
to least time, the peak rises as the time falls.  So a limit in bytes is answered by the quickest of
them that fits.  A budget is a share of what the default keeps: a row of cuts leads from there down
to inputs alone, each of which keeps less than the one before and holds no more at once.  So more of
either never takes less memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from torch import fx

from stator.aot.partition.candidates import (
    PRICES,
    SHARES,
    Candidate,
    candidates,
    default_of,
)
from stator.aot.partition.classify import Classes
from stator.aot.partition.cut import AGGRESSIVE, cut_at, network_of, save_everything
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.profile import measured
from stator.aot.partition.rates import prices_of
from stator.aot.partition.report import Choices, Point, Value
from stator.aot.partition.simulate import Simulator
from stator.aot.partition.weigh import Policy, Scales, bytes_of
from stator.errors import MemoryLimitError
from stator.graph.verify import user_line

Foresee = Callable[[Cut], int]  # the peak of a step, from finished plans

SLACK: Final = 1.25  # how far plans may take less than the simulation says
SURE: Final = 0.005  # of the peak: what is small enough not to matter
FEW: Final = 512  # nodes, of which a plan takes no time
WORTH_A_PLAN: Final = 1024  # bytes that budgets can save, for each node beyond them
LEVEL: Final = 1.0005  # peaks that differ by less, in scalars and masks, are equal
WORTH: Final = 1 / 3  # of the bytes that a cut does not keep: it has to hold so much less at once
NEAR: Final = 1.05  # unless its peak is as far above the least
SHOWN: Final = 8  # holders that an error names
TRIED: Final = 6  # plans that are made before a limit is refused


@dataclass(frozen=True, slots=True)
class Wish:
    """How much memory a step may take, and what is known about costs."""

    kernels: bool = True
    budget: float = 1.0  # share of what the quickest cut keeps
    limit: int | None = None  # bytes that a step may hold at once
    aggressive: bool = False
    policy: Policy | None = None
    profile: bool = False
    knapsack: str = "dp"
    report: Callable[[Choices], None] | None = None  # gets the curve


def choose(joint: Joint, classes: Classes, wish: Wish, foresee: Foresee | None = None) -> Cut:
    """The cut that `wish` asks for; `foresee` checks it against finished plans."""
    asked = wish.budget < 1 or wish.limit is not None or wish.aggressive
    scales = Scales(joint, classes, wish.policy, _times(joint, wish), asked)
    network = network_of(joint, classes, scales)
    if not wish.kernels:
        return save_everything(network)
    usual = None
    if wish.budget >= 1 and wish.limit is None:
        usual = cut_at(network, AGGRESSIVE) if wish.aggressive else _usual(joint, classes, network)
        if wish.report is None:
            return usual
    # Whoever asks for a curve sees what budgets and limits would do, which trust the caller.
    trusting = network
    if not scales.trusts_caller:
        trusting = network_of(joint, classes, replace(scales, trusts_caller=True))
    simulator = Simulator(joint, classes, trusting)
    found = candidates(simulator, wish.knapsack)
    if wish.limit is not None:
        chosen = _within_limit(found, wish.limit, foresee)
    elif usual is None:
        chosen = _within_budget(found, wish.budget, foresee)
    else:
        careful = Simulator(joint, classes, network)
        label = "aggressive recomputation" if wish.aggressive else "the default"
        chosen = Candidate(careful, usual, label)
    if wish.report is not None:
        wish.report(_choices(simulator, found, chosen))
    return chosen.cut


def _usual(joint: Joint, classes: Classes, network: Network) -> Cut:
    """The default cut; what a step under it holds is foreseen only if several are in question."""
    price = prices_of(network.nodes).usual
    usual, lean = (cut_at(network, price * factor) for factor in PRICES[:2])
    if set(usual.kept) == set(lean.kept):
        return usual
    return default_of(Simulator(joint, classes, network), usual, lean).cut


def _times(joint: Joint, wish: Wish) -> dict[fx.Node, float]:
    return measured(joint.graph.nodes) if wish.profile else {}


def frontier(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in time and in peak, by rising peak and falling time."""
    best: list[Candidate] = []
    for candidate in sorted(found, key=lambda one: (one.peak, one.time)):
        if not best or candidate.time < best[-1].time:
            best.append(candidate)
    return best


def _within_budget(found: Sequence[Candidate], budget: float, foresee: Foresee | None) -> Candidate:
    """The cut for a share of what the first, the default, keeps: so far down the row."""
    room = max(budget * found[0].saved, min(one.saved for one in found))
    if foresee is None or not (_is_in_doubt(found) or _is_small(found)):
        return next(one for one in _row(found) if one.saved <= room)
    planned, row = cache(foresee), list(_row(found))
    end = _lowest_end(row, _ends(found), planned)
    if end is row[-1] and not _is_in_doubt(found):
        return next(one for one in row if one.saved <= room)
    return _confirmed([*row[:-1], end], room, planned)


def _is_small(found: Sequence[Candidate]) -> bool:
    """Whether plans of a row's two ends take no time, to see that the simulation has them right."""
    return len(found[0].simulator.nodes) <= FEW


def _is_in_doubt(found: Sequence[Candidate]) -> bool:
    """Whether plans could tell what holds less where the simulation cannot, and it matters.

    The simulation is right where small values are nothing beside the peak.  Where a budget can buy
    little for so many nodes, plans would take longer than that is worth.
    """
    default, ends = found[0], _ends(found)
    doubt = max(one.doubt for one in (default, *ends))
    gain = default.peak - min(end.peak for end in ends)
    is_worth_it = gain > WORTH_A_PLAN * (len(default.simulator.nodes) - FEW)
    return doubt > SURE * default.peak and is_worth_it


def _ends(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that keep least: the row leads to one of them."""
    least = min(one.saved for one in found)
    return [one for one in found if one.saved == least]


def _lowest_end(row: Sequence[Candidate], ends: Sequence[Candidate], foresee: Foresee) -> Candidate:
    """The end of a row, or of those that keep as little the first that plans find as low as that.

    Where none of those that are tried holds no more than the default, the one that holds least.
    """
    others = sorted((end for end in ends if end is not row[-1]), key=lambda end: end.peak)
    most = foresee(row[0].cut) * LEVEL
    planned: list[tuple[int, Candidate]] = []
    for end in (row[-1], *others[: TRIED - 1]):
        planned.append((foresee(end.cut), end))
        if planned[-1][0] <= most:
            return end
    return min(planned, key=lambda plan: plan[0])[1]


def _row(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Cuts from the default down to one that keeps least: less and less, in no more memory.

    Each is followed by the quickest that keeps less by a step, holds no more at once, and is worth
    it.
    """
    default, ends = found[0], _ends(found)
    least, lowest = ends[0].saved, NEAR * min(end.peak for end in ends)

    def is_above_an_end(one: Candidate) -> bool:
        """Else a smaller budget would have to take more memory."""
        return any(end.is_within(one.peak * LEVEL) for end in ends)

    def most_worth(one: Candidate) -> float:
        """The highest peak with which it is: what is not kept is not held, or no peak is lower."""
        gone = WORTH * (default.saved - one.saved)
        return max(default.peak - gone, lowest)

    yield default
    has_end = is_above_an_end(default)  # where not, it cannot be helped
    last, most = default, default.peak
    quickest_first = sorted(found, key=lambda one: (one.time, one.saved))
    while last.saved > least:
        step_below = max(last.saved - default.saved / SHARES, least)
        less = (one for one in quickest_first if one.saved <= step_below)
        low = (one for one in less if one.is_within(min(most * LEVEL, most_worth(one))))
        following = next((one for one in low if not has_end or is_above_an_end(one)), None)
        last = following or min(ends, key=lambda one: (one.peak, one.time))
        most = min(most, last.peak)
        yield last


def _confirmed(row: Sequence[Candidate], room: float, foresee: Foresee) -> Candidate:
    """The first of a row that keeps no more than `room` and is in its place by finished plans too.

    Plans take longest, so the row is halved: a cut in the middle stands where it holds no more than
    what bounds it on the left and no less than what does on the right, else it is left out.  Two
    budgets go the same way until some such cut is between them, so the smaller never holds more.
    """
    planned = cache(lambda place: foresee(row[place].cut))
    left, right = 0, len(row) - 1
    between = list(range(left + 1, right))
    if planned(right) > planned(left) * LEVEL:
        return row[right]  # the default holds least: all below it holds the same
    while between:
        middle = between.pop(len(between) // 2)
        is_below_left = planned(middle) <= planned(left) * LEVEL
        if not is_below_left or planned(right) > planned(middle) * LEVEL:
            continue
        if row[middle].saved <= room:
            right = middle
        else:
            left = middle
        between = [place for place in between if left < place < right]
    return row[right]


def _within_limit(found: Sequence[Candidate], limit: int, foresee: Foresee | None) -> Candidate:
    """The quickest whose peak is within the limit."""
    line = frontier(found)
    for candidate in reversed(line):
        if candidate.peak > limit * (1 if foresee is None else SLACK):
            continue
        if foresee is None or foresee(candidate.cut) <= limit:
            return candidate
    # Where buffers are small, plans are further from the simulation than it sees: some are made.
    lowest = sorted(found, key=lambda one: (one.peak, one.time))[: 1 if foresee is None else TRIED]
    plans = [(one.peak if foresee is None else foresee(one.cut), one) for one in lowest]
    reachable, least = min(plans, key=lambda plan: plan[0])
    if reachable <= limit:
        return least
    held = ", ".join(f"{name} ({size} bytes)" for name, size in least.holders()[:SHOWN] if size)
    raise MemoryLimitError(
        f"memory_limit is {limit} bytes, and a step takes at least {reachable}",
        hint=f"alive at that peak: {held}; give at least {reachable}, or a smaller batch",
    )


def _choices(simulator: Simulator, found: Sequence[Candidate], chosen: Candidate) -> Choices:
    line = frontier([*found, chosen])
    quickest = min(one.time for one in [*found, chosen])
    shown = line if chosen in line else sorted([*line, chosen], key=lambda one: one.peak)
    points = [Point(one.saved, one.peak, one.time / quickest, one.label) for one in shown]
    held = tuple(f"{name}: {size} bytes" for name, size in line[0].holders()[:SHOWN] if size)
    return Choices(
        sum(bytes_of(node.meta.get("val")) for node in simulator.joint.primals),
        tuple(points),
        points[shown.index(chosen)],
        _values(chosen),
        held,
    )


def _values(chosen: Candidate) -> tuple[Value, ...]:
    """What is kept, beyond inputs as they are, and what is computed twice."""
    network, cut = chosen.simulator.network, chosen.cut
    kept, again = frozenset(cut.kept), cut.again - chosen.simulator.classes.movable
    shown = [
        _value(node, network, node in kept)
        for node in network.nodes
        if node in cut.copied or (node.op == "call_function" and (node in kept or node in again))
    ]
    return tuple(sorted((value for value in shown if value.bytes), key=lambda value: -value.bytes))


def _value(node: fx.Node, network: Network, saved: bool) -> Value:
    weight = network.weights[node]
    again = weight.again
    if node.target is operator.getitem:  # a part of a result comes with the whole
        again += network.weights[node.all_input_nodes[0]].again
    would = "would cost" if saved else "costs"
    why = f"to compute it again {would} {_words(again)}, to keep it {_words(weight.keep)}"
    why += ", besides its memory" if weight.bytes else ""
    if saved and again < weight.keep:
        why += "; what it is computed from would have to be had again too"
    why = f"{weight.why}; {why}" if weight.why else why
    called = getattr(node.target, "__name__", str(node.target))
    return Value(node.name, called, weight.bytes, saved, _layer(node), user_line(node) or "", why)


def _layer(node: fx.Node) -> str:
    """Where in the model the node's module is, without the names that Dynamo puts before."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]) if modules else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)


def _words(cost: float) -> str:
    """A cost for people."""
    if cost == float("inf"):
        return "too much: it cannot be done"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if cost < 1024 or unit == "GiB":
            break
        cost /= 1024
    return f"as much as {cost:.3g} {unit} moved"
