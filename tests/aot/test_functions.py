"""stator.aot_function and stator.aot_module: the same without Dynamo, so metadata changes too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.errors import OptionError
from tests.parity import BACKEND, check


def ahead_of_time(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without Dynamo; by torch's own compiler if another backend is tried."""
    if BACKEND.get() == "stator":
        make: Any = stator.aot_module if isinstance(fn, nn.Module) else stator.aot_function
        return partial(make(fn, strict=True))
    from torch._functorch.aot_autograd import aot_function, aot_module
    from torch._functorch.compilers import nop

    torchs: Any = aot_module if isinstance(fn, nn.Module) else aot_function
    return partial(
        torchs(fn, fw_compiler=nop, bw_compiler=nop, keep_inference_input_mutations=True)
    )


def same(fn: Callable[..., Any], *inputs: Any, **settings: Any) -> None:
    """`check`, compiling ahead of time."""
    check(fn, *inputs, compiler=ahead_of_time, **settings)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_function_gives_the_same_result() -> None:
    same(lambda x, y: (x @ y).relu(), torch.randn(2, 3), torch.randn(3, 2))


def test_a_function_trains() -> None:
    same(lambda x, y: (x @ y).relu() * 2, leaf(2, 3), leaf(3, 2), calls=2)


def test_arguments_and_results_are_nested() -> None:
    def fn(given: dict[str, Any], pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        total = given["x"] + pair[0] * pair[1]
        return {"total": total, "parts": [given["x"] * 2, (pair[1].sin(),)], "none": None}

    same(fn, {"x": leaf(3)}, (leaf(3), torch.randn(3)))


def test_other_arguments_are_constants_of_the_compilation() -> None:
    call = ahead_of_time(lambda x, n: x * n)
    assert call(torch.ones(2), 3).tolist() == [3, 3]
    assert call(torch.ones(2), 4).tolist() == [4, 4]


def test_keywords_are_arguments_too() -> None:
    call = ahead_of_time(lambda x, *, scale: x * scale)
    assert call(torch.ones(2), scale=torch.tensor(2.0)).tolist() == [2, 2]


def test_arguments_of_another_kind_are_compiled_for() -> None:
    call = stator.aot_function(lambda x: x.sin() * 2)
    for x in (torch.ones(3), torch.ones(2, 2), torch.ones(3, dtype=torch.float64), leaf(3)):
        out = call(x)
        torch.testing.assert_close(out, x.sin() * 2)
        assert out.requires_grad == x.requires_grad


def test_one_function_serves_calls_with_and_without_grad() -> None:
    call, x = stator.aot_function(torch.sin), leaf(3)
    assert call(x).requires_grad
    with torch.no_grad():
        assert not call(x).requires_grad
    assert call(x).requires_grad


def test_a_mutated_argument_is_written() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x + 1

    same(fn, torch.randn(3), torch.randn(3))
    same(fn, torch.randn(3), leaf(3))


def test_one_argument_given_twice_is_one() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    x = torch.randn(3)
    same(fn, x, x)
    y = leaf(3)
    same(torch.mul, y, y)


def test_overlapping_arguments_see_each_others_writes() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    x = torch.randn(5)
    same(fn, x[:3], x[2:])


def test_results_share_with_arguments() -> None:
    same(lambda x: (x, x[0], x.t(), x * 2), leaf(2, 3))


# Metadata


METADATA: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0).t_(),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 3)),
    "swapdims_": lambda x: x.swapdims_(0, 1),
}


@pytest.mark.parametrize("name", METADATA)
def test_a_change_of_metadata_reaches_the_argument(name: str) -> None:
    change = METADATA[name]

    def fn(x: Tensor) -> Tensor:
        change(x)
        return x * 2

    same(fn, torch.randn(2, 3))


@pytest.mark.parametrize("name", METADATA)
def test_a_change_of_metadata_and_data_reaches_the_argument(name: str) -> None:
    change = METADATA[name]

    def fn(x: Tensor) -> Tensor:
        change(x)
        x.mul_(3)
        return x + 1

    same(fn, torch.randn(2, 3))


def test_a_change_of_metadata_with_history_reaches_the_argument() -> None:
    def fn(x: Tensor) -> Tensor:
        x.t_()
        return x * 2

    same(fn, leaf(2, 3) * 1)


def test_a_change_of_metadata_and_data_with_history_reaches_the_argument() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.t_()
        x.mul_(w)
        return x + 1

    same(fn, torch.randn(2, 3), leaf(3, 2))


def test_a_storage_set_is_taken_over() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y * 2)
        return x + 1

    same(fn, torch.randn(3), torch.randn(5))


def test_a_storage_set_and_then_written_is_taken_over() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y * 2)
            x.add_(1)
        return x + 1

    same(fn, torch.randn(3), torch.randn(5))


def test_a_resized_argument_is_resized() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.resize_(2, 3)
            x.copy_(y)
        return x + 1

    same(fn, torch.randn(2), torch.randn(2, 3))


# Modules


def test_a_module_gives_the_same_result_and_gradients() -> None:
    same(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3), calls=2)


def test_a_module_updates_its_buffers() -> None:
    same(nn.BatchNorm1d(4), torch.randn(5, 4), calls=3)


def test_a_compiled_module_shares_its_parameters() -> None:
    model = nn.Linear(3, 2)
    call = stator.aot_module(model)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(7)
    assert call(torch.randn(1, 3)).tolist() == [[7, 7]]
    assert {id(p) for p in call.parameters()} == {id(p) for p in model.parameters()}


def test_a_compiled_module_follows_train_and_eval() -> None:
    call = stator.aot_module(nn.Dropout(1.0))
    assert call(torch.ones(3)).tolist() == [0, 0, 0]
    call.eval()
    assert call(torch.ones(3)).tolist() == [1, 1, 1]


def test_tied_parameters_of_a_module_get_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    same(model, torch.randn(2, 3))


def test_second_derivatives_without_dynamo() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        return torch.autograd.grad(fn(x).sum(), x, create_graph=True)

    same(lambda x: x.sin() * x, leaf(3), use=use)


def test_what_the_function_raises_is_raised() -> None:
    def fn(x: Tensor) -> Tensor:
        raise KeyError("the function's own")

    with pytest.raises(KeyError, match="the function's own"):
        stator.aot_function(fn)(torch.ones(3))


def test_a_wrong_option_is_refused_before_the_first_call() -> None:
    with pytest.raises(OptionError, match="strict"):
        stator.aot_function(torch.sin, stric=True)
