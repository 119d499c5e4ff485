"""Cuts worth a look, from least time to least memory.

The price of memory is raised step by step; at each price the cheapest cut is exact.  Equal layers
change their mind at one price, all together, so between two prices there are cuts where the first
part of the program is cut at the higher one.  The thinnest cut, and the values that separate the
program into parts (see simulate.py), are thinned, keeping every second value, every third, …: all
between is computed again in one go.  The least that can be kept
is what is given anyway; there the backward computes the values of a thin cut first, and the rest
from those (`Cut.relays`), so that this takes no more memory than the thin cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from torch import fx

from stator.aot.partition.cut import cut_at, cut_keeping
from stator.aot.partition.knapsack import SOLVERS, Solver
from stator.aot.partition.lives import ARENA
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.rates import prices_of
from stator.aot.partition.simulate import Simulator
from stator.aot.partition.weigh import Weight, bytes_of

PRICES: Final = tuple(2.0**power for power in range(10))  # in the usual price; see rates.py
# When the default computes more again, at twice the usual price.  Measured: models that keep a
# third less so take no longer.
LEAN_KEPT: Final = 0.8  # of what is kept otherwise: else it is not looked at
LEAN_PEAK: Final = 0.9
LEAN_TIME: Final = 1.03
# Else the first part of the program is cut at a price at which products are still kept: as much of
# it as takes a time that cannot be measured.
SLIGHT_TIME: Final = 1.006
TRIES: Final = 5  # to find that part
FORBIDDING: Final = 2.0**24  # nothing is kept that can be computed
THINNED: Final = (2, 3, 4, 6, 8)  # every how many-th value is kept
MOST_WORTH: Final = 2.0**50  # of a value that cannot be computed again
SHARES: Final = 20  # budgets that have a cut of their own
STEPS: Final = 16  # that the way from all to nothing is divided into, about


class Candidate:
    """A cut with what is foreseen of it: its peak when somebody asks, as that takes longest."""

    def __init__(self, simulator: Simulator, cut: Cut, label: str) -> None:
        self.cut = cut
        self.label = label
        self.saved = simulator.saved(cut)
        self.time = simulator.base + simulator.extra(cut)  # of a step, in bytes of traffic
        self.simulator = simulator

    @cached_property
    def marks(self) -> list[int]:
        """The most bytes of each place."""
        return self.simulator.marks(self.cut)

    @property
    def peak(self) -> int:
        """Bytes that a step under it holds at most."""
        return self.simulator.steady + sum(self.marks)

    @property
    def doubt(self) -> int:
        """Bytes of that which a plan may have more or less of: what is small.

        Which of the small values are in memory, and where in the arena, the fuser decides.
        """
        return self.marks[ARENA]

    def is_within(self, most: float) -> bool:
        """Whether the peak is not above `most`; what is kept alone may answer that."""
        return self.simulator.least(self.cut) <= most and self.peak <= most

    def holders(self) -> tuple[tuple[str, int], ...]:
        """What is alive at the peak."""
        return self.simulator.holders(self.cut)


def candidates(simulator: Simulator, solver: str = "dp") -> list[Candidate]:
    """Every cut that is looked at, the default one first.

    They are the same for every budget: of two budgets, the smaller sees what beats its own.
    """
    search = _Search(simulator)
    search.run()
    for share in range(SHARES - 1, 0, -1):
        search.fill(share / SHARES, SOLVERS[solver])
    default = default_of(simulator, search.by_price[0], search.by_price[1])
    others = (one for key, one in search.found.items() if key != _key(default.cut))
    return [default, *others]


def default_of(simulator: Simulator, usual: Cut, lean: Cut) -> Candidate:
    """The cut at the usual price, or at a higher one that saves much memory and costs little time.

    Else a part of the program is cut at a price between, for a time that nobody notices.  A price
    is paid for bytes that are kept; what a step holds at once may be other bytes, so the peak is
    looked at before more is computed again.
    """
    first, second = (Candidate(simulator, cut, "the default") for cut in (usual, lean))
    worth = second.saved <= LEAN_KEPT * first.saved and second.time <= LEAN_TIME * first.time
    may_be = prices_of(simulator.network.nodes).may_be_lean
    if may_be and worth and second.peak <= LEAN_PEAK * first.peak:
        return second
    return _slightly_leaner(simulator, first)


def _slightly_leaner(simulator: Simulator, usual: Candidate) -> Candidate:
    """`usual`, or a cut that computes a little more again from the beginning of the program."""
    network, most = simulator.network, SLIGHT_TIME * usual.time
    prices = prices_of(network.nodes)
    found, low, share, high = usual, 0.0, 1.0, 1.0
    for _ in range(TRIES):
        cut = _split_price(network, (prices.slight, prices.usual), share)
        slight = Candidate(simulator, cut, "the default")
        if slight.time <= most:
            found, low = slight, share
        else:
            high = share
        if low == high:
            break
        share = (low + high) / 2
    return found if found.saved < usual.saved and found.is_within(usual.peak) else usual


class _Search:
    """Cuts by what they keep, each foreseen once."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.network = simulator.network
        usual = prices_of(self.network.nodes).usual
        self.prices = [usual * factor for factor in PRICES]
        self.by_price = [cut_at(self.network, price) for price in self.prices]
        self.found: dict[Hashable, Candidate] = {}

    def run(self) -> None:
        """Look at all that do not depend on a budget."""
        by_price = list(zip(self.prices, self.by_price, strict=True))
        for price, cut in by_price:
            self._add(cut, f"a byte kept costs {price:g} bytes moved")
        thin = min(self.found.values(), key=lambda found: (found.peak, found.saved)).cut
        self._between(by_price)
        nothing = self.network.cut(_inputs_only)
        self._add(nothing, "what is given alone")
        self._thinned(_own(self.network, thin), "of the thinnest cut", nothing)
        self._thinned(self.simulator.separators(), "that separate parts", nothing)

    def _thinned(self, values: Sequence[fx.Node], what: str, nothing: Cut) -> None:
        """Cuts that keep some of `values` and all else between is computed again."""
        for every in (1, *THINNED):
            chosen = values[every - 1 :: every]
            if not chosen:
                continue
            cut = cut_keeping(self.network, chosen, FORBIDDING)
            self._add(cut, f"one of {every} values {what}")
            if (relayed := _relayed(self.network, nothing, cut)) is not None:
                label = f"what is given alone, {len(relayed.relays)} values {what} computed first"
                self._add(relayed, label)

    def fill(self, budget: float, solve: Solver) -> None:
        """A cut that uses a budget up, if none does: of what the next larger keeps, what fits."""
        by_price = self.by_price
        saved = [self.simulator.saved(cut) for cut in by_price]
        room = int(budget * saved[0])
        near = room - saved[0] / SHARES / 2
        if any(near <= one.saved <= room for one in self.found.values()):
            return
        place = next((i for i, size in enumerate(saved) if size <= room), 0)
        if not place:
            return
        above, below = by_price[place - 1 : place + 1]
        kept_anyway = set(below.kept)
        items = [node for node in above.kept if node not in kept_anyway]
        weights = [self.network.weights[node] for node in items]
        worths = [min(weight.again, MOST_WORTH) for weight in weights]
        chosen = solve([weight.bytes for weight in weights], worths, room - saved[place])
        kept = {*below.kept, *(items[place] for place in chosen)}
        price = self.prices[place]
        self._add(
            cut_keeping(self.network, kept, price), f"as much as a budget of {budget:g} holds"
        )

    def _between(self, by_price: Sequence[tuple[float, Cut]]) -> None:
        """Cuts between those at two prices, in steps of about the same size."""
        simulator = self.simulator
        most = max(simulator.saved(by_price[0][1]), 1)
        for (low, more), (high, less) in pairwise(by_price):
            gap = simulator.saved(more) - simulator.saved(less)
            parts = min(-(-gap * STEPS // most), STEPS)
            for part in range(1, parts):
                label = f"{high:g} for the first {part} of {parts} parts, {low:g} for the rest"
                cut = _split_price(self.network, (high, low), part / parts)
                self._add(cut, label)

    def _add(self, cut: Cut, label: str) -> None:
        key = _key(cut)
        if key in self.found:
            return
        self.found[key] = Candidate(self.simulator, cut, label)


def _key(cut: Cut) -> Hashable:
    return (frozenset(cut.kept), cut.relays)


def _own(network: Network, cut: Cut) -> list[fx.Node]:
    """What a cut keeps that costs memory, sizes aside; also what the caller gets anyway."""

    def held(node: fx.Node) -> int:
        made = bytes_of(node.meta.get("val")) if node.op == "call_function" else 0
        return max(network.weights[node].bytes, made)

    return [node for node in cut.kept if held(node) > 64]


def _inputs_only(node: fx.Node, weight: Weight) -> float:
    """A price at which nothing is kept that can be computed, not even what the caller gets."""
    if node.op == "placeholder":
        return weight.price(FORBIDDING)
    return weight.keep + FORBIDDING * max(weight.bytes, bytes_of(node.meta.get("val")))


def _split_price(network: Network, prices: tuple[float, float], share: float) -> Cut:
    """A higher price for the first part of what the program computes."""
    computed = np.array([node.op == "call_function" for node in network.nodes], dtype=bool)
    return network.cut_at(np.where(computed.cumsum() <= share * computed.sum(), *prices))


def _relayed(network: Network, nothing: Cut, thin: Cut) -> Cut | None:
    """`nothing` with the values of `thin` computed first; None if there are none."""
    relays = tuple(node for node in _own(network, thin) if node not in nothing.kept)
    if not relays or any(node not in nothing.again for node in relays):
        return None
    kept = dict.fromkeys((*nothing.kept, *(node for node in thin.kept if node not in relays)))
    return replace(nothing, kept=tuple(kept), again=thin.again, relays=relays)
