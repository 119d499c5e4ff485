"""An interpreter that holds every value against what the compiler knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stator.errors import StatorError
from stator.graph.verify import user_line
from stator.torch_api import SYMBOLIC_TYPES, size_expression


class CheckingInterpreter(fx.Interpreter):
    """Runs a graph node by node; each result must have the type, size and strides that are noted.

    Strides count where they are significant: along axes with more than one element.  Raises
    StatorError, naming the node and the user's line.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.sizes: dict[Any, int] = {}  # what symbols are, as inputs and results show them

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, checked."""
        result = super().run_node(n)
        if n.op != "output":
            noted = n.meta.get("val", n.meta.get("example_value"))
            for reason in self._differences(result, noted):
                raise StatorError(
                    f"{n.name} = {n.target}: {reason}",
                    where=user_line(n),
                    hint="the operator's fake implementation, or a pass, says something else",
                )
        return result

    def _differences(self, found: Any, noted: Any) -> list[str]:
        if isinstance(noted, tuple | list):
            if not isinstance(found, tuple | list) or len(found) != len(noted):
                return [f"{type(found).__name__} where {len(noted)} values were foreseen"]
            pairs = enumerate(zip(found, noted, strict=True))
            parts = [(i, self._differences(one, other)) for i, (one, other) in pairs]
            return [f"result {i}: {reason}" for i, reasons in parts for reason in reasons]
        if isinstance(noted, torch.Tensor):
            return self._of_tensor(found, noted)
        if isinstance(noted, torch.SymInt) and isinstance(found, int):
            expected = self._number(noted, found)
            return [] if expected == found else [f"{found}, foreseen {expected}"]
        return []

    def _of_tensor(self, found: Any, noted: torch.Tensor) -> list[str]:
        if not isinstance(found, torch.Tensor):
            return [f"{type(found).__name__} where a tensor was foreseen"]
        if found.dtype is not noted.dtype:
            return [f"type {found.dtype}, foreseen {noted.dtype}"]
        if found.device.type != noted.device.type:
            return [f"device {found.device}, foreseen {noted.device}"]
        if found.layout is not torch.strided or noted.layout is not torch.strided:
            return [] if found.layout is noted.layout else [f"layout {found.layout}"]
        size = self._numbers(noted.size(), found.size())
        if size != tuple(found.size()):
            return [f"size {tuple(found.size())}, foreseen {size}"]
        stride = self._numbers(noted.stride(), found.stride())
        wide = [axis for axis, length in enumerate(size) if length > 1 and found.numel()]
        if any(stride[axis] != found.stride(axis) for axis in wide):
            return [f"strides {found.stride()}, foreseen {stride}"]
        return []

    def _numbers(self, noted: Sequence[Any], found: Sequence[int]) -> tuple[Any, ...]:
        if len(noted) != len(found):
            return tuple(noted)
        return tuple(self._number(one, other) for one, other in zip(noted, found, strict=True))

    def _number(self, noted: Any, found: int) -> Any:
        """What a noted size is in this run; a symbol that nobody has seen is what it is now."""
        if not isinstance(noted, SYMBOLIC_TYPES):
            return noted
        expression = size_expression(noted)
        if expression is None:
            return found
        if expression.is_Symbol:
            return self.sizes.setdefault(expression, found)
        known = expression.subs(self.sizes)
        return int(known) if known.is_number else found
