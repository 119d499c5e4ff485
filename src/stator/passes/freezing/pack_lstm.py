"""LSTMs with weights read them packed: otherwise oneDNN lays them out anew at every call.

Inference traces an LSTM as one call for each layer and direction, the one that eager makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.packs import onednn_lstm_weight
from stator.passes.freezing.measure import Ways, example, fastest, in_words, kind_of
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

FLOATS: Final = (torch.float32, torch.bfloat16)
LSTM: Final = 2  # among the kinds of networks that the operator knows
STEP_BY_STEP: Final = (
    "it is traced step by step: oneDNN has LSTMs of float32 and bfloat16 on the CPU, without "
    "projections, of sequences of one length"
)


def pack_lstm(graph: fx.Graph, ctx: Ctx) -> int:
    """Let layers of LSTMs read packed weights; return how many do.

    before: y = mkldnn_rnn_layer(x, w, u, b, c, …)              w, u: weights
    after:  p, q = onednn_lstm_weight(w, u, 0, …), onednn_lstm_weight(w, u, 1, …)
            y = mkldnn_rnn_layer(x, p, q, b, c, …)
    """
    settled = constant_nodes(graph)
    layers = graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default)
    ctx.record.notes.extend(_step_by_step(settled, layers))
    packed = 0
    for node in layers:
        if any(weight not in settled for weight in node.args[1:3]):
            continue
        words = ("reads its weights packed by oneDNN", "not packed")
        if ctx.may("pack_lstm", node, _why_not(node), words):
            _rewrite(node)
            packed += 1
    return packed


def _step_by_step(settled: Iterable[fx.Node], layers: Iterable[fx.Node]) -> list[str]:
    """What is to be said of LSTMs that torch traced as the many operators of their steps.

    Their products read weights; what else the module does, making a state of zeros say, does not.
    """
    whole = set(map(_module, layers))
    reading = dict.fromkeys(user for node in settled for user in node.users)
    apart = dict.fromkeys(filter(None, map(_module, reading)))
    return [f"{name} not packed: {STEP_BY_STEP}" for name in apart if name not in whole]


def _module(node: fx.Node) -> str | None:
    """The call of an LSTM in the captured graph that the node is of."""
    name, function = node.meta.get("source_fn_stack", [("", None)])[-1]
    return name if function in (torch.nn.LSTM, torch.lstm) else None


def _why_not(node: fx.Node) -> str | None:
    x, *weights = (source.meta["val"] for source in node.args[:3])
    _, lengths, mode, _, layers, _, is_bidirectional, _, trains = node.args[7:]
    if mode != LSTM or lengths or layers != 1 or is_bidirectional or trains:
        return "it is not one layer of an LSTM, in one direction, in inference"
    if x.device.type != "cpu" or x.dtype not in FLOATS or {w.dtype for w in weights} != {x.dtype}:
        return "it is not of float32 or bfloat16 on the CPU"
    key = (*map(kind_of, node.args[:7]), str(node.args[7:]))
    if None in key[0][1]:
        return "its sizes are not known"
    way, seconds = fastest(key, lambda: _ways(node))
    return f"it is no faster ({in_words(seconds)})" if way == "plain" else None


def _ways(node: fx.Node) -> Ways:
    x, w, u, b, c, *state = map(example, node.args[:7])
    packed = [onednn_lstm_weight(w, u, which, *_shape(node)) for which in (0, 1)]
    biases = (b, c) if _has_biases(node) else packed
    layer = node.target
    return {
        "packed": partial(layer, x, *packed, *biases, *state, *node.args[7:]),
        "plain": partial(layer, x, w, u, b, c, *state, *node.args[7:]),
    }


def _has_biases(node: fx.Node) -> bool:
    return bool(node.args[12])


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """What weights are packed for: hidden size, direction, whether biases are added, input."""
    sizes = list(node.args[0].meta["val"].size())
    is_fixed = all(isinstance(size, int) for size in sizes)
    return node.args[10], node.args[7], _has_biases(node), sizes if is_fixed else None


def _rewrite(node: fx.Node) -> None:
    weights = node.args[1:3]
    with node.graph.inserting_before(node):
        for which, weight in enumerate(weights):
            arguments = (*weights, which, *_shape(node))
            packed = node.graph.call_function(onednn_lstm_weight, arguments)
            packed.meta = {"val": weight.meta["val"]}  # its sizes; only the library reads it
            node.update_arg(1 + which, packed)
            if not _has_biases(node):
                node.update_arg(3 + which, packed)  # where zeros were, as many: nobody reads them
