"""Whether a pass left what a graph computes: both versions run, on the same inputs.

Slow, for `Options.verify_passes="values"`.  Inputs are the user's own where the graph has them, and
made up for the rest (tangents, what a backward saved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.errors import VerifyError
from stator.graph.generators import gpus_of, preserved, states
from stator.graph.verify import user_line
from stator.torch_api import pytree, size_hint

SEED: Final = 20240607
# How far a rewrite may move a value, relative to the largest one beside it.
TOLERANCES: Final = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
FLOAT32: Final = 2e-4


@dataclass(slots=True)
class Before:
    """A graph as it was before a pass, and what it computed."""

    inputs: list[Any]
    values: dict[str, Any]

    @staticmethod
    def of(graph: fx.Graph, examples: Sequence[Any]) -> Before | None:
        """Run the graph; None if its values cannot be compared: it draws random numbers."""
        inputs = example_inputs(graph, examples)
        gpus = gpus_of(graph.nodes)
        with preserved(gpus):
            drawn = states(gpus)
            values = _run(graph, inputs)
            is_random = not all(map(torch.equal, drawn, states(gpus)))
        return None if is_random else Before(inputs, values)

    def compare(self, graph: fx.Graph, after: str) -> None:
        """Raise VerifyError, naming the pass `after` which a result differs, and the first node."""
        values = _run(graph, self.inputs)
        wrong = [
            node
            for node in graph.nodes
            if node.name in self.values and _differ(self.values[node.name], values[node.name])
        ]
        returned = [node for node in wrong if node.op == "output"]
        if returned:  # an inner value may change: nobody sees it
            guilty = wrong[0]
            raise VerifyError(
                after,
                f"{guilty.name} has another value than before",
                where=user_line(guilty),
                hint="Options.skip leaves the pass out; `stator bisect` finds the rewrite",
            )


def example_inputs(graph: fx.Graph, examples: Sequence[Any]) -> list[Any]:
    """Values for a graph's inputs: those of `examples` that fit, in order, or made up."""
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        known = node.meta.get("val", node.meta.get("example_value"))
        given: Any = examples[position] if position < len(examples) else None
        made.append(given.detach() if _fits(given, known) else _made_up(known, generator))
    return made


def _fits(given: Any, known: Any) -> bool:
    if not isinstance(given, torch.Tensor) or not isinstance(known, torch.Tensor):
        return False
    return (given.dtype, _sizes(given)) == (known.dtype, _sizes(known))


def _sizes(value: torch.Tensor) -> list[Any]:
    return [_number(size) for size in value.size()]


def _number(size: Any) -> Any:
    return size_hint(size) if isinstance(size, torch.SymInt) else size


def _made_up(known: Any, generator: torch.Generator) -> Any:
    if not isinstance(known, torch.Tensor):
        return _number(known)
    sizes, strides = _sizes(known), [_number(stride) for stride in known.stride()]
    result = torch.empty_strided(sizes, strides, dtype=known.dtype, device=known.device)
    if known.dtype is torch.bool:
        return result.copy_(torch.rand(sizes, generator=generator) < 0.5)
    if not (known.is_floating_point() or known.is_complex()):
        return result.copy_(torch.randint(0, 2, sizes, generator=generator))  # fit for an index
    return result.copy_(torch.randn(sizes, generator=generator))


def _run(graph: fx.Graph, inputs: Sequence[Any]) -> dict[str, Any]:
    """Every node's value, by its name."""
    values: dict[str, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = values[n.name] = super().run_node(n)
            return result

    own = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, list(inputs))
    with torch.no_grad():
        module = graph.owning_module or torch.nn.Module()
        Recorder(module, garbage_collect_values=False, graph=graph).run(*own)
    return values


def _differ(one: Any, other: Any) -> bool:
    left, right = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(left) != len(right) or any(map(_differs, left, right))


def _differs(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
    if one.is_mkldnn or other.is_mkldnn:  # a library's own: what it computes is compared
        return bool(one.is_mkldnn != other.is_mkldnn)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    finite = one[one.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    tolerance = TOLERANCES.get(one.dtype, FLOAT32)
    return not torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
