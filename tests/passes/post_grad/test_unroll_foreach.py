"""Operators over lists become operators over tensors, and compute what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.unroll_foreach import SINGLE, unroll_foreach
from tests.parity import check

aten = torch.ops.aten

SHAPES: Final = ((3, 4), (5,), (), (2, 1, 3))


def tensors(dtype: torch.dtype = torch.float32, low: float = 0.25, high: float = 0.75) -> list[Any]:
    """Tensors of different shapes, within what every function takes."""
    if not dtype.is_floating_point:
        return [torch.randint(1, 9, shape).to(dtype) for shape in SHAPES]
    return [torch.empty(shape, dtype=dtype).uniform_(low, high) for shape in SHAPES]


def graph_of(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    return module


def unrolled(module: fx.GraphModule, fuel: int | None = None) -> int:
    """Run the pass; how many operators it says it unrolled."""
    count = unroll_foreach(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="unroll_foreach")
    module.recompile()
    return count


def lists_in(module: fx.GraphModule) -> list[str]:
    """Operators over lists that are left."""
    calls = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    return [name for name in calls if "_foreach_" in name]


# Every operator


def example(argument: Any, dtype: torch.dtype) -> Any:
    """A value for an argument of a schema."""
    kind = str(argument.type)
    whole = not dtype.is_floating_point
    if kind == "List[Tensor]":
        return tensors(dtype)
    if kind == "Tensor":
        return torch.tensor(2 if whole else 0.5, dtype=dtype)
    if kind == "List[number]":
        return [1, 2, 3, 4] if whole else [0.5, 1.5, 2.0, 0.25]
    assert kind == "number", f"{argument.name}: {kind}"
    return 2 if whole else 1.5


def arguments(operator: Any, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Values for all arguments but flags."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if str(argument.type) in ("bool", "Optional[int]"):
            continue
        value = example(argument, dtype)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            given.append(value)
    return given, named


DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", SINGLE, ids=str)
def test_every_operator_computes_what_eager_does(operator: Any, dtype: torch.dtype) -> None:
    given, named = arguments(operator, dtype)
    try:
        expected = operator(*given, **named)
    except (RuntimeError, NotImplementedError):
        pytest.skip("eager does not take this type")

    def fn(*inputs: Any) -> Any:
        return [part + 0 for part in operator(*inputs, **named)]  # the list itself is not returned

    module = graph_of(fn, *given)
    assert unrolled(module) == 1
    assert lists_in(module) == []
    for mine, theirs in zip(module(*given), expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("operator", SINGLE, ids=str)
def test_every_operator_compiled_is_eager_s(operator: Any) -> None:
    given, named = arguments(operator, torch.float32)

    def fn(*inputs: Any) -> Any:
        return operator(*inputs, **named)

    check(fn, *given, fullgraph=True)


EXTREMES: Final = ("minimum", "maximum", "clamp_min", "clamp_max")


@pytest.mark.parametrize("name", EXTREMES)
def test_nan_wins_in_extremes(name: str) -> None:
    nan = float("nan")
    values = [torch.tensor([nan, 1.0, -1.0]), torch.tensor([2.0, nan])]
    others = [torch.tensor([1.0, nan, 3.0]), torch.tensor([nan, -5.0])]
    packet = getattr(aten, f"_foreach_{name}")

    check(lambda x, y: packet.List(x, y), values, others, fullgraph=True)
    check(lambda x: packet.Scalar(x, 0.5), values, fullgraph=True)
    check(lambda x: packet.ScalarList(x, [0.5, 1.5]), values, fullgraph=True)


INPLACE: Final[dict[str, Callable[..., Any]]] = {
    "add": lambda x, y: torch._foreach_add_(x, y, alpha=2),
    "mul": lambda x, y: torch._foreach_mul_(x, 0.5),
    "lerp": lambda x, y: torch._foreach_lerp_(x, y, 0.25),
    "addcdiv": lambda x, y: torch._foreach_addcdiv_(x, y, y, [1.0, 2.0, 3.0, 4.0]),
    "addcmul": lambda x, y: torch._foreach_addcmul_(x, y, y, 0.5),
    "sqrt": lambda x, y: torch._foreach_sqrt_(x),
    "copy": lambda x, y: torch._foreach_copy_(x, y),
    "zero": lambda x, y: torch._foreach_zero_(x),
    "tensor": lambda x, y: torch._foreach_mul_(x, torch.tensor(3.0)),
    "clamp": lambda x, y: torch._foreach_clamp_min_(x, 0.5),
}


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_operators_write_what_eager_does(name: str) -> None:
    def fn(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        INPLACE[name](x, y)
        return [part * 2 for part in x]

    check(fn, tensors(), tensors(), fullgraph=True)


# The pass


def two_adds(x: list[Tensor]) -> list[Tensor]:
    y = torch._foreach_add(x, 1)
    return [part * 2 for part in torch._foreach_mul(y, y)]


def test_operators_in_a_row_are_unrolled_one_after_the_other() -> None:
    module = graph_of(two_adds, tensors())

    assert unrolled(module) == 2
    assert lists_in(module) == []
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == (
        [aten.add.Tensor] * 4 + [aten.mul.Tensor] * 8
    )


def test_without_fuel_the_graph_is_unchanged() -> None:
    module = graph_of(two_adds, tensors())
    before = str(module.graph)

    assert unrolled(module, fuel=0) == 0
    assert str(module.graph) == before


def test_fuel_for_one_unrolls_the_first() -> None:
    module = graph_of(two_adds, tensors())

    assert unrolled(module, fuel=1) == 1
    assert lists_in(module) == ["aten._foreach_mul.List"]


def test_values_of_fake_tensors_go_with_them() -> None:
    module = graph_of(two_adds, tensors())
    unrolled(module)

    sizes = [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.target is aten.add.Tensor]

    assert sizes == list(SHAPES)


def test_operators_of_no_single_tensor_stay() -> None:
    module = graph_of(lambda x: [part + 1 for part in torch._foreach_norm(x)], tensors())

    assert unrolled(module) == 0
    assert lists_in(module) == ["aten._foreach_norm.Scalar"]
