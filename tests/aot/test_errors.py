"""What goes wrong is said in full, and leaves everything as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import stator
from stator.errors import CompileError, OptionError, StatorError, StatorWarning
from tests.aot.custom_operators import no_gradient
from tests.parity import check, compiled


def cannot_compile(x: Tensor) -> Tensor:
    """A program without a joint graph: its operator has no gradient."""
    return no_gradient(x * 2) + 1


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def failure(call: Callable[..., Any], *inputs: Any) -> CompileError:
    """The CompileError inside of what Dynamo raises."""
    with pytest.raises(BackendCompilerFailed) as caught:
        call(*inputs)
    inner = caught.value.inner_exception
    assert isinstance(inner, CompileError)
    return inner


# Options


def test_an_unknown_option_names_the_nearest_and_all_there_are() -> None:
    with pytest.raises(OptionError) as caught:
        stator.compile(torch.sin, stric=True)
    message = str(caught.value)
    assert "'stric'" in message
    assert "did you mean 'strict'?" in message
    assert all(name in message for name in stator.list_options())


def test_an_unknown_option_given_to_torch_compile_says_the_same() -> None:
    call = torch.compile(lambda x: x + 1, backend="stator", options={"fuell": 3})
    with pytest.raises(Exception, match=r"did you mean 'fuel'\?"):
        call(torch.ones(3))


def test_an_option_of_the_wrong_type_says_what_it_wants() -> None:
    with pytest.raises(OptionError, match="fuel"):
        stator.compile(torch.sin, fuel="much")
    with pytest.raises(OptionError, match="True or False"):
        stator.compile(torch.sin, strict=1)


def test_an_unknown_mode_names_those_there_are() -> None:
    with pytest.raises(OptionError, match="reduce-overhead"):
        stator.compile(torch.sin, mode="reduce-overheat")


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune"])
def test_every_mode_of_torch_compile_is_understood(mode: str | None) -> None:
    call = torch.compile(lambda x: x + 1, backend="stator", mode=mode)
    assert call(torch.ones(3)).tolist() == [2, 2, 2]


def test_the_defaults_are_listed() -> None:
    listed = stator.list_options()
    assert listed["strict"] is False
    assert stator.Options(**listed) == stator.Options()


# A failed compilation


def test_a_failed_compilation_runs_eagerly_and_warns_once_naming_the_stage() -> None:
    call, x = stator.compile(cannot_compile), leaf(3)
    with pytest.warns(StatorWarning, match="trace") as caught:
        out = call(x)
    assert len(caught) == 1
    assert torch.equal(out, x * 2 + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(x)


def test_the_reason_of_the_fallback_is_recorded() -> None:
    with pytest.warns(StatorWarning):
        stator.compile(cannot_compile)(leaf(3))
    failed = stator.last_compilation()
    assert failed is not None
    assert "no autograd formula" in (failed.fallback or "")
    stator.compile(lambda x: x + 1)(torch.ones(3))
    fine = stator.last_compilation()
    assert fine is not None
    assert fine.fallback is None


def test_a_strict_compilation_raises_what_where_and_what_next() -> None:
    error = failure(stator.compile(cannot_compile, strict=True), leaf(3))
    assert isinstance(error, StatorError)
    assert error.stage == "trace"
    assert "no autograd formula" in error.what
    assert "test_errors.py" in (error.where or "")
    assert error.hint


def test_a_failure_in_a_later_stage_names_that_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no halves today")

    monkeypatch.setattr("stator.aot.compile.split", refuse)
    assert failure(stator.compile(torch.sin, strict=True), leaf(3)).stage == "partition"
    with pytest.warns(StatorWarning, match="partition.*no halves today"):
        stator.compile(lambda x: x.sin())(leaf(3))


def test_only_the_graph_that_fails_runs_eagerly() -> None:
    def fn(x: Tensor) -> Tensor:
        y = cannot_compile(x)
        torch._dynamo.graph_break()
        return y.detach() * 3

    call, x = stator.compile(fn), leaf(3)
    with pytest.warns(StatorWarning) as caught:
        out = call(x)
    assert len(caught) == 1
    assert torch.equal(out, (x.detach() * 2 + 1) * 3)


def spoil_everything(x: Tensor, buffer: Tensor) -> Tensor:
    """Change all there is to change, and then fail to compile."""
    buffer.add_(1)
    torch.set_grad_enabled(False)
    noise = torch.rand(3)
    torch.set_grad_enabled(True)
    with torch.autocast("cpu"):
        return no_gradient(x * noise + buffer)


@pytest.mark.parametrize(
    "make", [stator.compile, stator.aot_function], ids=["compile", "aot_function"]
)
def test_a_failed_compilation_leaves_no_trace(make: Callable[..., Any]) -> None:
    call = make(spoil_everything, strict=True)
    x, buffer = leaf(3), torch.zeros(3)
    before = x.detach().clone()
    state = torch.get_rng_state()
    with pytest.raises((BackendCompilerFailed, StatorError)):
        call(x, buffer)
    assert torch.equal(x.detach(), before)
    assert x._version == 0
    assert buffer.tolist() == [0, 0, 0]
    assert buffer._version == 0
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_failed_compilation_leaves_parameters_and_statistics_alone() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return no_gradient(self.norm(x))

    module = Failing()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    failure(stator.compile(module, strict=True), torch.randn(4, 3))
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())


# Run time


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x[:, None]),
        lambda x, i: i // (i - i),
        lambda x, i: torch.linalg.cholesky(-torch.eye(3) * i[0]) + x,
        lambda x, i: torch.linalg.inv(torch.zeros(3, 3)) + x,
    ],
    ids=["index", "index_select", "gather", "embedding", "divide", "cholesky", "inv"],
)
def test_what_an_operator_raises_on_data_is_raised(fn: Callable[..., Any]) -> None:
    check(fn, torch.randn(3), torch.tensor([7]))


def test_a_function_works_again_after_a_call_that_failed() -> None:
    call, x = compiled(lambda x, i: x[i] * 2), torch.arange(3.0)
    with pytest.raises(IndexError):
        call(x, torch.tensor([7]))
    assert call(x, torch.tensor([1])).tolist() == [2]


def test_a_failed_call_leaves_the_modes_as_they_were() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu"):
            return x[index] * 2

    call = compiled(fn)
    with pytest.raises(IndexError):
        call(torch.randn(3), torch.tensor([7]))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_an_assertion_of_the_program_is_raised() -> None:
    def fn(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 0)
        return x * 2

    check(fn, torch.tensor([-1.0]))


@pytest.mark.filterwarnings("ignore")  # that such a graph was left to eager
def test_shapes_that_do_not_fit_raise_as_in_eager() -> None:
    check(lambda x, y: x @ y, torch.randn(2, 3), torch.randn(2, 3), options={"strict": False})


def test_an_exception_the_function_raises_itself_is_raised() -> None:
    def fn(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three is not welcome")
        return x + 1

    check(fn, torch.randn(3))
