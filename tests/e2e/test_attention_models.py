"""Attention as models of today spell it, fused in each layer; with padding in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

import stator
from stator.core.events import Compilation

SIZES: Final = {"vocab_size": 97, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
Build = Callable[[], nn.Module]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **SIZES)
    return _eager(transformers.GPT2LMHeadModel, config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        **SIZES,
    )
    return _eager(transformers.LlamaForCausalLM, config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, vocab_size=97
    )
    return _eager(transformers.T5EncoderModel, config)


def mbart() -> nn.Module:
    config = transformers.MBartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        **SIZES,
    )
    return _eager(transformers.MBartModel, config)


def _eager(model: Any, config: Any) -> nn.Module:
    config._attn_implementation = "eager"  # written out, not torch's own
    torch.manual_seed(0)
    found: nn.Module = model(config).eval()
    return found


@pytest.mark.parametrize(("build", "layers"), [(gpt2, 2), (llama, 2), (t5, 2), (mbart, 3)])
@pytest.mark.filterwarnings("ignore")
def test_every_attention_of_a_model_is_fused(build: Build, layers: int) -> None:
    model = build()
    tokens = torch.randint(0, 97, (2, 9))
    seen = torch.ones(2, 9, dtype=torch.long)
    seen[0, 6:] = 0
    records: list[Compilation] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        call = stator.compile_fx(module, inputs, options={"strict": True})
        record = stator.last_compilation()
        assert record is not None
        records.append(record)
        return call

    torch._dynamo.reset()
    with torch.no_grad():
        ours: Tensor = torch.compile(model, backend=backend)(tokens, attention_mask=seen)[0]
        torch.testing.assert_close(ours, model(tokens, attention_mask=seen)[0])
    stages = [stage for record in records for stage in record.stages]
    fused = sum(stage.changed for stage in stages if stage.name == "captured/fuse_attention")
    assert fused == layers
