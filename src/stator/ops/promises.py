"""What operators of users' said that they return, held against what they do return."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def as_promised(value: Tensor, sizes: Sequence[int | None], operator: str) -> Tensor:
    """`value`, which has the sizes that were foretold (None: known at run time alone)."""
    found = value.size()
    wrong = len(found) != len(sizes) or any(
        size not in (None, real) for size, real in zip(sizes, found, strict=True)
    )
    if wrong:
        said = ", ".join("?" if size is None else str(size) for size in sizes)
        raise RuntimeError(
            f"{operator} returned a tensor of sizes {list(found)}, and its fake implementation "
            f"said [{said}]: correct that one (torch.library.register_fake)"
        )
    return value
