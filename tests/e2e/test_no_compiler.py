"""No compiler on the machine: kernels are built in process."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from torch import nn
import stator

torch.manual_seed(0)
layers = [nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4), nn.Softmax(-1)]
model = nn.Sequential(*layers)
x = torch.randn(8, 16)
compiled = torch.compile(model, backend="stator", options={"strict": True, "kernels": True})
torch.testing.assert_close(compiled(x), model(x))
compiled(x).square().sum().backward()
assert model[0].weight.grad is not None
print(sum(stage.name.endswith("/plan") for stage in stator.last_compilation().stages))
"""


def test_a_model_compiles_and_trains_with_an_empty_path() -> None:
    environment = {**os.environ, "PATH": "", "CC": "", "CXX": ""}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]  # a forward and a backward were planned
