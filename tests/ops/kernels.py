"""How many kernels a program becomes, without compiling any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx

from stator.lower.lower import Lowering
from stator.schedule.fuse import fuse


def kernel_count(fn: Callable[..., Any], *inputs: Any) -> int:
    """Kernels of `fn` as it stands, traced operator by operator; none may stay with torch."""
    module = make_fx(lambda *given: fn(*given), tracing_mode="fake")(*inputs)
    lowering = Lowering(module)
    items = lowering.run()
    assert not lowering.reasons, lowering.reasons
    return sum(group.alone is None for group in fuse(items, lowering.sizes).groups)
