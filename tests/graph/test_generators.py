"""Random generators: which ones a graph moves, and how they are put back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.aot.trace import trace
from stator.graph.generators import gpus_of, preserved, restore, states
from tests.passes.on_cuda import CUDA, fakes, graph_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """A generator that stands for a GPU's."""
    generator = torch.Generator()

    def give(device: object) -> Tensor:
        state: Tensor = generator.get_state()
        return state

    def take(state: Tensor, device: object) -> None:
        generator.set_state(state)

    monkeypatch.setattr(torch.cuda, "get_rng_state", give)
    monkeypatch.setattr(torch.cuda, "set_rng_state", take)
    return generator


def test_gpus_are_those_of_the_results() -> None:
    module = graph_of(lambda x: (torch.rand(3, device="cpu"), torch.rand_like(x)), *fakes((2,)))
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.aten.rand.default)

    assert gpus_of(calls) == ()
    assert gpus_of(module.graph.nodes) == (CUDA,)


def test_states_of_all_generators_are_given_back(gpu: torch.Generator) -> None:
    taken = states([CUDA])
    first = torch.rand(3), torch.rand(3, generator=gpu)
    restore([CUDA], taken)
    again = torch.rand(3), torch.rand(3, generator=gpu)

    assert all(map(torch.equal, first, again))


def test_a_context_leaves_no_trace(gpu: torch.Generator) -> None:
    before = states([CUDA])
    with preserved([CUDA]):
        torch.rand(3)
        torch.rand(3, generator=gpu)

    assert all(map(torch.equal, before, states([CUDA])))


def test_without_gpus_the_cpus_is_kept_alone() -> None:
    before = states([])
    with preserved([]):
        torch.rand(3)

    assert all(map(torch.equal, before, states([])))


def test_a_program_says_whose_generators_it_moves() -> None:
    (x,) = fakes((4, 4))
    with torch.no_grad():
        drawing = trace(lambda x: [F.dropout(x)], [x], x.fake_mode).program
        plain = trace(lambda x: [x + 1], [x], x.fake_mode).program

    assert (drawing.draws_random, drawing.draws_on) == (True, (CUDA,))
    assert (plain.draws_random, plain.draws_on) == (False, ())


def test_attention_without_dropout_draws_nothing() -> None:
    (q,) = fakes((1, 2, 8, 16), dtype=torch.bfloat16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default

    def drawn(dropout: float) -> bool:
        with torch.no_grad():
            return trace(
                lambda q: [attention(q, q, q, dropout)[0]], [q], q.fake_mode
            ).program.draws_random

    assert not drawn(0.0)
    assert drawn(0.5)
