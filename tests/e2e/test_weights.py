"""Weights that are packed or frozen: the answers are eager's, also when the weights change."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.core.events import last_compilation
from stator.runtime.constants import PART, _shelf
from tests.passes.freezing.ways import expected_ways

X = torch.randn(9, 256)


@pytest.fixture(autouse=True)
def the_expected_way() -> Iterator[None]:
    torch._dynamo.reset()
    with expected_ways():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 300, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x).relu())
        return made


def compiled(net: nn.Module, **options: Any) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = stator.compile(net, strict=True, cache=False, **options)
    return found


def packs() -> int:
    record = last_compilation()
    assert record is not None
    return sum("packed by" in note for note in record.notes)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_reads_packed_weights(frozen: bool, context: Callable[[], Any]) -> None:
    net = Net()
    run = compiled(net, freezing=frozen)
    with context():
        for _ in range(3):
            close(run(X), net(X))
    assert packs() == 2


def test_no_packing_where_nobody_wants_it() -> None:
    net = Net()
    run = compiled(net, pack_weights=False)
    with torch.no_grad():
        close(run(X), net(X))
    assert packs() == 0


def test_training_reads_plain_weights() -> None:
    net = Net()
    run = compiled(net)
    run(X).sum().backward()
    assert packs() == 0
    assert net.first.weight.grad is not None


def write_in_place(net: Net) -> None:
    with torch.no_grad():
        net.second.weight.mul_(2.0)


def write_behind_the_counter(net: Net) -> None:
    net.second.weight.data.mul_(2.0)


def put_other_data(net: Net) -> None:
    net.second.weight.data = net.second.weight.data * 2.0


def put_another_parameter(net: Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach() * 2.0)


def load_others(net: Net) -> None:
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})


def take_a_step(net: Net) -> None:
    net(X).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


CHANGES = (
    write_in_place,
    write_behind_the_counter,
    put_other_data,
    put_another_parameter,
    load_others,
    take_a_step,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_is_packed_again(change: Callable[[Net], None]) -> None:
    net = Net()
    run = compiled(net)
    with torch.no_grad():
        before = run(X)
    for _ in range(3):
        change(net)
        with torch.no_grad():
            close(run(X), net(X))
    with torch.no_grad():
        assert not torch.allclose(before, run(X))


@pytest.mark.parametrize("change", CHANGES[:3], ids=lambda change: change.__name__)
def test_a_frozen_program_keeps_its_weights_and_says_so_once(
    change: Callable[[Net], None],
) -> None:
    net = Net()
    run = compiled(net, freezing=True)
    with torch.no_grad():
        before = net(X)
        run(X)
        change(net)
        with pytest.warns(UserWarning, match="update_weights"):
            found = run(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(X)
    if change is not write_in_place and change is not write_behind_the_counter:
        close(found, before)


@pytest.mark.parametrize("layer", [0, -1])
def test_of_many_weights_some_are_looked_at_in_each_call(layer: int) -> None:
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(PART + 8)))
    plain, frozen = compiled(net), compiled(net, freezing=True)
    with torch.no_grad():
        plain(X)
        frozen(X)
        net[layer].weight.mul_(2)
        close(plain(X), net(X))  # a program that follows looks at all of them
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(4):
                frozen(X)
    assert ["update_weights" in str(one.message) for one in told] == [True]


@pytest.mark.parametrize("frozen", [False, True])
def test_modules_of_one_class_have_their_own_weights(frozen: bool) -> None:
    """Dynamo calls one program for both: parameters are its inputs."""
    one, other = Net(), Net()
    run, run_other = compiled(one, freezing=frozen), compiled(other, freezing=frozen)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            close(run(X), one(X))
            close(run_other(X), other(X))


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.register_buffer("first", memory[:4])
        self.register_buffer("second", memory[2:])
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        moved = x + 1
        self.first.add_(1)
        return moved @ self.weight + self.second.sum()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_beside_buffers_in_one_memory_an_input_is_no_weight(context: Callable[[], Any]) -> None:
    net, twin = Overlapping(), Overlapping()
    twin.weight = net.weight
    run = stator.compile(net, strict=True, cache=False, freezing=True)
    with context():
        x = torch.randn(4, 256)
        for _ in range(3):
            close(run(x), twin(x))
            x.copy_(torch.randn(4, 256))


@pytest.mark.parametrize("frozen", [False, True])
def test_another_parameter_in_its_place_is_read(frozen: bool) -> None:
    net = Net()
    run = compiled(net, freezing=frozen)
    with torch.no_grad():
        run(X)
        put_another_parameter(net)
        close(run(X), net(X))


@pytest.mark.parametrize("frozen", [False, True])
def test_any_number_of_rows_reads_one_packed_weight(frozen: bool) -> None:
    net = Net()
    run = stator.compile(net, strict=True, cache=False, freezing=frozen, dynamic=True)
    with torch.no_grad():
        for rows in (9, 5, 33, 1):
            x = torch.randn(rows, 256)
            close(run(x), net(x))
    assert packs() == 2


def test_weights_die_with_their_module() -> None:
    net = Net()
    run = compiled(net)
    with torch.no_grad():
        run(X)
    gone = weakref.ref(net.first.weight)
    del net, run
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_programs_of_one_model_share_packed_weights() -> None:
    net = Net()
    run = compiled(net)
    with torch.no_grad():
        run(X)
        first = _packed()
        torch.compiler.reset()
        again = compiled(net, fuel=10_000)
        again(X)
        assert _packed() == first
        close(run(X), again(X))


def _packed() -> int:
    return len({id(made) for made in _shelf.values()})


def test_other_processes_find_the_program_and_pack_for_themselves(tmp_path: Path) -> None:
    net = Net()
    for frozen in (False, True):
        for expected in ("miss", "hit"):
            torch._dynamo.reset()
            run = stator.compile(net, strict=True, cache=True, cache_dir=tmp_path, freezing=frozen)
            with torch.no_grad():
                close(run(X), net(X))
                net.first.weight.mul_(1.1)
                if not frozen:
                    close(run(X), net(X))
            record = last_compilation()
            assert record is not None
            assert (record.cache or "").startswith(expected)


class Writing(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        made: Tensor = self.linear(x)
        return made


def born_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Net()


@pytest.mark.parametrize(
    ("make", "context", "options", "said"),
    [
        (Net, torch.enable_grad, {}, "nothing is frozen: gradients are wanted"),
        (Net, torch.no_grad, {"executor": "python"}, "nothing is frozen: Options.executor is"),
        (Net, torch.no_grad, {"kernels": False}, "nothing is frozen: Options.kernels is off"),
        (nn.ReLU, torch.no_grad, {}, "nothing is frozen: it reads no parameter or buffer"),
        (Writing, torch.no_grad, {}, "is not frozen: the program writes to it"),
        (born_in_inference_mode, torch.inference_mode, {}, "not frozen: 3 weights"),
    ],
)
def test_what_is_not_frozen_says_why(
    make: Callable[[], nn.Module], context: Callable[[], Any], options: dict[str, Any], said: str
) -> None:
    net = make()
    with context():
        close(compiled(net, freezing=True, **options)(X), net(X))
        record = last_compilation()
        compiled(net, **options)(X)
        plain = last_compilation()
    assert record is not None
    assert plain is not None
    assert sum(said in note for note in record.notes) == 1
    assert not any("frozen" in note for note in plain.notes), "nobody asked for it"


class Shaped(nn.Module):
    """A weight whose size alone is read, beside one that is read, or not."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.mask, self.beside = nn.Parameter(torch.zeros(256)), beside

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.beside(x) + torch.ones_like(self.mask)
        return made


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("beside", [nn.Identity(), nn.LayerNorm(256), nn.Linear(256, 256)])
def test_a_weight_may_be_read_for_its_size_alone(beside: nn.Module, frozen: bool) -> None:
    net = Shaped(beside)
    close(compiled(net, freezing=frozen)(X), net(X))
