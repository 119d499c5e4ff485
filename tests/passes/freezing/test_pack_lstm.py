"""Packed layers of LSTMs: when, and that they compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stator
from stator.ops.libraries import onednn_linear
from stator.passes.freezing.pack_lstm import pack_lstm
from tests.passes.freezing.accuracy import folded
from tests.passes.freezing.graphs import rewritten
from tests.passes.freezing.ways import expected_ways

pytestmark = pytest.mark.skipif(onednn_linear() is None, reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def traced_lstms() -> Iterator[None]:
    """Dynamo leaves LSTMs, and who calls them, to eager otherwise."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        yield


def layer(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    biased = len(weights) == 4
    outputs, *states = torch.lstm(x, (h, c), weights, biased, 1, 0.0, False, False, False)
    return outputs, *states


def noted() -> list[str]:
    """What the last compilation said."""
    record = stator.last_compilation()
    assert record is not None
    return record.notes


def parts(dtype: torch.dtype = torch.float32, *, biased: bool = True) -> tuple[Tensor, ...]:
    """Input, state and weights of a layer."""
    sizes = [(5, 3, 8), (1, 3, 16), (1, 3, 16), (64, 8), (64, 16), (64,), (64,)]
    return tuple(torch.randn(size).to(dtype) for size in (sizes if biased else sizes[:-2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_reads_packed_weights(dtype: torch.dtype, biased: bool) -> None:
    with expected_ways():
        arguments = parts(dtype, biased=biased)
        calls, (note,) = folded(layer, arguments, pack_lstm, changing=(0, 1, 2))

    assert note == "mkldnn_rnn_layer reads its weights packed by oneDNN"
    assert "aten.zeros.default" not in calls  # the biases that there are none of


def test_weights_that_come_from_outside_are_left_alone() -> None:
    with expected_ways():
        _, ctx = rewritten(layer, parts(), (3, 5, 6), pack_lstm)  # not that of the state
    assert not ctx.record.notes


def test_what_is_slower_packed_stays_and_says_so() -> None:
    with expected_ways(named="plain"):
        module, ctx = rewritten(layer, parts(), (3, 4, 5, 6), pack_lstm)
    assert "not packed: it is no faster" in ctx.record.notes[0]
    assert not any("lstm_weight" in str(node.target) for node in module.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ({}, 1),
        ({"bias": False}, 1),
        ({"batch_first": True}, 1),
        ({"bidirectional": True}, 2),
        ({"num_layers": 3, "dropout": 0.5}, 3),
        ({"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}, 4),
    ],
)
def test_an_lstm_computes_what_it_did(
    kind: dict[str, Any], layers: int, freezing: bool, dtype: torch.dtype
) -> None:
    lstm, x = torch.nn.LSTM(8, 16, **kind).eval().to(dtype), torch.randn(3, 5, 8).to(dtype)
    first, *states = lstm(x)[1]
    for given in ((x,), (x[0],), (x, (torch.randn_like(first), torch.randn_like(*states)))):
        torch._dynamo.reset()
        with expected_ways():
            found = stator.compile(lstm, freezing=freezing, cache=False)(*given)
        torch.testing.assert_close(found, lstm(*given), check_stride=True)
        notes = [note for note in noted() if "packed by oneDNN" in note]
        assert len(notes) == layers


def test_weights_are_packed_for_any_length() -> None:
    lstm = torch.nn.LSTM(8, 16).eval()
    with expected_ways():
        compiled = stator.compile(lstm, freezing=True, cache=False, dynamic=True)
        for length, batch in ((5, 3), (7, 2), (1, 4)):
            x = torch.randn(length, batch, 8)
            torch.testing.assert_close(compiled(x), lstm(x), check_stride=True)
    assert "packed by oneDNN" in str(noted())


@pytest.mark.parametrize("freezing", [False, True])
def test_new_weights_are_packed_anew(freezing: bool) -> None:
    lstm, other = torch.nn.LSTM(8, 16).eval(), torch.nn.LSTM(8, 16).eval()
    x = torch.randn(5, 3, 8)
    with expected_ways():
        compiled = stator.compile(lstm, freezing=freezing, cache=False)
        compiled(x)
        if freezing:
            stator.update_weights(compiled, other.state_dict())
        else:
            lstm.load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(x), other(x))


def test_weights_are_given_back_once_packed() -> None:
    lstm, x = torch.nn.LSTM(8, 16, bias=False).eval(), torch.randn(5, 3, 8)
    expected = lstm(x)
    with expected_ways():
        compiled = stator.compile(lstm, freezing=True, discard_parameters=True, cache=False)
        compiled(x)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "dtype"), [({"proj_size": 4}, torch.float32), ({}, torch.double)])
def test_an_lstm_that_is_traced_step_by_step_says_so(
    kind: dict[str, Any], dtype: torch.dtype
) -> None:
    lstm, x = torch.nn.LSTM(8, 16, **kind).eval().to(dtype), torch.randn(5, 3, 8).to(dtype)
    with expected_ways():
        found = stator.compile(lstm, freezing=True, cache=False)(x)
    if torch.__version__ >= (2, 13):  # before, torch's own steps return states of shape [1, 1, …]
        torch.testing.assert_close(found, lstm(x), check_stride=True)
    said = [note for note in noted() if note.startswith("lstm ")]
    assert len(said) == 1
    assert "not packed: it is traced step by step" in said[0]


def test_other_networks_are_left_alone() -> None:
    network, x = torch.nn.GRU(8, 16).eval(), torch.randn(5, 3, 8)
    with expected_ways():
        found = stator.compile(network, freezing=True, cache=False)(x)
    torch.testing.assert_close(found, network(x))
    assert "mkldnn_rnn_layer" not in str(noted())
