"""Small programs that a compiler should make one or two kernels of, each at one size, float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.case import Case, Task
from benchmarks.closeness import dropout_error

Size: TypeAlias = tuple[int, ...]


def softmax(size: Size) -> Task:
    """Over rows."""
    return Task(lambda x: torch.softmax(x, -1), (torch.randn(size),))


def log_softmax(size: Size) -> Task:
    """Over rows."""
    return Task(lambda x: torch.log_softmax(x, -1), (torch.randn(size),))


def layernorm(size: Size) -> Task:
    """Over rows, with weight and bias."""
    weight, bias = torch.randn(2, size[-1]).unbind()

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, size[-1:], w, b)

    return Task(program, (torch.randn(size), weight, bias))


def layernorm_train(size: Size) -> Task:
    """The same and the gradients of all three, for a tangent that comes from outside."""
    x = torch.randn(size, requires_grad=True)
    weight, bias = (torch.randn(size[-1], requires_grad=True) for _ in range(2))
    leaves = (x, weight, bias)
    return Task(layernorm(size).program, leaves, leaves, tangent=torch.randn(size))


def rmsnorm(size: Size) -> Task:
    """As Llama writes it."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    return Task(program, (torch.randn(size), torch.randn(size[-1])))


def bias_gelu(size: Size) -> Task:
    """What follows the first product of a feed-forward network."""
    return Task(lambda x, bias: F.gelu(x + bias), (torch.randn(size), torch.randn(size[-1])))


def swiglu(size: Size) -> Task:
    """The gate of Llama's feed-forward network."""
    return Task(lambda gate, up: F.silu(gate) * up, (torch.randn(size), torch.randn(size)))


def rotary(query: Size, key: Size) -> Task:
    """Rotary position embedding of queries and keys, as Llama writes it."""

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((-high, low), -1)

    def program(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin

    angles = torch.randn(query[-2:])
    return Task(program, (torch.randn(query), torch.randn(key), angles.cos(), angles.sin()))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """A frame of ours: Dynamo does not begin in one of torch's."""
    return F.cross_entropy(logits, target)


def cross_entropy(size: Size) -> Task:
    """Mean over rows of logits."""
    return Task(loss_of, (torch.randn(size), torch.randint(size[-1], size[:1])))


def cross_entropy_train(size: Size) -> Task:
    """The same and the gradient of the logits."""
    logits = torch.randn(size, requires_grad=True)
    return Task(loss_of, (logits, torch.randint(size[-1], size[:1])), (logits,))


def masked_attention(size: Size) -> Task:
    """Causal attention written out: product, masked_fill, softmax, product."""

    def program(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * size[-1] ** -0.5
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v

    length = size[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return Task(program, (*torch.randn(3, *size).unbind(), hidden))


def masked_attention_train(size: Size) -> Task:
    """The same and the gradients of q, k and v, for a tangent that comes from outside."""
    task = masked_attention(size)
    *leaves, hidden = task.inputs
    wanted = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    return Task(task.program, (*wanted, hidden), wanted, tangent=torch.randn(size))


def batchnorm_train(size: Size) -> Task:
    """Forward alone, which updates the running statistics."""

    def program(x: Tensor, mean: Tensor, variance: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, w, b, training=True)

    channels = size[1]
    running = (torch.zeros(channels), torch.ones(channels))
    inputs = (torch.randn(size), *running, *torch.randn(2, channels).unbind())
    return Task(program, inputs, written=running)


def adamw_foreach(count: int, size: Size) -> Task:
    """One step of AdamW over many parameters; what is compiled is `optimizer.step`."""
    parameters = [torch.randn(size, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(size)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    optimizer.step()  # the state is made at the first
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    # Parameter and two moments read and written, gradient read.
    moved = 7 * sum(parameter.nbytes for parameter in parameters)
    return Task(optimizer.step, written=(*parameters, *moments), moved=moved)


def sum_outer(size: Size) -> Task:
    """Over the first axis, which is the one that does not lie together."""
    return Task(lambda x: x.sum(0), (torch.randn(size),))


def cumsum(size: Size) -> Task:
    """Along rows."""
    return Task(lambda x: x.cumsum(-1), (torch.randn(size),))


def maxpool(size: Size) -> Task:
    """Windows of 3, steps of 2, padding of 1: the stem of a ResNet."""
    return Task(lambda x: F.max_pool2d(x, 3, 2, 1), (torch.randn(size),))


def dropout(size: Size) -> Task:
    """A tenth dropped."""
    inputs = (torch.randn(size),)
    return Task(lambda x: F.dropout(x, 0.1, training=True), inputs, error=dropout_error)


def permute_add(size: Size) -> Task:
    """A transposed read beside a plain one."""
    batch, rows, columns = size
    inputs = (torch.randn(size), torch.randn(batch, columns, rows))
    return Task(lambda x, y: x.permute(0, 2, 1).contiguous() + y, inputs)


def int8_qdq(size: Size) -> Task:
    """Quantise to int8 by a given scale, and back."""
    scale = 0.03125

    def program(x: Tensor) -> Tensor:
        quantised = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
        return quantised.to(torch.float32) * scale

    return Task(program, (torch.randn(size),))


def _case(name: str, build: Callable[..., Task], full: Any, tiny: Any, **options: Any) -> Case:
    """A row whose two sizes are the arguments of `build`."""
    return Case(name, "micro", partial(build, *full), partial(build, *tiny), **options)


ROWS: Final = ((4096, 1024),)
FEW_ROWS: Final = ((8, 32),)

KERNELS: Final = (
    _case("cross_entropy_train", cross_entropy_train, ((8192, 32000),), ((8, 50),)),
    _case("layernorm_train", layernorm_train, ROWS, FEW_ROWS),
    _case("softmax", softmax, ROWS, FEW_ROWS),
    _case("log_softmax", log_softmax, ROWS, FEW_ROWS),
    _case("layernorm", layernorm, ROWS, FEW_ROWS),
    _case("rmsnorm", rmsnorm, ROWS, FEW_ROWS),
    _case("bias_gelu", bias_gelu, ((2048, 3072),), FEW_ROWS),
    _case("swiglu", swiglu, ((2048, 2816),), FEW_ROWS),
    _case(
        "rotary",
        rotary,
        ((2, 16, 1024, 64), (2, 4, 1024, 64)),
        ((2, 4, 6, 8), (2, 2, 6, 8)),
    ),
    _case("cross_entropy", cross_entropy, ((8192, 32000),), ((8, 50),)),
    _case("masked_attn", masked_attention, ((2, 12, 512, 64),), ((2, 3, 6, 4),)),
    _case("masked_attn_train", masked_attention_train, ((2, 12, 512, 64),), ((2, 3, 6, 4),)),
    _case(
        "batchnorm_train",
        batchnorm_train,
        ((16, 64, 56, 56),),
        ((2, 3, 4, 4),),
        own_state=True,
    ),
    _case("adamw_foreach", adamw_foreach, (32, (512, 512)), (3, (4, 4)), own_state=True),
    _case("sum_outer", sum_outer, ((8192, 4096),), FEW_ROWS),
    _case("cumsum", cumsum, ROWS, FEW_ROWS),
    _case("maxpool", maxpool, ((16, 64, 112, 112),), ((2, 3, 8, 8),)),
    _case("dropout", dropout, ROWS, ((256, 256),)),
    _case("permute_add", permute_add, ((16, 512, 768),), ((2, 6, 8),)),
    _case("int8_qdq", int8_qdq, ROWS, FEW_ROWS),
)
