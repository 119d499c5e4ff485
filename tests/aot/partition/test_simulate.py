"""What a step is foreseen to hold, and from which of three places it comes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stator.aot.partition.candidates import FORBIDDING, candidates
from stator.aot.partition.classify import classify
from stator.aot.partition.cut import cut_keeping, network_of, save_everything
from stator.aot.partition.joint import Joint
from stator.aot.partition.lives import ARENA, POOL, TORCH, Half, Span
from stator.aot.partition.network import Cut
from stator.aot.partition.simulate import Simulator
from stator.aot.partition.weigh import Scales, bytes_of
from tests.aot.partition.programs import Flat, leaf, traced


def simulator(program: Flat, *inputs: Any) -> Simulator:
    joint = Joint.of(traced(program, *inputs))
    classes = classify(joint)
    scales = Scales(joint, classes, trusts_caller=True)
    return Simulator(joint, classes, network_of(joint, classes, scales))


def all_kept(found: Simulator, *names: str, price: float = 1) -> Cut:
    """A cut that keeps what the operators called `names` make."""
    wanted = [node for node in found.network.nodes if node.name.split("_")[0] in names]
    return cut_keeping(found.network, wanted, price)


def placed(found: Simulator, half: Half) -> dict[str, int]:
    return {found.nodes[span.node].name: span.place for span in half.spans}


def test_places_have_highest_marks_of_their_own() -> None:
    spans = [Span(0, ARENA, 5, 0, 2), Span(1, ARENA, 7, 1, 3), Span(2, TORCH, 9, 3, 4)]
    half = Half(spans, 4)

    assert half.most() == [12, 0, 9]
    assert half.at_most(ARENA) == spans[:2]


def test_the_peak_is_the_sum_of_the_highest_marks() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        for _ in range(3):
            x = torch.sigmoid(torch.mm(x, weight)).exp()
        return [x.sum()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))
    cut = save_everything(found.network)
    forward, backward = found._halves(cut)
    inputs = sum(bytes_of(node.meta["val"]) for node in found.joint.primals)
    most = list(map(max, forward.most(), backward.most()))

    assert min(most) >= 0
    assert 0 <= found.peak(cut) - inputs - sum(most) <= 8  # the loss, which the caller holds
    assert sum(size for _, size in found.holders(cut)) >= found.peak(cut)


def test_products_lie_in_the_arena_and_what_is_kept_of_them_in_the_pool() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [torch.mm(torch.mm(x, weight), weight).sin().sum()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))
    forward, _ = found._halves(all_kept(found, "mm"))
    places = placed(found, forward)

    assert places["mm"] == POOL

    forward, _ = found._halves(found.network.cut(lambda _, weight: weight.price(2.0**24)))
    assert placed(found, forward)["mm"] == ARENA


def test_what_a_kernel_stores_over_a_librarys_result_is_torchs() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [torch.relu(torch.conv2d(x, weight) + 1).square().sum()]

    found = simulator(program, torch.randn(2, 4, 16, 16), leaf(4, 4, 3, 3))
    cut = all_kept(found, "relu")
    forward, backward = found._halves(cut)

    assert placed(found, forward)["relu"] == TORCH
    assert placed(found, backward)["relu"] == TORCH


def test_parts_of_a_split_are_views() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        first, second = torch.mm(x, weight).split(32, dim=1)
        return [(first.sin() * second.cos()).sum()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))

    assert not any("getitem" in node.name for node in found.sizes)


def test_a_copy_that_changes_nothing_takes_no_memory() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [torch.mm(x, weight).clone().sin().sum(), torch.mm(weight, x).t().contiguous()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))
    made = [node.name for node in found.sizes if "clone" in node.name]

    assert len(made) == 1, "the one that turns is there"


def test_what_is_computed_first_lies_in_the_pool() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        for _ in range(6):
            x = torch.mm(x, weight).sigmoid()
        return [x.sum()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))
    relayed = [one.cut for one in candidates(found) if one.cut.relays]
    _, backward = found._halves(relayed[0])
    places = placed(found, backward)

    assert {places[node.name] for node in relayed[0].relays if node.name in places} == {POOL}


def test_what_a_norm_makes_is_stored_over_what_it_reads() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        made = torch.conv2d(x, weight)
        made = torch.relu(F.batch_norm(made, None, None, training=True))
        return [torch.conv2d(made, weight).sum()]

    found = simulator(program, torch.randn(2, 4, 16, 16), leaf(4, 4, 3, 3))
    forward, _ = found._halves(all_kept(found, "relu", price=FORBIDDING))

    assert placed(found, forward)["relu"] == TORCH


def test_what_a_norm_reads_a_second_time_is_stored_over_what_it_is_made_of() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        for _ in range(2):
            made = torch.conv2d(x, weight)
            x = x + made
            x = x * F.layer_norm(x, x.shape[1:])
        return [x.sum()]

    found = simulator(program, leaf(2, 4, 8, 8), leaf(4, 4, 1, 1))
    forward, _ = found._halves(all_kept(found, "add"))

    assert placed(found, forward)["add"] == TORCH


def test_the_least_of_a_cut_is_not_above_its_peak() -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        for _ in range(6):
            x = torch.mm(x, weight).sigmoid()
        return [x.sum()]

    found = simulator(program, leaf(64, 64), leaf(64, 64))

    assert all(found.least(one.cut) <= one.peak for one in candidates(found))
