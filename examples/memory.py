"""A training step in less memory: the curve of choices, then the same step under a limit.

`python examples/memory.py`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stator


class Encoder(nn.Module):
    """A few encoder layers and a loss."""

    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.1, batch_first=True, activation="gelu"
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def main() -> None:
    """Show the curve, then train one step within 34 MiB."""
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(16, 64, 128)
    print(stator.memory_plan(model, x))

    step = torch.compile(model, backend="stator", options={"memory_limit": "34MiB"})
    step(x).backward()
    record = stator.last_compilation()
    assert record is not None
    assert record.step_peak is not None
    print(f"\nunder a limit of 34 MiB a step holds at most {record.step_peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
