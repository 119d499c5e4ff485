"""What libraries take for themselves within a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stator.aot.partition import scratch
from stator.aot.partition.scratch import Calling, highest
from stator.torch_api import FakeTensorMode

aten = torch.ops.aten

IMAGE, WEIGHT = (2, 64, 32, 32), (128, 64, 3, 3)
REST = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def calling(target: Any, *given: Any) -> Calling:
    """A call on fake tensors: sizes stand for them."""
    graph, mode = fx.Graph(), FakeTensorMode()
    args = []
    for number, one in enumerate(given):
        if isinstance(one, tuple):
            node = graph.placeholder(f"x{number}")
            with mode:
                node.meta["val"] = torch.empty(one)
            one = node
        args.append(one)
    return Calling(target, tuple(args), {})


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_known", {})


def convolution() -> Calling:
    return calling(aten.convolution.default, IMAGE, WEIGHT, *REST)


def test_a_convolution_is_asked_what_it_takes() -> None:
    weight = 4 * 128 * 64 * 9

    taken = convolution().scratch()

    assert 0 <= taken <= convolution().most
    if torch.backends.mkldnn.is_available():
        assert taken >= weight / 2, "it has its weight in an order of its own"


def test_equal_calls_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = convolution().scratch()
    monkeypatch.setattr(Calling, "_asked", lambda _: pytest.fail("asked again"))

    assert convolution().scratch() == first


def test_a_size_that_varies_is_taken_as_it_was_and_stays_free() -> None:
    shapes, call = ShapeEnv(), convolution()
    image = call.args[0]
    for batch in (2, 3):
        mode = FakeTensorMode(shape_env=shapes)
        image.meta["val"] = mode.from_tensor(torch.empty(batch, *IMAGE[1:]))
        assert isinstance(image.meta["val"].size(0), torch.SymInt)
        call.scratch()

    assert not shapes.guards, "the program would be compiled anew for each size"
    assert len(scratch._known) == 2, "the sizes are what matters, not their names"


def test_who_watches_is_not_disturbed() -> None:
    with torch.autograd.profiler.profile():
        assert convolution().scratch() == 0

    assert not scratch._known, "it can be asked later"


@pytest.mark.parametrize(
    "call",
    [
        calling(aten.view.default, (1024, 1024), [-1]),
        calling(aten.mul_.Tensor, (1024, 1024), 2),
        calling(aten.bernoulli.default, (1024, 1024)),
        calling(aten.mm.default, (8, 8), (8, 8)),
    ],
    ids=["view", "write", "draw", "small"],
)
def test_others_are_not_asked(call: Calling) -> None:
    assert call.most == 0


def test_indices_are_not_made_up() -> None:
    call = calling(aten.index_select.default, (1024, 1024), 0, (8,))
    index = call.args[2]
    index.meta["val"] = index.meta["val"].long()

    assert call.most == 0


class Known(Calling):
    """A call that takes the sum of its arguments."""

    @property
    def most(self) -> int:
        """All of it."""
        return sum(self.args)

    def scratch(self) -> int:
        """All of it."""
        return sum(self.args)


def test_the_highest_mark_is_where_a_call_takes_most() -> None:
    calls = {0: Known("", (7,), {}), 2: Known("", (3,), {})}

    assert highest([5, 10, 8], calls) == 12
    assert highest([5, 20, 8], calls) == 20
    assert highest([], {}) == 0


def test_calls_that_cannot_set_the_mark_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Known, "scratch", lambda _: pytest.fail("asked"))

    assert highest([5, 20], {0: Known("", (7,), {})}) == 20
