"""Transformers over tokens, with random weights and no dropout: BERT, GPT-2, Llama."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.models.built import Built, WithLoss


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a configuration depends on; `batch` sequences of `length` tokens go in."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    length: int = 128
    key_heads: int = 0  # Llama: heads of keys and values
    batch: int = 1


BERT_BASE: Final = Sizes(layers=12, width=768, heads=12, inner=3072, vocabulary=30522)
GPT2_SMALL: Final = Sizes(layers=12, width=768, heads=12, inner=3072, vocabulary=50257)
GPT2_SIXTEEN: Final = replace(GPT2_SMALL, batch=16)
# Four layers of a small Llama: of a larger one products would be all that is measured.
LLAMA_FOUR: Final = Sizes(layers=4, width=1024, heads=16, inner=2816, vocabulary=32000, key_heads=4)
TINY: Final = Sizes(layers=1, width=32, heads=4, inner=48, vocabulary=97, length=11, key_heads=2)


class Field(nn.Module):
    """Call a model by keyword, and return one field of its output."""

    def __init__(self, model: nn.Module, arguments: tuple[str, ...], field: str) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.field = field

    def forward(self, *values: Tensor) -> Tensor:
        result: Tensor = self.model(**dict(zip(self.arguments, values, strict=True)))[self.field]
        return result


def bert(sizes: Sizes, train: bool) -> Built:
    """The encoder; in training, its last states are projected onto random ones."""
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    # Without the pooler, which nothing here reads: only eager would run it.
    encoder = BertModel(config, add_pooling_layer=False)
    model = Field(encoder, ("input_ids",), "last_hidden_state")
    tokens = _tokens(sizes)
    if not train:
        return Built(model, (tokens,))
    # A mean would not do: layer norm makes its gradient zero.
    projected = WithLoss(model, lambda states, target: (states * target).sum())
    return Built(projected, (tokens, torch.randn(sizes.batch, sizes.length, sizes.width)))


def gpt2(sizes: Sizes, train: bool) -> Built:
    """The language model; in training, with its own loss."""
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_inner=sizes.inner,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language_model(GPT2LMHeadModel(config), sizes, train)


def llama(sizes: Sizes, train: bool) -> Built:
    """The language model; in training, with its own loss."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        use_cache=False,
    )
    return _language_model(LlamaForCausalLM(config), sizes, train)


def _language_model(model: nn.Module, sizes: Sizes, train: bool) -> Built:
    tokens = _tokens(sizes)
    if train:
        return Built(Field(model, ("input_ids", "labels"), "loss"), (tokens, tokens))
    return Built(Field(model, ("input_ids",), "logits"), (tokens,))


def _tokens(sizes: Sizes) -> Tensor:
    return torch.randint(2, sizes.vocabulary, (sizes.batch, sizes.length))
