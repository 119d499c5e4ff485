"""Which cut a budget, a limit or a policy gets."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from stator.aot.partition.candidates import Candidate, candidates
from stator.aot.partition.choose import (
    LEVEL,
    Wish,
    _confirmed,
    _lowest_end,
    choose,
    frontier,
)
from stator.aot.partition.classify import Classes, classify
from stator.aot.partition.cut import network_of
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.profile import _device_of
from stator.aot.partition.report import Choices
from stator.aot.partition.simulate import Simulator
from stator.aot.partition.split import Split, split
from stator.aot.partition.weigh import Scales, bytes_of
from stator.errors import MemoryLimitError
from stator.torch_api import make_fx
from tests.aot.partition.programs import leaf, run_halves, targets, traced
from tests.passes.on_cuda import CUDA, fakes, graph_of

DEPTH = 6
BUDGETS = [part / 19 for part in range(20)]


def tower(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Products with activations between, and a residual around each."""
    for weight in weights:
        x = x + (x @ weight).sigmoid() * x.tanh()
    return [x.sum()]


def tower_inputs() -> list[Tensor]:
    return [leaf(64, 16), *(leaf(16, 16) for _ in range(DEPTH))]


def facts() -> tuple[Joint, Classes]:
    joint = Joint.of(traced(tower, *tower_inputs()))
    return joint, classify(joint)


def simulator(joint: Joint, classes: Classes) -> Simulator:
    scales = Scales(joint, classes, trusts_caller=True)
    return Simulator(joint, classes, network_of(joint, classes, scales))


def kept_bytes(joint: Joint, cut: Cut) -> int:
    own = [node for node in cut.kept if node not in joint.primals]
    return sum(bytes_of(node.meta["val"]) for node in own)


# Budgets


def test_budget_nothing_keeps_inputs_only() -> None:
    joint, classes = facts()

    cut = choose(joint, classes, Wish(budget=0))

    assert all(node.op == "placeholder" for node in cut.kept)


def test_budget_nothing_keeps_no_output_either() -> None:
    joint = Joint.of(traced(lambda x, w: [(x @ w).exp()], leaf(8, 4), leaf(4, 4)))

    cut = choose(joint, classify(joint), Wish(budget=0))

    assert all(node.op == "placeholder" for node in cut.kept)


def test_an_output_that_a_thin_cut_keeps_is_computed_first_like_the_rest() -> None:
    def with_hidden(x: Tensor, *weights: Tensor) -> list[Tensor]:
        """The last hidden state is the caller's too, by a view that a product reads."""
        for weight in weights:
            x = x + (x @ weight).sigmoid() * x.tanh()
        hidden = F.layer_norm(x, [16]).view(4, 16, 16)
        return [hidden.view(64, 16) @ weights[0], hidden]

    joint = Joint.of(traced(with_hidden, *tower_inputs()))
    found = candidates(simulator(joint, classify(joint)))

    least = min(one.saved for one in found)
    relayed = [one for one in found if one.cut.relays and "thinnest cut computed" in one.label]
    assert relayed
    assert all(one.saved == least for one in relayed)


def test_a_larger_budget_never_takes_less_memory() -> None:
    joint, classes = facts()
    simulated = simulator(joint, classes)
    peaks = [simulated.peak(choose(joint, classes, Wish(budget=b))) for b in BUDGETS]

    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1], "budgets change nothing"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(100, 125)), min_size=2, max_size=9))
def test_plans_have_the_last_word_on_a_budget(steps: list[tuple[int, int]]) -> None:
    """However far they are above the simulation, up to its slack: less never takes more."""
    simulated = accumulate((down for down, _ in steps), operator.sub, initial=1000)
    row: Any = [SimpleNamespace(saved=-n, peak=p, cut=n) for n, p in enumerate(simulated)]
    plans: list[int] = [
        one.peak * above for one, (_, above) in zip(row, [(0, 100), *steps], strict=True)
    ]

    def foresee(cut: Any) -> int:
        return int(plans[cut])

    taken: list[Any] = [_confirmed(row, one.saved, foresee).cut for one in row]

    peaks = [plans[cut] for cut in taken]
    assert all(cut >= place for place, cut in enumerate(taken)), "more is kept than may be"
    assert all(less <= more * LEVEL for more, less in pairwise(peaks)), peaks
    assert taken[-1] == len(row) - 1


def test_of_cuts_that_keep_least_plans_find_one_that_holds_no_more_than_the_default() -> None:
    cuts = [(3, 100), (1, 80), (0, 60), (0, 70), (0, 90)]
    found: list[Any] = [
        SimpleNamespace(saved=saved, peak=peak, cut=place)
        for place, (saved, peak) in enumerate(cuts)
    ]
    row, ends = found[:3], found[2:]
    plans: dict[Any, int] = {0: 100, 1: 95, 2: 150, 3: 140, 4: 90}

    assert _lowest_end(row, ends, plans.__getitem__) is ends[2]
    plans[4] = 145
    assert _lowest_end(row, ends, plans.__getitem__) is ends[1]


def test_all_budgets_choose_among_the_same_cuts() -> None:
    joint, classes = facts()
    known = {(one.cut.kept, one.cut.relays) for one in candidates(simulator(joint, classes))}

    for budget in BUDGETS[:-1]:
        cut = choose(joint, classes, Wish(budget=budget))
        assert (cut.kept, cut.relays) in known, f"budget {budget} has a cut of its own"


def test_a_budget_holds() -> None:
    joint, classes = facts()
    usual = kept_bytes(joint, choose(joint, classes, Wish()))

    for budget in BUDGETS:
        assert kept_bytes(joint, choose(joint, classes, Wish(budget=budget))) <= budget * usual


@pytest.mark.parametrize("solver", ["dp", "ilp", "greedy"])
@pytest.mark.parametrize("budget", [0, 0.2, 0.5, 0.8, 1])
def test_gradients_are_the_same_at_every_budget(budget: float, solver: str) -> None:
    inputs = tower_inputs()
    (value,) = tower(*inputs)
    expected = torch.autograd.grad(value, inputs)

    def pick(joint: Joint, classes: Classes, build: Any) -> Cut:
        return choose(joint, classes, Wish(budget=budget, knapsack=solver))

    halves: Split = split(traced(tower, *inputs), pick)
    _, grads = run_halves(halves, inputs, [torch.ones(())])

    torch.testing.assert_close(grads, list(expected))


def test_along_the_frontier_less_memory_takes_more_time() -> None:
    line = frontier(candidates(simulator(*facts())))

    assert len(line) > 1
    assert [one.peak for one in line] == sorted(one.peak for one in line)
    assert [one.time for one in line] == sorted((one.time for one in line), reverse=True)


# Limits


def test_the_quickest_cut_within_a_limit_is_taken() -> None:
    joint, classes = facts()
    simulated = simulator(joint, classes)
    line = frontier(candidates(simulated))

    for one in line:
        cut = choose(joint, classes, Wish(limit=one.peak))
        assert simulated.peak(cut) <= one.peak
        assert simulated.extra(cut) == pytest.approx(simulated.extra(one.cut))


def test_a_limit_below_all_cuts_names_what_is_reachable_and_what_holds_it() -> None:
    joint, classes = facts()
    least = frontier(candidates(simulator(joint, classes)))[0]

    with pytest.raises(MemoryLimitError) as caught:
        choose(joint, classes, Wish(limit=1000))

    assert str(least.peak) in caught.value.what
    assert "inputs and outputs" in str(caught.value.hint)


def test_plans_have_the_last_word_on_a_limit() -> None:
    joint, classes = facts()
    line = frontier(candidates(simulator(joint, classes)))
    limit = line[-1].peak
    tried: list[Cut] = []

    def foresee(cut: Cut) -> int:
        tried.append(cut)
        return limit + 1 if len(tried) == 1 else limit

    cut = choose(joint, classes, Wish(limit=limit), foresee)

    assert [kept(one) for one in tried] == [kept(line[-1].cut), kept(line[-2].cut)]
    assert kept(cut) == kept(line[-2].cut)


def test_a_plan_that_is_below_all_that_was_simulated_is_found() -> None:
    """Of small buffers an arena holds less: before a limit is refused, some plans are made."""
    joint, classes = facts()
    lowest = sorted(candidates(simulator(joint, classes)), key=lambda one: (one.peak, one.time))
    limit = lowest[0].peak // 2
    wanted = kept(lowest[2].cut)

    def foresee(cut: Cut) -> int:
        return limit if kept(cut) == wanted else limit + 100

    assert kept(choose(joint, classes, Wish(limit=limit), foresee)) == wanted
    with pytest.raises(MemoryLimitError, match=f"at least {limit}"):
        choose(joint, classes, Wish(limit=limit - 1), foresee)


def kept(cut: Cut) -> frozenset[fx.Node]:
    return frozenset(cut.kept)


# Policies, reports


def test_a_policy_has_its_way() -> None:
    joint, classes = facts()

    def policy(node: fx.Node) -> str | None:
        name = getattr(node.target, "__name__", "")
        return {"mm.default": "recompute", "tanh.default": "save"}.get(name)

    cut = choose(joint, classes, Wish(policy=policy))

    assert "mm.default" not in targets(cut.kept)
    assert targets(cut.kept).count("tanh.default") == DEPTH


def test_aggressive_recomputation_keeps_no_more_than_usual() -> None:
    joint, classes = facts()
    usual = kept_bytes(joint, choose(joint, classes, Wish()))

    assert kept_bytes(joint, choose(joint, classes, Wish(aggressive=True))) <= usual


def test_a_call_is_measured_where_its_tensors_are() -> None:
    x, y = fakes((2, 3), (3, 4))
    on_gpu = graph_of(torch.mm, x, y)
    on_cpu = make_fx(torch.mm, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3, 4))

    def device(module: fx.GraphModule) -> torch.device:
        (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        return _device_of(node)

    assert device(on_gpu) == CUDA
    assert device(on_cpu) == torch.device("cpu")


def test_costs_can_be_measured() -> None:
    joint, classes = facts()

    cut = choose(joint, classes, Wish(budget=0.5, profile=True))

    assert kept_bytes(joint, cut) <= kept_bytes(joint, choose(joint, classes, Wish()))


@pytest.mark.parametrize("aggressive", [False, True])
def test_the_report_has_the_curve_and_every_value(aggressive: bool) -> None:
    joint, classes = facts()
    seen: list[Choices] = []

    cut = choose(joint, classes, Wish(aggressive=aggressive, report=seen.append))

    assert cut == choose(joint, classes, Wish(aggressive=aggressive)), "asking changes the answer"

    (choices,) = seen
    assert choices.inputs == sum(bytes_of(node.meta["val"]) for node in joint.primals)
    assert choices.chosen in choices.points
    assert ("default" in choices.chosen.label) is not aggressive
    saved = {value.name for value in choices.values if value.saved}
    assert saved == {node.name for node in cut.kept if node.op == "call_function"}
    assert all("its memory" in value.why and value.bytes for value in choices.values)
    assert choices.holders


def test_candidates_are_all_different() -> None:
    found: list[Candidate] = candidates(simulator(*facts()))

    assert len({(kept(one.cut), one.cut.relays) for one in found}) == len(found)


def convolutions(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Residual blocks whose means are taken over the batch."""
    for weight in weights:
        y = F.batch_norm(torch.conv2d(x, weight, padding=1), None, None, training=True)
        x = torch.relu(x + torch.relu(y))
    return [x.sum()]


def test_less_budget_takes_no_more_memory_in_a_network_of_convolutions() -> None:
    joint = Joint.of(traced(convolutions, leaf(2, 8, 8, 8), *(leaf(8, 8, 3, 3) for _ in range(6))))
    classes = classify(joint)
    simulated = simulator(joint, classes)
    peaks = [simulated.peak(choose(joint, classes, Wish(budget=b))) for b in BUDGETS]

    assert all(less <= LEVEL * more for less, more in pairwise(peaks))


# What belongs to the caller


def through_wide(x: Tensor) -> list[Tensor]:
    """Of x in half precision eager keeps sums in float32, and not x."""
    wide = x.float()
    return [((wide + 1).square() * (wide + 2).square()).sum(1)]


def test_of_a_narrow_input_that_eager_does_not_keep_a_copy_is() -> None:
    """The caller may write to it before the backward runs."""
    x, tangent = leaf(64, 500).bfloat16().detach().requires_grad_(), torch.randn(64)
    (expected,) = torch.autograd.grad(through_wide(x), x, tangent)

    halves = split(
        traced(through_wide, x), lambda joint, classes, _: choose(joint, classes, Wish())
    )
    assert halves.backward is not None
    _, *saved = halves.forward(x.detach())
    with torch.no_grad():
        x.zero_()

    assert [one.dtype for one in saved] == [torch.bfloat16]
    torch.testing.assert_close(halves.backward(*saved, tangent), (expected,))


def test_no_copy_is_kept_where_a_value_of_its_width_serves() -> None:
    joint = Joint.of(traced(lambda x: [x.exp().sum(1)], leaf(64, 500)))

    cut = choose(joint, classify(joint), Wish())

    assert not cut.copied
    assert not set(joint.primals) & set(cut.kept)
