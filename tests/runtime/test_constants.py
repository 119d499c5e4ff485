"""Constants of weights, made while other threads write to these, give others, or ask too."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.core.torch_types import Boxed
from stator.graph.recipe import Constants, Do, Recipe, Weight
from stator.runtime import constants
from stator.runtime.constants import Program
from stator.runtime.cuda_graphs import Pool, Recordable, with_cuda_graphs
from stator.runtime.making import making
from tests.passes.freezing.ways import expected_ways
from tests.runtime.recorder import Again

X = torch.randn(5, 256)


@pytest.fixture(autouse=True)
def the_expected_way() -> Iterator[None]:
    torch._dynamo.reset()
    with expected_ways():
        yield


def two_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))


def compiled(net: Any, **options: Any) -> Any:
    return stator.compile(net, strict=True, cache=False, **options)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def in_a_thread(action: Callable[[], object], patience: float = 60) -> threading.Thread:
    thread = threading.Thread(target=torch.no_grad()(action), daemon=True)
    thread.start()
    thread.join(patience)
    return thread


@pytest.fixture
def behind_the_pack(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something once, behind the first weight that is packed."""

    def do(action: Callable[[], object]) -> None:
        make = Recipe.make
        done: list[bool] = []

        def made(recipe: Recipe, weights: Sequence[Tensor]) -> Tensor:
            found = make(recipe, weights)
            if "mkl_linear_weight" in recipe.text and not done:
                done.append(True)
                action()
            return found

        monkeypatch.setattr(Recipe, "make", made)

    return do


@torch.no_grad()
def test_a_write_while_weights_are_packed_is_seen_at_the_next_call(
    behind_the_pack: Callable[[Callable[[], object]], None],
) -> None:
    net = two_layers()
    run = compiled(net)
    behind_the_pack(lambda: in_a_thread(lambda: net[0].weight.mul_(3)))
    run(X)
    close(run(X), net(X))


@torch.no_grad()
@pytest.mark.parametrize("before", [True, False])
def test_weights_given_while_another_thread_makes_constants_are_read(
    before: bool, behind_the_pack: Callable[[Callable[[], object]], None]
) -> None:
    """At the first call, or at an update of its own: nothing is made of old and new weights."""
    net, others = two_layers(), [two_layers() for _ in range(2)]
    run = compiled(net, freezing=True)
    if not before:
        run(X)
    given: list[threading.Thread] = []

    def give() -> None:
        state = others[0].state_dict()
        given.append(in_a_thread(lambda: stator.update_weights(run, state), patience=0.5))

    behind_the_pack(give)
    if before:
        run(X)
    else:
        stator.update_weights(run, others[1].state_dict())
    given[0].join()
    close(run(X), others[0](X))
    close(net(X), others[0](X))


@torch.library.custom_op("stator_tests::compiled_inside", mutates_args=())
def compiled_inside(weight: Tensor) -> Tensor:
    inner = nn.Linear(256, 256, bias=False)
    inner.weight.data = weight
    made: Tensor = compiled(inner, freezing=True)(torch.eye(256))
    return made.t().contiguous()


@compiled_inside.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return x @ compiled_inside(self.weight)


def test_a_folded_operator_may_run_a_program_with_constants() -> None:
    net = Nested()
    run = compiled(net, freezing=True)
    found: list[Tensor] = []
    in_a_thread(lambda: found.append(run(X)), patience=90)
    assert found, "it waits for itself"
    close(found[0], X @ net.weight.detach())


@torch.no_grad()
def test_a_weight_that_is_given_again_is_read_whatever_a_few_words_of_it_say() -> None:
    net = nn.Linear(256, 256, bias=False)
    base = net.weight.detach().clone()
    run = compiled(net, freezing=True, discard_parameters=True)
    run(X)
    given = base.clone()
    for _ in range(2):
        stator.update_weights(run, {"weight": given})
        close(run(X), X @ given.t())
        given.numpy()[5, 7] += 1000  # moves no counter


@torch.no_grad()
def test_what_is_given_may_be_written_to_later() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
    run = compiled(net, freezing=True, discard_parameters=True)
    run(X)
    bias = torch.ones(256)
    stator.update_weights(run, {"1.bias": bias})
    expected = run(X)
    bias.zero_()
    assert torch.equal(run(X), expected)


@torch.no_grad()
def test_a_change_after_an_update_is_told_again() -> None:
    net = two_layers()
    run = compiled(net, freezing=True)
    run(X)
    for _ in range(2):
        net[0].weight.mul_(2)
        with pytest.warns(UserWarning, match="update_weights"):
            run(X)
        stator.update_weights(run, two_layers().state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(X)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_shorter_than_a_word_is_looked_at(dtype: torch.dtype) -> None:
    net = nn.Conv2d(1, 1, 1, bias=False).to(dtype)
    run, image = compiled(net), torch.randn(1, 1, 64, 64, dtype=dtype)
    close(run(image), net(image))
    net.weight.data.mul_(3)
    close(run(image), net(image))


@torch.no_grad()
@pytest.mark.parametrize("freezing", [False, True])
def test_a_weight_that_is_turned_in_its_place_is_packed_anew(freezing: bool) -> None:
    """For another program, as Dynamo looks at strides: no word has changed."""
    net = nn.Linear(256, 256, bias=False)
    run = compiled(net, freezing=freezing)
    close(run(X), net(X))
    net.weight.data = net.weight.data.t()
    close(run(X), net(X))


# --- CUDA graphs ---


def of_weights(make: Callable[[Tensor], Tensor], run: Boxed, *, frozen: bool = True) -> Program:
    """A graph that reads what is made of its only argument, a weight, and nothing else."""
    recipe = Recipe((0,), (Do(make, (Weight(0),), {}),))
    return Program(run, Constants((recipe,), (), frozen))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_made_while_a_graph_is_recorded_is_not_there_for_other_calls(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been computed before the first replay."""
    recorded = [True]
    monkeypatch.setattr(constants, "_are_recorded", lambda _: recorded[0])
    made: list[Tensor] = []

    def make(weight: Tensor) -> Tensor:
        made.append(torch.full_like(weight, float("nan")) if recorded[0] else weight + 1)
        return made[-1]

    run, weight = of_weights(make, list, frozen=frozen), torch.ones(3)
    assert run([weight])[0] is made[0]
    recorded[0] = False
    kept = run([weight])[0]
    assert torch.equal(kept, weight + 1)
    recorded[0] = True

    assert (run([weight])[0] is kept) == frozen  # a frozen one is read, others follow weights
    recorded[0] = False
    assert run([weight])[0] is kept
    assert len(made) == (2 if frozen else 3)


def test_constants_that_a_graph_reads_outlive_those_that_take_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, weight = of_weights(lambda weight: weight + 1, list), torch.ones(3)
    run([weight])
    monkeypatch.setattr(constants, "_are_recorded", lambda _: True)
    read = weakref.ref(run([weight])[0])
    monkeypatch.undo()

    with making:
        constants.remake(constants.sets_of([weight]), {id(weight): torch.zeros(3)})
    gc.collect()

    assert torch.equal(run([weight])[0], torch.ones(3))
    assert read() is not None


def test_threads_that_record_and_threads_that_make_constants_do_not_wait_for_each_other() -> None:
    """One records a program that reads constants; one makes constants by what could be recorded."""
    recorder = Again()
    records, makes = threading.Event(), threading.Event()
    patience = 5.0
    inner = of_weights(lambda weight: weight + 1, list)

    def recorded(arguments: list[Any]) -> Sequence[Any]:
        if not recorder.is_live and not records.is_set():
            records.set()
            makes.wait(patience)
        return inner([torch.ones(3)])  # a weight that was not seen before

    def make(weight: Tensor) -> Tensor:
        makes.set()
        records.wait(patience)
        return weight + replayed([weight])[0]

    def with_graphs(run: Boxed) -> Boxed:
        return with_cuda_graphs(run, Recordable(torch.device("cpu")), Pool(recorder), "forward")

    first, replayed = with_graphs(recorded), with_graphs(lambda given: [given[0] * 2])
    outer = of_weights(make, list)
    found: list[Any] = []
    one = threading.Thread(target=lambda: found.extend((first([]), first([]))), daemon=True)
    one.start()
    assert records.wait(patience)
    other = threading.Thread(target=lambda: found.append(outer([torch.zeros(3)])[0]), daemon=True)
    other.start()
    for thread in (one, other):
        thread.join(2 * patience)

    assert len(found) == 3, "they wait for each other"


# --- torch.utils.swap_tensors ---


@torch.no_grad()
@pytest.mark.parametrize("size", [8, 512])  # read as it is, and packed
def test_weights_may_be_swapped_behind_a_call(size: int) -> None:
    net = nn.Linear(size, size)
    run, x = compiled(net), torch.randn(64, size)
    close(run(x), net(x))
    gc.collect()  # what Dynamo noted while it traced

    torch.utils.swap_tensors(net.weight, nn.Parameter(torch.randn(size, size)))

    close(run(x), net(x))


@torch.no_grad()
def test_constants_go_with_the_weights_that_they_are_of() -> None:
    run = of_weights(lambda weight: weight + 1, list, frozen=False)
    weight = torch.ones(3)
    made = weakref.ref(run([weight])[0])
    assert made() is not None

    del weight

    assert made() is None
    assert not run.sets
