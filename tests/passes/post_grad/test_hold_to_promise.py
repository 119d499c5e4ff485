"""Results of users' operators are held to the sizes that their fakes foretold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stator
from stator.graph.run import Ctx
from stator.ops.promises import as_promised
from stator.passes.post_grad.hold_to_promise import hold_to_promise
from stator.patterns import fwd_only
from tests.parity import check


@pytest.fixture
def two() -> Iterator[Any]:
    """An operator that returns two tensors, and lies of their sizes if its input is negative."""
    library = torch.library.Library("stator_test_promises", "DEF")
    library.define("two(Tensor x) -> (Tensor, Tensor)")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2, x[1:] + 1) if x[0, 0] >= 0 else (x * 2, x[2:] + 1)

    library.impl("two", run, "CPU")
    torch.library.register_fake(
        "stator_test_promises::two",
        lambda x: (torch.empty_like(x), torch.empty_like(x[1:])),
        lib=library,
    )
    yield torch.ops.stator_test_promises.two
    library._destroy()


def test_each_result_is_checked_once(two: Any) -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b = two(x)
        return [a.sin() + a.cos(), b.sum(), b]

    module = fwd_only(program, [torch.ones(4, 4)])

    assert hold_to_promise(module.graph, Ctx()) == 2
    checks = module.graph.find_nodes(op="call_function", target=as_promised)
    assert [node.args[1] for node in checks] == [[4, 4], [3, 4]]


def test_operators_of_torch_are_believed() -> None:
    module = fwd_only(lambda x: [x.topk(2)[0].sin()], [torch.ones(4, 4)])
    assert hold_to_promise(module.graph, Ctx()) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_broken_promise_raises_and_names_the_operator(two: Any, dynamic: bool) -> None:
    def program(x: Tensor) -> Tensor:
        a, b = two(x)
        return a[1:].sin() * b

    check(program, torch.ones(4, 4), dynamic=dynamic)
    torch._dynamo.reset()
    compiled = stator.compile(program, strict=True, dynamic=dynamic)
    compiled(torch.ones(4, 4))
    if not dynamic:  # sizes that are symbols are known at run time alone
        with pytest.raises(RuntimeError, match=r"two.default returned a tensor of sizes \[2, 4\]"):
            compiled(-torch.ones(4, 4))
