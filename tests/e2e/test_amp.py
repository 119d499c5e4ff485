"""Mixed precision: training in bfloat16 under autocast, with float32 parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.e2e.handwritten_models import ResNet, TransformerBlock
from tests.e2e.models import build
from tests.parity import check, compare_gradient, compare_values, compiled


class Autocast(nn.Module):
    """A module whose forward pass runs in bfloat16 where autocast allows it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(value)


class PartlyAutocast(nn.Module):
    """Two blocks under autocast, with a layer between them that turns it off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TransformerBlock()
        self.exact = nn.Linear(32, 32)
        self.last = TransformerBlock()

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = self.first(value)
            with torch.autocast("cpu", enabled=False):
                value = self.exact(value.float())
            return self.last(value)


def block_input() -> Tensor:
    return torch.randn(2, 9, 32).requires_grad_()


@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
def test_autocast_inside_the_module_matches_eager(training: bool) -> None:
    torch.manual_seed(0)
    module = Autocast(TransformerBlock()).train(training)

    with torch.set_grad_enabled(training):
        check(module, block_input(), calls=2, fullgraph=True)


def test_autocast_turned_off_inside_matches_eager() -> None:
    torch.manual_seed(1)

    check(PartlyAutocast(), block_input(), calls=2, fullgraph=True, precision=torch.bfloat16)


def test_autocast_convolutions_and_batch_norm_match_eager() -> None:
    torch.manual_seed(2)

    images = torch.randn(4, 3, 32, 32)
    model = Autocast(ResNet()).train()
    check(model, images, calls=2, fullgraph=True, precision=torch.bfloat16)


@pytest.mark.parametrize("name", ["block", "bert_sdpa", "llama_eager"])
def test_autocast_around_the_call_matches_eager(name: str) -> None:
    torch.manual_seed(3)
    module, inputs = (TransformerBlock(), (block_input(),)) if name == "block" else build(name)
    results = []
    for kind in ("ours", "eager", "wide"):
        own = copy.deepcopy(module).double() if kind == "wide" else copy.deepcopy(module)
        call = compiled(own, fullgraph=True) if kind == "ours" else own
        given = [v.double() if kind == "wide" and v.is_floating_point() else v for v in inputs]
        # autocast leaves float64 alone, so the reference stays one
        with torch.autocast("cpu", torch.bfloat16):
            output = call(*given)
            first = output[0] if isinstance(output, tuple) else output
            loss = first.float().square().mean() if kind != "wide" else first.square().mean()
        loss.backward()  # outside, as PyTorch's manual has it
        results.append((first, own))

    (ours, my_module), (eager, eager_module), (wide, wide_module) = results
    assert ours.dtype == eager.dtype
    compare_values(ours, eager, wide, "output")
    truths = dict(wide_module.named_parameters())
    mine = dict(my_module.named_parameters())
    for key, theirs in eager_module.named_parameters():
        compare_gradient(mine[key].grad, theirs.grad, truths[key].grad, key)


def test_parameters_in_bfloat16_match_eager() -> None:
    torch.manual_seed(4)
    module = TransformerBlock().bfloat16()

    check(module, torch.randn(2, 9, 32, dtype=torch.bfloat16), calls=2, fullgraph=True)
