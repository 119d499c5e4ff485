"""The rows that are measured on a GPU: small kernels and whole models, at full and at tiny sizes.

Kernels are written as eager code is.  `up` is where such code goes to float32; in the reference,
which is in float64, it does nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.case import Program, Task
from benchmarks.closeness import FLOOR, tensors
from benchmarks.gpu_record import GpuKind
from benchmarks.models.built import Built

Size: TypeAlias = tuple[int, ...]
Draw: TypeAlias = Callable[[Size], tuple[Tensor, ...]]
Exact: TypeAlias = list[Tensor]

BF16: Final = torch.bfloat16
DROPPED: Final = 0.1
SETS: Final = 3  # of inputs, taken in turn: what a call reads, the one before has driven out
LARGE_SET: Final = 2 << 30  # bytes, beyond which one set drives itself out
CHUNK: Final = 1 << 26  # elements that are compared at once


def up(x: Tensor) -> Tensor:
    """In float32, unless it is wider already."""
    return x if x.dtype is torch.float64 else x.float()


def wide(tensor: Tensor) -> Tensor:
    """In float64; integers as they are."""
    return tensor.detach().double() if tensor.is_floating_point() else tensor


# ---------------------------------------------------------------------------------------------
# Errors


def furthest(actual: Tensor, exact: Tensor) -> float:
    """The largest error of an element, over its size or, if that is larger, the tensor's usual."""
    if actual.shape != exact.shape:
        return math.inf
    mine, truth = actual.detach().reshape(-1), exact.reshape(-1)
    if not truth.numel():
        return 0.0
    usual = torch.linalg.vector_norm(truth) / truth.numel() ** 0.5
    errors = [
        ((a.double() - e).abs() / torch.maximum(e.abs(), usual)).max()
        for a, e in zip(mine.split(CHUNK), truth.split(CHUNK), strict=True)
    ]
    worst = float(torch.stack(errors).max())
    return math.inf if math.isnan(worst) else worst


def largest_norm(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of a tensor over its norm; one that is nearly zero counts as larger."""
    if [t.shape for t in actual] != [t.shape for t in exact]:
        return math.inf
    norms = [float(torch.linalg.vector_norm(t)) for t in exact]
    floor = FLOOR * max(norms, default=0.0)
    errors = [
        float(torch.linalg.vector_norm(a.detach().double() - e)) / (norm + floor or 1.0)
        for a, e, norm in zip(actual, exact, norms, strict=True)
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


# ---------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True, slots=True)
class Kernel:
    """A program of a few operators."""

    name: str
    program: Program
    draw: Draw  # inputs, of a size
    full: Size
    tiny: Size
    memory_bound: bool = True
    flops: Callable[[Size], int] = lambda size: 0
    # What would be exact, of wide inputs, for a result that draws random numbers.
    nearest: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None
    kind: GpuKind = "kernel"

    @property
    def size(self) -> str:
        """As the name says."""
        return "x".join(map(str, self.full))

    def tasks(self, device: torch.device, tiny: bool) -> list[Task]:
        """Several sets of inputs of one program."""
        size = self.tiny if tiny else self.full
        with torch.device(device):
            first = self.draw(size)
            large = sum(value.nbytes for value in first) > LARGE_SET
            others = [self.draw(size) for _ in range(1 if large else SETS - 1)]
        return [Task(self.program, inputs) for inputs in (first, *others)]

    def exact(self, task: Task, results: Sequence[Any]) -> Exact:
        """The results in float64."""
        inputs = [wide(value) for value in task.inputs]
        with torch.no_grad():
            if self.nearest is not None:
                return [self.nearest(inputs, result) for result in tensors(results)]
            return tensors(self.program(*inputs))

    def off(self, results: Sequence[Any], exact: Exact) -> float:
        """The error of results."""
        found = tensors(results)
        if len(found) != len(exact):
            return math.inf
        return max(furthest(a, e) for a, e in zip(found, exact, strict=True))


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model in bfloat16: inference without gradients, or forward and backward."""

    name: str
    kind: GpuKind
    size: str
    build: Callable[[bool, bool], Built]  # of: whether tiny, whether for training
    memory_bound: bool = False
    nearest: None = None

    def tasks(self, device: torch.device, tiny: bool) -> list[Task]:
        """One model with one batch."""
        train = self.kind == "train"
        with torch.device(device):  # weights are drawn where they stay
            module, inputs = self.build(tiny, train)
        module = module.to(BF16).train(train)
        given = tuple(value.to(BF16) if value.is_floating_point() else value for value in inputs)
        return [Task(module, given, tuple(module.parameters()) if train else ())]

    def exact(self, task: Task, results: Sequence[Any]) -> Exact:
        """Results and gradients in float64."""
        module: Any = copy.deepcopy(task.program)
        module = module.double()
        leaves = tuple(module.parameters()) if task.leaves else ()
        wide_task = Task(module, tuple(map(wide, task.inputs)), leaves)
        output = wide_task.step(module)
        return [value.detach() for value in tensors(wide_task.results(output))]

    def off(self, results: Sequence[Any], exact: Exact) -> float:
        """The error of results and gradients."""
        return largest_norm(tensors(results), exact)


GpuCase: TypeAlias = Kernel | Model


# ---------------------------------------------------------------------------------------------
# Kernels


def softmax(x: Tensor) -> Tensor:
    """Over rows."""
    return torch.softmax(x, -1)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Over rows, with weight and bias."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama writes it, of a sum that goes on as well."""
    total = x + residual
    inner = up(total)
    normed = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype), total


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """What follows the first product of a feed-forward network."""
    return F.gelu(x + bias)


def swiglu(gate: Tensor, inner: Tensor) -> Tensor:
    """The gate of Llama's feed-forward network."""
    return F.silu(gate) * inner


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over rows, in float32, as language models have it."""
    return F.cross_entropy(up(logits), target)


def column_sum(x: Tensor) -> Tensor:
    """Over the first axis, which is the one that does not lie together."""
    return x.sum(0)


def global_mean(x: Tensor) -> Tensor:
    """Of all elements."""
    return x.mean()


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    """A transposed read beside a plain one."""
    return x.t() + y


def dropout_residual(x: Tensor, residual: Tensor) -> Tensor:
    """A tenth dropped, then added."""
    return F.dropout(x, DROPPED, training=True) + residual


def nearest_dropout(inputs: Sequence[Tensor], result: Tensor) -> Tensor:
    """Kept or dropped, whichever the result is nearer to; NaN if other shares are dropped."""
    x, residual = inputs
    kept = residual + x / (1 - DROPPED)
    is_kept = (result - kept).abs() < (result - residual).abs()
    share = 1 - float(is_kept.double().mean())
    # Five deviations, and a hundredth: of tiny x both are as near.
    allowed = 5 * (DROPPED * (1 - DROPPED) / result.numel()) ** 0.5 + 0.01
    exact = torch.where(is_kept, kept, residual)
    return exact if abs(share - DROPPED) <= allowed else exact * math.nan


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, as Llama writes it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out: product, softmax, product."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def product(a: Tensor, b: Tensor) -> Tensor:
    """Sizes that no vector divides."""
    return a @ b


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The first half of a feed-forward network."""
    return F.gelu(F.linear(x, weight, bias))


def _normal(count: int, dtype: torch.dtype = BF16) -> Draw:
    return lambda size: tuple(torch.randn(size, dtype=dtype) for _ in range(count))


def _with_rows(whole: int, rows: int) -> Draw:
    """Tensors of the size, and tensors of its last axis."""

    def draw(size: Size) -> tuple[Tensor, ...]:
        vectors = tuple(torch.randn(size[-1], dtype=BF16) for _ in range(rows))
        return _normal(whole)(size) + vectors

    return draw


def _draw_logits(size: Size) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=BF16), torch.randint(size[-1], size[:1])


def _draw_rotary(size: Size) -> tuple[Tensor, ...]:
    angles = torch.randn(size[-2:])
    return torch.randn(size, dtype=BF16), angles.cos().to(BF16), angles.sin().to(BF16)


def _draw_product(size: Size) -> tuple[Tensor, ...]:
    rows, inner, columns = size
    return torch.randn(rows, inner, dtype=BF16), torch.randn(inner, columns, dtype=BF16)


def _draw_linear(size: Size) -> tuple[Tensor, ...]:
    rows, inner, columns = size
    weight = torch.randn(columns, inner, dtype=BF16) * inner**-0.5
    return torch.randn(rows, inner, dtype=BF16), weight, torch.randn(columns, dtype=BF16)


def _product_flops(size: Size) -> int:
    return 2 * math.prod(size)


def _attention_flops(size: Size) -> int:
    return 4 * math.prod(size) * size[-2]


ROWS: Final = (16384, 4096)
TINY: Final = (64, 48)

KERNELS: Final = (
    Kernel("softmax", softmax, _normal(1), ROWS, TINY),
    Kernel("layernorm", layernorm, _with_rows(1, 2), ROWS, TINY),
    Kernel("rmsnorm_residual", rmsnorm_residual, _with_rows(2, 1), ROWS, TINY),
    Kernel("bias_gelu", bias_gelu, _with_rows(1, 1), (16384, 16384), TINY),
    Kernel("swiglu", swiglu, _normal(2), (16384, 11008), TINY),
    Kernel("cross_entropy", cross_entropy, _draw_logits, (8192, 32000), (16, 50)),
    Kernel("column_sum", column_sum, _normal(1, torch.float32), ROWS, TINY),
    Kernel("global_mean", global_mean, _normal(1, torch.float32), (1 << 28,), (4096,)),
    Kernel("transpose_add", transpose_add, _normal(2, torch.float32), (8192, 8192), (48, 48)),
    Kernel(
        "dropout_residual",
        dropout_residual,
        _normal(2),
        ROWS,
        (256, 256),
        nearest=nearest_dropout,
    ),
    Kernel("rotary", rotary, _draw_rotary, (8, 32, 2048, 128), (2, 3, 5, 8)),
    Kernel(
        "plain_attention",
        plain_attention,
        _normal(3),
        (8, 16, 2048, 64),
        (2, 3, 16, 8),
        memory_bound=False,
        flops=_attention_flops,
    ),
    Kernel(
        "mm_odd",
        product,
        _draw_product,
        (8191, 4095, 4095),
        (31, 15, 15),
        memory_bound=False,
        flops=_product_flops,
    ),
    Kernel(
        "linear_gelu",
        linear_gelu,
        _draw_linear,
        (8192, 4096, 16384),
        (16, 8, 24),
        memory_bound=False,
        flops=_product_flops,
    ),
)


# ---------------------------------------------------------------------------------------------
# Models.  What builds them is imported when one is: transformers are slow to import.


def _bert(tiny: bool, train: bool) -> Built:
    from benchmarks.models import text

    return text.bert(text.TINY if tiny else replace(text.BERT_BASE, batch=32, length=512), train)


def _gpt2(tiny: bool, train: bool) -> Built:
    from benchmarks.models import text

    return text.gpt2(text.TINY if tiny else replace(text.GPT2_SMALL, batch=8, length=1024), train)


def _llama(batch: int, length: int) -> Callable[[bool, bool], Built]:
    """Eight layers of Llama-3.2-1B."""

    def build(tiny: bool, train: bool) -> Built:
        from benchmarks.models import text

        full = text.Sizes(
            layers=8,
            width=2048,
            heads=32,
            inner=8192,
            vocabulary=128256,
            key_heads=8,
            batch=batch,
            length=length,
        )
        return text.llama(text.TINY if tiny else full, train)

    return build


def _vit(tiny: bool, train: bool) -> Built:
    from benchmarks.models import vit

    return vit.vit(vit.TINY if tiny else replace(vit.VIT_BASE, batch=128), train)


def _resnet50(batch: int) -> Callable[[bool, bool], Built]:
    def build(tiny: bool, train: bool) -> Built:
        from benchmarks.models import convolutional as nets

        return nets.resnet50(nets.TINY if tiny else replace(nets.FULL, batch=batch), train)

    return build


MODELS: Final = (
    Model("bert_infer", "infer", "batch 32, 512 tokens", _bert),
    Model("vit_infer", "infer", "batch 128, 224x224", _vit),
    Model("resnet50_infer", "infer", "batch 256, 224x224", _resnet50(256)),
    Model("llama_infer", "infer", "8 layers of 1B, batch 4, 512 tokens", _llama(4, 512)),
    Model("llama_small_infer", "infer", "8 layers of 1B, batch 1, 16 tokens", _llama(1, 16)),
    Model("gpt2_train", "train", "batch 8, 1024 tokens", _gpt2),
    Model("llama_train", "train", "8 layers of 1B, batch 4, 512 tokens", _llama(4, 512)),
    Model("resnet50_train", "train", "batch 128, 224x224", _resnet50(128)),
)

HOST: Final = "host"  # the row that times the host, in gpu_host.py
CASES: Final[dict[str, GpuCase]] = {case.name: case for case in (*KERNELS, *MODELS)}
ORDER: Final = (HOST, *CASES)
