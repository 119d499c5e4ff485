"""The models of the end-to-end tests: name -> factory of (module, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.e2e import handwritten_models as nets
from tests.e2e.transformer_models import TRANSFORMERS, Built

BATCH: Final = 4
NODES: Final = 9


def _random_edges(nodes: int, edges: int) -> Tensor:
    """Edges with repeated targets; node 0 receives none, so that empty sums are covered."""
    return torch.stack([torch.randint(nodes, (edges,)), torch.randint(1, nodes, (edges,))])


def _on_sequence(module: nn.Module) -> Built:
    return module, (torch.randn(BATCH, 5, 6),)


def _on_image(module: nn.Module, size: int = 16) -> Built:
    return module, (torch.randn(BATCH, 3, size, size),)


def _on_graph(module: nn.Module) -> Built:
    return module, (torch.randn(NODES, 6), _random_edges(NODES, 24))


def _on_tokens(module: nn.Module) -> Built:
    return module, (torch.randn(13, 8),)


def recommender() -> Built:
    dense = torch.randn(BATCH, 6)
    first = torch.randint(11, (10,))
    second = torch.randint(7, (BATCH, 3))
    offsets = torch.tensor([0, 3, 3, 8])  # the second bag is empty
    return nets.Recommender(), (dense, first, second, offsets)


HANDWRITTEN: Final[dict[str, Callable[[], Built]]] = {
    "lstm": lambda: _on_sequence(nets.Recurrent(nn.LSTM)),
    "gru": lambda: _on_sequence(nets.Recurrent(nn.GRU)),
    "lstm_cell_loop": lambda: _on_sequence(nets.LSTMCellLoop()),
    "resnet": lambda: _on_image(nets.ResNet(), size=32),
    "unet": lambda: _on_image(nets.UNet()),
    "gnn_index_add": lambda: _on_graph(nets.GraphSum()),
    "gnn_scatter_reduce": lambda: _on_graph(nets.GraphAttention()),
    "moe_dense": lambda: _on_tokens(nets.DenseExperts()),
    "moe_sparse": lambda: _on_tokens(nets.SparseExperts()),
    "moe_sparse_captured": lambda: _on_tokens(nets.SparseExperts()),
    "recommender": recommender,
}

MODELS: Final[dict[str, Callable[[], Built]]] = {**TRANSFORMERS, **HANDWRITTEN}

# Dynamo's own settings that a model needs in order to be captured.
DYNAMO: Final[dict[str, dict[str, Any]]] = {
    "lstm": {"allow_rnn": True},  # otherwise torch.nn's recurrent modules are left to eager
    "gru": {"allow_rnn": True},
    "moe_sparse_captured": {"capture_dynamic_output_shape_ops": True},  # sizes from `where`
}


def captured_whole(name: str, training: bool) -> bool:
    """Whether Dynamo makes one graph of the model."""
    if name.startswith("whisper"):
        return not training  # layer drop branches on a random number
    return name != "moe_sparse"  # by default `where`, whose size depends on the data, breaks


def build(name: str) -> Built:
    """A model and its inputs, the same ones at every call."""
    torch.manual_seed(sum(map(ord, name)))
    return MODELS[name]()
