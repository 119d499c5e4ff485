"""The whole road, in seconds: what to run before every commit."""

import torch
from torch import nn


def test_a_model_compiles_for_inference_and_for_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    x = torch.randn(4, 8)
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend="stator", fullgraph=True, options={"strict": True})

    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    ours = torch.autograd.grad(compiled(x).square().sum(), parameters)
    eager = torch.autograd.grad(model(x).square().sum(), parameters)
    torch.testing.assert_close(ours, eager)
