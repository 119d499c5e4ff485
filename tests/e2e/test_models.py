"""Every model infers and trains as eager does: outputs, gradients, buffers."""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import torch

from tests.e2e.models import DYNAMO, MODELS, build, captured_whole
from tests.parity import BACKEND, check, compiled

# torch's own ahead-of-time autograd cannot save the undefined tensor that oneDNN's LSTM returns.
AOT_EAGER_GAPS: Final = frozenset({("lstm", "train")})


def with_gradients(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs, those of floating point as leaves that ask for a gradient."""
    return tuple(value.requires_grad_() if value.is_floating_point() else value for value in inputs)


# The true gradient of a key's bias is zero: what anybody computes there is rounding alone.  And
# convolutions that read images channels last add in another order than eager's.
NOISE = {"vit_sdpa": 3.0, "resnet": 3.0, "unet": 3.0}


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_model_matches_eager(name: str, mode: str) -> None:
    if BACKEND.get() == "aot_eager" and (name, mode) in AOT_EAGER_GAPS:
        pytest.skip("torch's own ahead-of-time autograd fails here")
    training = mode == "train"
    module, inputs = build(name)
    module.train(training)

    with torch._dynamo.config.patch(DYNAMO.get(name, {})), torch.set_grad_enabled(training):
        check(
            module,
            *(with_gradients(inputs) if training else inputs),
            calls=2,  # the second finds everything compiled, and buffers already moved
            fullgraph=captured_whole(name, training),
            tolerance_scale=NOISE.get(name, 2.0),
        )


def test_an_lstm_whose_input_asks_for_no_gradient_trains() -> None:
    if BACKEND.get() == "aot_eager":
        pytest.skip("torch's own ahead-of-time autograd fails here")
    with torch._dynamo.config.patch(DYNAMO["lstm"]):
        check(torch.nn.LSTM(6, 8), torch.randn(5, 2, 6), calls=2)


@pytest.mark.parametrize("name", ["bert_sdpa", "llama_sdpa", "resnet", "gnn_index_add"])
def test_model_under_inference_mode_matches_eager(name: str) -> None:
    module, inputs = build(name)
    module.eval()

    with torch.inference_mode():
        check(module, *inputs, calls=2, fullgraph=True)


def test_batch_norm_in_eval_mode_trains_its_weights() -> None:
    module, inputs = build("resnet")
    module.train()
    module(*inputs)  # statistics that differ from the initial zeros and ones
    module.eval()

    check(module, *with_gradients(inputs), calls=2, fullgraph=True)


def test_batch_norm_statistics_follow_training() -> None:
    eager, inputs = build("resnet")
    eager.train()
    before = {name: buffer.clone() for name, buffer in eager.named_buffers()}
    module = copy.deepcopy(eager)
    ours = compiled(module, fullgraph=True)

    for _ in range(3):
        eager(*inputs)
        ours(*inputs)

    after = dict(module.named_buffers())
    for name, expected in eager.named_buffers():
        assert not torch.equal(after[name], before[name]), f"{name} did not move"
        torch.testing.assert_close(after[name], expected)


def test_one_compiled_model_switches_between_training_and_inference() -> None:
    eager, inputs = build("resnet")
    module = copy.deepcopy(eager)
    ours = compiled(module, fullgraph=True)

    for training in (True, False, True, False):
        eager.train(training)
        module.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(ours(*inputs), eager(*inputs))


def test_gradients_accumulate_over_micro_batches() -> None:
    eager, (tokens, labels) = build("llama_sdpa")
    module = copy.deepcopy(eager)
    ours = compiled(module, fullgraph=True)

    for shift in range(3):
        rolled = tokens.roll(shift, 1)
        eager(rolled, labels)[0].backward()
        ours(rolled, labels)[0].backward()

    for (name, mine), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: name + text)


def test_dropout_draws_eagers_numbers() -> None:
    module, inputs = build("bert_sdpa")
    module.train()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.3

    check(module, *inputs, calls=2, fullgraph=True, seed=7)
