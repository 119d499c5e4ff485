"""The harness itself: an honest backend passes, and each kind of broken one is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.copies import Copier
from tests.parity import Backend, assert_close_to_reference, check, compiled

Distort = Callable[[list[Any], Sequence[Any]], Sequence[Any]]


def broken(distort: Distort) -> Backend:
    """A backend that runs the graph eagerly and then spoils the outputs or the inputs."""

    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: tuple(distort(list(graph(*args)), args))

    return backend


def on_copies(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that forgets to write to its inputs."""
    return lambda *args: graph(*(arg.clone() for arg in args))


def affine(x: Tensor, w: Tensor) -> Tensor:
    return x * w + 1


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)


# Honest backends pass


@pytest.mark.parametrize("backend", ["eager", "aot_eager", broken(lambda outs, args: outs)])
def test_an_honest_backend_passes(backend: Backend) -> None:
    check(affine, *inputs(), backend=backend)


def test_an_honest_backend_passes_with_mutation_views_and_buffers() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return x, x.t(), w[0], (x @ w.t()).relu()

    check(fn, *inputs(), backend="eager")
    check(torch.nn.BatchNorm1d(4), torch.randn(3, 4), backend="eager", calls=3)


def test_both_raising_the_same_type_passes() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    check(fn, torch.randn(3), torch.tensor([7]), backend="eager")


# What is wrong is caught


def test_wrong_values_are_caught() -> None:
    with pytest.raises(AssertionError, match="output 0: error"):
        check(affine, *inputs(), backend=broken(lambda outs, args: [outs[0] + 1e-5]))


def test_a_value_that_is_not_a_number_is_caught() -> None:
    spoil = broken(lambda outs, args: [torch.where(outs[0] == outs[0].max(), torch.nan, outs[0])])
    with pytest.raises(AssertionError, match="output 0: error nan"):
        check(affine, *inputs(), backend=spoil)


def test_a_finite_value_where_eager_overflows_is_caught() -> None:
    spoil = broken(lambda outs, args: [outs[0].nan_to_num()])
    with pytest.raises(AssertionError, match="other NaN or infinity"):
        check(lambda x: x * 1e38 * 1e38, torch.ones(3), backend=spoil)


def test_wrong_strides_are_caught() -> None:
    spoil = broken(lambda outs, args: [outs[0].t().contiguous().t()])
    with pytest.raises(AssertionError, match=r"output 0: stride is \(1, 3\), eager \(4, 1\)"):
        check(affine, *inputs(), backend=spoil)


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"output 0: dtype is torch\.float64"):
        check(affine, *inputs(), backend=broken(lambda outs, args: [outs[0].double()]))


def test_a_wrong_shape_is_caught() -> None:
    with pytest.raises(AssertionError, match="output 0: shape"):
        check(affine, *inputs(), backend=broken(lambda outs, args: [outs[0][None]]))


def test_a_wrong_offset_is_caught() -> None:
    spoil = broken(lambda outs, args: [torch.cat([outs[0][:1], outs[0]])[1:]])
    with pytest.raises(AssertionError, match="output 0: storage_offset is 4"):
        check(affine, *inputs(), backend=spoil)


def test_a_lost_requires_grad_is_caught() -> None:
    with pytest.raises(AssertionError, match="output 0: requires_grad is False"):
        check(affine, *inputs(), backend=broken(lambda outs, args: [outs[0].detach()]))


def test_a_new_leaf_instead_of_a_result_with_history_is_caught() -> None:
    spoil = broken(lambda outs, args: [outs[0].detach().requires_grad_()])
    with pytest.raises(AssertionError, match="output 0: is_leaf is True"):
        check(affine, *inputs(), backend=spoil)


def test_an_output_that_no_longer_shares_with_its_input_is_caught() -> None:
    with pytest.raises(AssertionError, match="share storage"):
        check(
            lambda x: (x[0], x + 1),
            torch.randn(3, 4),
            backend=broken(lambda outs, args: [outs[0].clone(), outs[1]]),
        )


def test_outputs_that_share_where_eager_has_two_storages_are_caught() -> None:
    with pytest.raises(AssertionError, match="share storage"):
        check(
            lambda x: (x + 1, x.add(1).mul(1)),
            torch.randn(3, 4),
            backend=broken(lambda outs, args: [outs[0], outs[0].view(3, 4)]),
        )


def test_a_missing_mutation_is_caught() -> None:
    with pytest.raises(AssertionError, match="input 0 after the call: error"):
        check(lambda x: x.mul_(2).sum(), torch.randn(3), backend=on_copies)


def test_a_mutation_that_eager_does_not_make_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        args[0].mul_(2)
        return outs

    with pytest.raises(AssertionError, match="input 0 after the call: error"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_version_bump_that_eager_does_not_make_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        args[0].add_(0)
        return outs

    with pytest.raises(AssertionError, match="version of input 0 bumped: True, eager False"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_missing_version_bump_is_caught() -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: graph(*(arg.data for arg in args))

    with pytest.raises(AssertionError, match="version of input 0 bumped: False, eager True"):
        check(lambda x: x.mul_(2).sum(), torch.randn(3), backend=backend)


def test_missing_metadata_mutation_is_caught() -> None:
    def fn(x: Tensor) -> Tensor:
        x.data = torch.ones(4)
        return x + 1

    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: graph(*(arg.data for arg in args))

    with pytest.raises(AssertionError, match="input 0 after the call: shape"):
        check(fn, torch.randn(3), backend=backend)


def test_buffers_left_behind_are_caught() -> None:
    with pytest.raises(AssertionError, match="buffer running_mean after the call"):
        check(torch.nn.BatchNorm1d(4), torch.randn(3, 4), backend=on_copies)


def test_a_wrong_gradient_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        outs[0].register_hook(lambda grad: grad * 1.001)
        return outs

    with pytest.raises(AssertionError, match="gradient of input leaf 0: error"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_wrong_parameter_gradient_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        outs[0].register_hook(lambda grad: grad * 1.001)
        return outs

    with pytest.raises(AssertionError, match="gradient of parameter weight: error"):
        check(torch.nn.Linear(4, 2), torch.randn(3, 4), backend=broken(spoil))


def test_a_gradient_where_eager_gives_none_is_caught() -> None:
    spoil = broken(lambda outs, args: [outs[0] + 0 * sum(arg.sum() for arg in args)])
    with pytest.raises(
        AssertionError, match=r"gradient of input leaf 1 is a tensor, eager .* None"
    ):
        check(
            lambda x, y: x * 2 + y.detach(),
            torch.randn(3, requires_grad=True),
            torch.randn(3, requires_grad=True),
            backend=spoil,
        )


def test_a_missing_gradient_is_caught() -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x, y: graph(x, y.detach())

    with pytest.raises(AssertionError, match="gradient of input leaf 1 is None"):
        check(torch.mul, *(torch.randn(3, requires_grad=True) for _ in "xy"), backend=backend)


def test_a_wrong_exception_type_is_caught() -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise KeyError("not what eager raises")

        return run

    with pytest.raises(AssertionError, match=r"raised KeyError.*eager raised IndexError"):
        check(lambda x, i: x[i], torch.randn(3), torch.tensor([7]), backend=backend)


def test_a_swallowed_exception_is_caught() -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: (args[0].clone(),)

    with pytest.raises(AssertionError, match="raised nothing, eager raised IndexError"):
        check(lambda x, i: x[i], torch.randn(3), torch.tensor([7]), backend=backend)


def test_an_exception_that_eager_does_not_raise_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        raise ValueError("only here")

    with pytest.raises(AssertionError, match=r"raised ValueError.*eager raised nothing"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_failure_in_backward_alone_is_caught() -> None:
    def refuse(grad: Tensor) -> Tensor:
        raise ValueError("only here")

    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        outs[0].register_hook(refuse)
        return outs

    with pytest.raises(AssertionError, match="backward raised ValueError"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_moved_random_generator_is_caught() -> None:
    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        torch.rand(1)
        return outs

    with pytest.raises(AssertionError, match="moved the random number generator"):
        check(affine, *inputs(), backend=broken(spoil))


def test_a_grad_mode_left_changed_is_caught() -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            outs = graph(*args)
            torch.set_grad_enabled(False)
            return outs

        return run

    with pytest.raises(AssertionError, match="mode after the call"):
        check(affine, *inputs(), backend=backend)
    assert torch.is_grad_enabled()


def test_a_second_call_that_differs_is_caught() -> None:
    calls: list[None] = []

    def spoil(outs: list[Any], args: Sequence[Any]) -> list[Any]:
        calls.append(None)
        return [outs[0] + 1] if len(calls) == 2 else outs

    check(affine, *inputs(), backend=broken(spoil))
    calls.clear()
    with pytest.raises(AssertionError, match="output 0: error"):
        check(affine, *inputs(), backend=broken(spoil), calls=2)


def test_a_check_that_compiles_nothing_is_caught() -> None:
    with pytest.raises(AssertionError, match="Dynamo found no graph"):
        check(lambda x: x, torch.randn(3), backend="eager")


def test_a_warning_from_eager_does_not_pass_for_an_expected_error() -> None:
    def fn(x: Tensor) -> Tensor:
        raise UserWarning("turned into an error by the test run")

    with pytest.raises(AssertionError, match="eager warned"):
        check(fn, torch.randn(3), backend="eager")


# Tolerance


def test_twice_the_error_of_eager_is_allowed_and_more_is_not() -> None:
    truth = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    eager = (truth + torch.tensor([1e-2, 0])).float()

    assert_close_to_reference((truth + torch.tensor([0, 1.9e-2])).float(), eager, truth, "it")
    with pytest.raises(AssertionError, match="it: error"):
        assert_close_to_reference((truth + torch.tensor([0, 2.2e-2])).float(), eager, truth, "it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_one_ulp_of_the_largest_value_is_allowed_and_four_are_not(dtype: torch.dtype) -> None:
    eager = torch.tensor([1.0, -8.0], dtype=dtype)
    ulp = 8 * torch.finfo(dtype).eps

    assert_close_to_reference(eager + ulp, eager, None, "it")
    with pytest.raises(AssertionError, match="it: error"):
        assert_close_to_reference(eager + 12 * ulp, eager, None, "it")


def test_integers_have_no_tolerance() -> None:
    with pytest.raises(AssertionError, match="it differs"):
        assert_close_to_reference(torch.tensor([3]), torch.tensor([4]), None, "it")


# Copies


def test_copies_share_what_the_originals_shared() -> None:
    base = torch.arange(6.0)
    (first, second, third, again), _ = Copier().copy_tree((base[:4], base[2:], base, base))

    assert third is again
    assert first._base is third
    assert second.storage_offset() == 2
    first.fill_(7)
    assert third.tolist() == [7, 7, 7, 7, 4, 5]
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_copy_in_float64_shares_too() -> None:
    base = torch.arange(6.0)
    (view, whole), _ = Copier(widen=True).copy_tree((base[2:], base))

    assert view.dtype == whole.dtype == torch.float64
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_a_copy_keeps_strides_leaf_and_notes() -> None:
    leaf = torch.randn(3, 4).t().requires_grad_()
    torch._dynamo.mark_dynamic(leaf, 0)
    copier = Copier()
    (copied, inner), _ = copier.copy_tree((leaf, (leaf * 2)[0]))

    assert copied.stride() == (1, 4)
    assert copied.is_leaf
    assert copied._dynamo_dynamic_indices == {0}
    assert inner._is_view()
    assert not inner.is_leaf
    inner.sum().backward()
    assert copied.grad is None  # the history of an input is cut: its own source gets the gradient
    assert copier.leaves[1].grad is not None


def test_a_parameter_stays_a_parameter() -> None:
    (copied,), _ = Copier().copy_tree((torch.nn.Parameter(torch.ones(2)),))

    assert isinstance(copied, torch.nn.Parameter)


def test_compiled_gives_the_function_alone() -> None:
    assert compiled(torch.cos, backend="eager")(torch.zeros(1)).item() == 1
