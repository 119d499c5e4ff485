"""Small random-weight transformers, built from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY: Final = 97  # prime: no dimension that a kernel might round to is hit by luck
BATCH: Final = 2
LENGTH: Final = 11
# Two layers show what is shared between layers; the same with other attention needs but one.
LAYERS: Final = {"sdpa": 2, "eager": 1}

Inputs = tuple[Any, ...]
Built = tuple[nn.Module, Inputs]


class Fields(nn.Module):
    """Call a model by keyword and return the named fields of its output as a tuple."""

    def __init__(
        self, model: nn.Module, arguments: tuple[str, ...], fields: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.fields = fields

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        output = self.model(**dict(zip(self.arguments, values, strict=True)))
        return tuple(output[field] for field in self.fields)


class CachedDecode(nn.Module):
    """Read a prompt, then feed the most likely token back once, through the key-value cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        read = self.model(input_ids=prompt, use_cache=True)
        chosen = read.logits[:, -1:].argmax(-1)
        step = self.model(input_ids=chosen, past_key_values=read.past_key_values, use_cache=True)
        return read.logits, step.logits


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def padding_mask(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Ones, with the last tokens of the first row padded away."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -length // 4 :] = 0
    return mask


def bert(attention: str) -> Built:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS[attention],
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    labels = tokens().masked_fill(torch.rand(BATCH, LENGTH) < 0.5, -100)
    model = Fields(
        BertForMaskedLM(config),
        ("input_ids", "attention_mask", "token_type_ids", "labels"),
        ("loss", "logits"),
    )
    return model, (tokens(), padding_mask(), torch.randint(0, 2, (BATCH, LENGTH)), labels)


def gpt2_model(attention: str) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=LAYERS[attention],
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation=attention,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # unset, it logs a warning at the loss: a graph break
    return model


def gpt2(attention: str) -> Built:
    model = Fields(
        gpt2_model(attention), ("input_ids", "attention_mask", "labels"), ("loss", "logits")
    )
    return model, (tokens(), padding_mask(), tokens())


def llama_model(attention: str) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS[attention],
        num_attention_heads=4,
        num_key_value_heads=2,  # grouped queries
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def llama(attention: str) -> Built:
    model = Fields(llama_model(attention), ("input_ids", "labels"), ("loss", "logits"))
    return model, (tokens(), tokens())


def llama_decode(attention: str) -> Built:
    return CachedDecode(llama_model(attention)), (tokens(),)


def t5(attention: str) -> Built:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=LAYERS[attention],
        num_heads=4,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    model = Fields(
        T5ForConditionalGeneration(config),
        ("input_ids", "attention_mask", "labels"),
        ("loss", "logits"),
    )
    return model, (tokens(), padding_mask(), tokens(length=7))


def vit(attention: str) -> Built:
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=LAYERS[attention],
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=16,
        patch_size=4,
        num_labels=5,
        attn_implementation=attention,
    )
    model = Fields(
        ViTForImageClassification(config), ("pixel_values", "labels"), ("loss", "logits")
    )
    return model, (torch.randn(BATCH, 3, 16, 16), torch.randint(0, 5, (BATCH,)))


def whisper(attention: str) -> Built:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=LAYERS[attention],
        decoder_layers=LAYERS[attention],
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=16,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation=attention,
    )
    model = Fields(
        WhisperForConditionalGeneration(config), ("input_features", "labels"), ("loss", "logits")
    )
    return model, (torch.randn(BATCH, 8, 24), tokens(length=7))


TRANSFORMERS: Final[dict[str, Callable[[], Built]]] = {
    f"{build.__name__}_{attention}": partial(build, attention)
    for build, attentions in (
        (bert, ("eager", "sdpa")),
        (gpt2, ("eager", "sdpa")),
        (llama, ("eager", "sdpa")),
        (llama_decode, ("sdpa",)),
        (t5, ("sdpa",)),
        (vit, ("sdpa",)),
        (whisper, ("sdpa",)),
    )
    for attention in attentions
}
