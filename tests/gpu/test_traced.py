"""What programs become on a GPU: attention and norms stay whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stator.core.events import last_compilation
from stator.ops.table import RULES
from stator.torch_api import FakeTensorMode
from tests.gpu.on_device import DEVICE, compiled, needs_card, randn

pytestmark = needs_card

HALVES: Final = (torch.bfloat16, torch.float16)
FUSED: Final = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def called(fn: Callable[..., Any], *inputs: Tensor, grad: bool = False) -> list[str]:
    """The operators of the compiled program's graphs, its backward included."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        result = compiled(fn, cache=False)(*inputs)
        if grad:
            result.sum().backward()
    record = last_compilation()
    assert record is not None
    assert record.fallback is None
    return re.findall(r"aten\.\w+", "\n".join(record.graphs.values()))


def grouped(q: Tensor, m: Tensor) -> Tensor:
    """Two heads of keys for four of queries."""
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True)


def narrow(q: Tensor, m: Tensor) -> Tensor:
    """Heads of a width that is no multiple of 8."""
    q = q[..., :20].contiguous()
    return F.scaled_dot_product_attention(q, q, q)


ATTENTION: Final[dict[str, Callable[..., Tensor]]] = {
    "plain": lambda q, m: F.scaled_dot_product_attention(q, q, q),
    "causal": lambda q, m: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "dropout": lambda q, m: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
    "mask": lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
    "bool mask": lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m > 0),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_one_call(name: str, dtype: torch.dtype, grad: bool) -> None:
    q = randn(2, 4, 128, 64, dtype=dtype, grad=grad)
    mask = randn(2, 1, 128, 128, dtype=dtype)
    found = called(ATTENTION[name], q, mask, grad=grad)

    assert any(fused in name for name in found for fused in FUSED), found
    assert not any("bmm" in name or "softmax" in name for name in found), found
    if grad:
        assert any("attention_backward" in name for name in found), found


@pytest.mark.parametrize("attend", [grouped, narrow])
def test_so_is_that_of_groups_and_of_narrow_heads(attend: Callable[..., Tensor]) -> None:
    """As eager has them, in inference."""
    q, mask = randn(2, 4, 128, 64, dtype=torch.bfloat16), randn(1)
    found = called(attend, q, mask)

    assert any(fused in name for name in found for fused in FUSED), found
    assert not any("bmm" in name or "softmax" in name for name in found), found
    exact = attend(q.double(), mask.double())
    ours, eager = compiled(attend, cache=False)(q, mask), attend(q, mask)
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


@pytest.mark.parametrize("module", ["attention", "layer"])
def test_modules_of_torch_keep_their_attention(module: str) -> None:
    made: Any
    if module == "attention":
        made = nn.MultiheadAttention(256, 4, batch_first=True).to(DEVICE, torch.bfloat16).eval()
        found = called(lambda x: made(x, x, x, need_weights=False)[0], randn(2, 64, 256).bfloat16())
    else:
        made = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        made = made.to(DEVICE, torch.bfloat16).eval()
        found = called(made, randn(2, 64, 256).bfloat16())

    assert not any("bmm" in name or "softmax" in name for name in found), found


@pytest.mark.parametrize("grad", [False, True])
def test_rms_norm_has_rules(grad: bool) -> None:
    found = called(
        lambda x, w: F.rms_norm(x, (64,), w),
        randn(8, 64, dtype=torch.bfloat16, grad=grad),
        randn(64, dtype=torch.bfloat16, grad=grad),
        grad=grad,
    )

    known = {str(target).removesuffix(".default") for target in RULES}
    norms = [name for name in found if "rms_norm" in name]
    assert all(name in known for name in norms), found


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_batch_norm_is_not_a_librarys(training: bool, grad: bool) -> None:
    norm = nn.BatchNorm2d(8).to(DEVICE).train(training)
    found = called(norm, randn(4, 8, 16, 16, grad=grad), grad=grad)

    assert not any("cudnn" in name for name in found), found


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_layouts_of_convolutions_are_foreseen(dtype: torch.dtype, last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    x = randn(2, 16, 20, 22, dtype=dtype).contiguous(memory_format=layout)
    weight = randn(32, 16, 3, 3, dtype=dtype)
    mode = FakeTensorMode()
    with mode:
        fake = F.conv2d(mode.from_tensor(x), mode.from_tensor(weight), padding=1)

    assert F.conv2d(x, weight, padding=1).stride() == fake.stride()
