"""Frozen programs get new weights, under load, and lose nothing when that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.core.events import last_compilation
from stator.errors import OptionError
from stator.graph.recipe import Recipe
from stator.runtime.discarded import Gone
from tests.aot.two_tensor import TwoTensor
from tests.passes.freezing.ways import expected_ways

X = torch.randn(5, 256)


@pytest.fixture(autouse=True)
def the_expected_way() -> Iterator[None]:
    torch._dynamo.reset()
    with expected_ways():
        yield


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256, bias=False))


def frozen(net: nn.Module, **options: Any) -> Any:
    return stator.compile(net, strict=True, cache=False, freezing=True, **options)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_new_weights_are_read_and_nothing_is_compiled() -> None:
    net, other = two_layers(), two_layers()
    run = frozen(net)
    close(run(X), net(X))
    record = last_compilation()
    stator.update_weights(run, other.state_dict())
    close(run(X), other(X))
    close(net(X), other(X))
    assert last_compilation() is record


@torch.no_grad()
def test_some_of_the_weights_may_be_given() -> None:
    net = two_layers()
    run = frozen(net)
    run(X)
    lora = net[0].weight + 0.1 * torch.randn(256, 4) @ torch.randn(4, 256)
    stator.update_weights(run, {"0.weight": lora})
    close(run(X), net(X))
    assert torch.equal(net[0].weight, lora)


@torch.no_grad()
def test_names_of_the_compiled_module_are_known() -> None:
    net, other = two_layers(), two_layers()
    run = frozen(net)
    run(X)
    stator.update_weights(run, {f"_orig_mod.{k}": v for k, v in other.state_dict().items()})
    close(run(X), other(X))


@torch.no_grad()
def test_weights_given_before_the_first_call_are_read_by_it() -> None:
    net, other = two_layers(), two_layers()
    run = frozen(net)
    stator.update_weights(run, other.state_dict())
    close(run(X), other(X))


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"0.wieght": torch.zeros(256, 256)}, "did you mean '0.weight'"),
        ({"0.weight": torch.zeros(256, 255)}, "float32[256, 256]"),
        ({"0.weight": torch.zeros(256, 256).double()}, "cannot become"),
        ({"0.weight": 3}, "cannot become 3"),
        ({"0.weight": torch.zeros(256, 256, device="meta")}, "on meta"),
        ({"0.weight": torch.eye(256).to_sparse()}, "torch.sparse_coo"),
        ({0: torch.zeros(256, 256)}, "by their names"),
    ],
)
def test_wrong_weights_are_refused_and_nothing_changes(given: Any, said: str) -> None:
    net = two_layers()
    run = frozen(net)
    before = run(X)
    good = {"2.weight": torch.zeros(256, 256)}
    with pytest.raises(OptionError) as error:
        stator.update_weights(run, good | given)
    assert said in str(error.value)
    assert torch.equal(run(X), before)
    close(net(X), before)


def test_what_has_no_weights_is_refused() -> None:
    with pytest.raises(OptionError, match="has no weights"):
        stator.update_weights(lambda x: x, {})
    given: Any = None
    with pytest.raises(OptionError, match="by their names"):
        stator.update_weights(two_layers(), given)


@torch.no_grad()
def test_weights_of_inference_mode_stay_such() -> None:
    """Torch refuses others that count no writes."""
    with torch.inference_mode():
        net = two_layers()
    other = two_layers()
    run = frozen(net)
    run(X)
    stator.update_weights(run, other.state_dict())
    assert all(weight.is_inference() for weight in net.parameters())
    close(run(X), other(X))
    close(net(X), other(X))


@pytest.mark.parametrize("discard", [False, True])
@torch.no_grad()
def test_weights_of_a_subclass_are_given_part_by_part(discard: bool) -> None:
    """A program takes their parts."""
    net, other = two_layers(), two_layers()
    for one in (net, other):
        one[2].weight = nn.Parameter(TwoTensor(torch.randn(256, 256), torch.randn(256, 256)))
    run = frozen(net, discard_parameters=discard)
    run(X)
    state, expected = other.state_dict(), other(X)
    with pytest.raises(OptionError, match=r"become torch.float32\[256, 256\]\n.* of TwoTensor"):
        stator.update_weights(run, {"2.weight": torch.zeros(256, 256)})
    stator.update_weights(run, state)
    found = run(X)
    close(found.first, expected.first)
    close(found.second, expected.second)


@torch.no_grad()
def test_a_failure_midway_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = two_layers(), two_layers()
    run = frozen(net)
    before = run(X)
    make, calls = Recipe.make, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room")
        return make(*arguments)

    monkeypatch.setattr(Recipe, "make", failing)
    with pytest.raises(MemoryError):
        stator.update_weights(run, other.state_dict())
    monkeypatch.undo()
    assert torch.equal(run(X), before)
    close(net(X), before)


def test_a_hundred_swaps_under_load_give_no_wrong_answer() -> None:
    """A result is the square of one swap's number: a mixture of two would be none."""
    net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    states = [{f"{i}.weight": torch.eye(256) * (k + 1) for i in (0, 1)} for k in range(10)]
    right = {float((k + 1) ** 2) for k in range(10)}
    net.load_state_dict(states[0])
    run, x = frozen(net), torch.ones(3, 256)
    seen: set[float] = set()
    failures: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        try:
            with torch.no_grad():
                while not done.is_set():
                    seen.update(run(x).flatten().tolist())
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        run(x)
    workers = [threading.Thread(target=serve) for _ in range(3)]
    for worker in workers:
        worker.start()
    for number in range(100):
        stator.update_weights(run, states[number % 10])
    done.set()
    for worker in workers:
        worker.join()
    assert not failures
    assert seen <= right
    with torch.no_grad():
        assert run(x)[0, 0] == 100.0


@torch.no_grad()
def test_discarded_weights_are_gone_and_say_so() -> None:
    net, other = two_layers(), two_layers()
    expected = net(X)
    run = frozen(net, discard_parameters=True)
    for _ in range(3):
        close(run(X), expected)
    assert net[0].weight.shape == (256, 256)
    touches: list[Callable[[], Any]] = [
        lambda: net(X),
        lambda: net[0].weight + 1,
        lambda: net[2].weight.data,
    ]
    for touch in touches:
        with pytest.raises(Gone, match="discard_parameters"):
            touch()
    stator.update_weights(run, other.state_dict())
    close(run(X), other(X))
    stator.update_weights(run, {"2.weight": torch.zeros(256, 256)})
    close(run(X), torch.zeros(5, 256))


@torch.no_grad()
def test_weights_that_were_written_in_place_may_be_given_to_the_program() -> None:
    net, other = two_layers(), two_layers()
    run = frozen(net)
    run(X)
    net.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="with what it made of the old one"):
        run(X)
    stator.update_weights(run, net.state_dict())
    close(run(X), other(X))


@torch.no_grad()
def test_weights_in_one_memory_stay_there() -> None:
    """As with load_state_dict, which writes to that memory; the last value counts."""
    net, new = two_layers(), torch.randn(256, 256)
    net[2].weight.data = net[0].weight.data
    run = frozen(net)
    run(X)
    stator.update_weights(run, {"0.weight": torch.zeros(256, 256), "2.weight": new})
    assert net[0].weight.data_ptr() == net[2].weight.data_ptr()
    assert torch.equal(net[0].weight, new)
    close(run(X), net(X))


@torch.no_grad()
def test_a_weight_that_overlaps_another_is_refused() -> None:
    net = two_layers()
    net[2].weight.data = net[0].weight.data.t()
    run = frozen(net)
    before = run(X)
    with pytest.raises(OptionError, match=r"'0.weight' lies in the memory of '2.weight'"):
        stator.update_weights(run, {"0.weight": torch.zeros(256, 256)})
    assert torch.equal(run(X), before)


@torch.no_grad()
def test_weights_may_change_places() -> None:
    net = two_layers()
    run = frozen(net)
    run(X)
    first, second = net[0].weight, net[2].weight
    expected = first.clone()
    stator.update_weights(run, {"0.weight": second, "2.weight": first})
    assert torch.equal(net[2].weight, expected)
    close(run(X), net(X))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("make", [Scaled, lambda: nn.Linear(256, 256, bias=False)])
def test_a_program_of_plain_weights_refuses_what_is_left_of_them(
    make: Callable[[], nn.Module],
) -> None:
    """It was compiled before, and no guard looks at weights any more."""
    run = frozen(make(), discard_parameters=True)
    run(X)
    with torch.no_grad():
        run(X)
    with pytest.raises(Gone, match="discard_parameters"):
        run(X)


@torch.no_grad()
def test_discarded_weights_serve_one_program_of_any_batch_size() -> None:
    net = two_layers()
    expected = net(X), net(X[:2])
    run = frozen(net, discard_parameters=True, dynamic=True)
    close(run(X), expected[0])
    close(run(X[:2]), expected[1])

    run = frozen(two_layers(), discard_parameters=True)
    before = run(X)
    with pytest.raises(Exception, match="dynamic=True"):
        run(X[:2])
    assert torch.equal(run(X), before)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.q(x).relu() * self.k(x).sigmoid() + self.v(x).tanh()
        return made


@torch.no_grad()
def test_of_discarded_weights_that_were_joined_all_are_wanted() -> None:
    net, other = Joined(), Joined()
    run = frozen(net, discard_parameters=True)
    before = run(X)
    with pytest.raises(OptionError, match=r"'k.weight', 'v.weight' too, which were discarded"):
        stator.update_weights(run, {"q.weight": torch.zeros(256, 256)})
    assert torch.equal(run(X), before)
    stator.update_weights(run, other.state_dict())
    close(run(X), other(X))


def test_discarding_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(OptionError, match="without freezing"):
        stator.compile(two_layers(), discard_parameters=True)
    options = {"freezing": True, "discard_parameters": True}
    run = torch.compile(two_layers(), backend="stator", options=options)
    with torch.no_grad(), pytest.raises(Exception, match=r"stator\.compile"):
        run(X)


RESIDENT = """
import ctypes, gc, pathlib, torch, stator
from torch import nn

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

def frozen(net):
    return stator.compile(net, freezing=True, discard_parameters=True, strict=True, cache=False)

with torch.no_grad():
    x = torch.randn(16, 1024)
    frozen(nn.Linear(1024, 1024))(x)  # what a process has once
    torch._dynamo.reset()
    before = resident()
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    weights = sum(p.nbytes for p in net.parameters())
    frozen(net)(x)
    print((resident() - before) / weights)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_process_with_discarded_weights_holds_them_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) <= 1.1
