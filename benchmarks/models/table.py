"""The rows that whole models make: all for inference, some for a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.case import Case, Task
from benchmarks.closeness import TOLERANCE
from benchmarks.models import convnext, convolutional, dlrm, lstm, text, vit
from benchmarks.models.built import Builder, Built
from benchmarks.models.quantized import in_int8, is_installed
from benchmarks.work import weights_of


@dataclass(frozen=True, slots=True)
class Model:
    """A model at two sizes, and whether its training step is a row too."""

    full: Builder
    tiny: Builder
    trains: bool = False
    tolerance: float = TOLERANCE  # of gradients
    rounding: float = TOLERANCE  # of results: integers between layers round to other ones


def _model(
    build: Callable[[Any, bool], Built],
    full: Any,
    tiny: Any,
    trains: bool,
    tolerance: float = TOLERANCE,
) -> Model:
    return Model(partial(build, full), partial(build, tiny), trains, tolerance)


def _integer_model(
    build: Callable[[Any, bool], Built], full: Any, tiny: Any, rounding: float = 0.01
) -> Model:
    quantized = in_int8(build)
    return Model(partial(quantized, full), partial(quantized, tiny), rounding=rounding)


MODELS: Final[dict[str, Model]] = {
    "bert": _model(text.bert, text.BERT_BASE, text.TINY, trains=True),
    "gpt2": _model(text.gpt2, text.GPT2_SMALL, text.TINY, trains=True),
    "llama4": _model(text.llama, text.LLAMA_FOUR, text.TINY, trains=True),
    "vit": _model(vit.vit, vit.VIT_BASE, vit.TINY, trains=False),
    # Untrained, it magnifies roundings: eager's own gradients are off by 2% of those in float64.
    "resnet50": _model(
        convolutional.resnet50, convolutional.FULL, convolutional.TINY, trains=True, tolerance=0.1
    ),
    "mobilenetv3": _model(
        convolutional.mobilenetv3, convolutional.FULL, convolutional.TINY, trains=False
    ),
    "convnext": _model(convnext.convnext, convnext.FULL, convnext.TINY, trains=False),
    "gpt2_16": _model(text.gpt2, text.GPT2_SIXTEEN, text.TINY, trains=False),
    "dlrm": _model(dlrm.dlrm, dlrm.CRITEO, dlrm.TINY, trains=False),
    "lstm": _model(lstm.lstm, lstm.FULL, lstm.TINY, trains=True),
}

if is_installed():
    MODELS["resnet50_int8"] = _integer_model(
        convolutional.resnet50, convolutional.FULL, convolutional.TINY
    )
    # Sums in another order round to other integers, layer after layer: whoever does not copy
    # eager's order, ONNX Runtime included, ends 1.7% from it.
    MODELS["bert_int8"] = _integer_model(text.bert, text.BERT_BASE, text.TINY, rounding=0.03)


def inference(build: Builder, tolerance: float) -> Task:
    """A forward in evaluation mode."""
    module, inputs = build(False)
    module.eval()
    return Task(module, inputs, weights=weights_of(module), tolerance=tolerance)


def training(build: Builder, tolerance: float) -> Task:
    """Forward, loss, and the gradients of all parameters."""
    module, inputs = build(True)
    module.train()
    return Task(
        module,
        inputs,
        tuple(module.parameters()),
        weights=weights_of(module),
        tolerance=tolerance,
    )


def model_cases() -> list[Case]:
    """Inference of every model, then the training steps."""
    infer = [
        Case(
            name,
            "infer",
            partial(inference, model.full, model.rounding),
            partial(inference, model.tiny, model.rounding),
        )
        for name, model in MODELS.items()
    ]
    train = [
        Case(
            name,
            "train",
            partial(training, model.full, model.tolerance),
            partial(training, model.tiny, model.tolerance),
        )
        for name, model in MODELS.items()
        if model.trains
    ]
    return infer + train
