"""Tensor subclasses: taken apart on the way in, rebuilt on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.aot.two_tensor import Halves, TwoTensor
from tests.parity import check, compiled


def pair(*shape: int, requires_grad: bool = False, label: str = "pair") -> TwoTensor:
    made = TwoTensor(torch.randn(shape), torch.randn(shape), label)
    result: TwoTensor = made.requires_grad_(requires_grad)
    return result


# Two tensors in one


def test_a_subclass_goes_in_and_comes_out() -> None:
    check(lambda x: x.sin() * 2, pair(3))


def test_a_subclass_that_requires_grad_gets_a_subclass_gradient() -> None:
    check(lambda x: x.sin() * 2, pair(3, requires_grad=True))


def test_a_subclass_meets_a_plain_tensor() -> None:
    check(torch.mul, pair(3, requires_grad=True), torch.randn(3))


def test_plain_and_subclass_inputs_both_get_gradients() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos() * 2, y.sin()

    check(fn, pair(3, requires_grad=True), torch.randn(3, requires_grad=True))


def test_plain_inputs_are_packed_into_a_subclass_output() -> None:
    check(lambda x, y: TwoTensor(x.sin(), y.cos()), torch.randn(3), torch.randn(3))


def test_a_subclass_is_unpacked_into_plain_outputs() -> None:
    check(lambda x: (x.first + 1, x.second * 2), pair(3))


def test_packing_inside_keeps_gradients() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return Halves.apply(x * 2, y) * 3

    check(fn, torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))


def test_a_subclass_used_only_inside_leaves_no_trace() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        both: Tensor = TwoTensor(x, y) * 2
        return both.second + 1

    check(fn, torch.randn(3), torch.randn(3))


def test_a_subclass_is_mutated() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    check(fn, pair(3))


def test_a_subclass_is_mutated_with_history() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x.sin()

    check(fn, pair(3), torch.randn(3, requires_grad=True))


def test_a_plain_input_is_mutated_beside_a_subclass() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x * y

    check(fn, pair(3, requires_grad=True), torch.randn(3))


def test_a_subclass_returned_as_it_came_is_the_same_object() -> None:
    check(lambda x: (x, x * 2), pair(3))


def test_a_view_of_a_subclass_shares_its_inner_storage() -> None:
    check(lambda x: (x.view(-1), x * 2), pair(2, 3))


def test_a_matmul_of_subclasses_trains() -> None:
    check(torch.mm, pair(2, 3, requires_grad=True), pair(3, 4, requires_grad=True))


def test_the_label_of_a_subclass_is_kept_and_guarded() -> None:
    call = compiled(lambda x: x * 2)
    assert call(pair(3, label="a")).label == "a"
    assert call(pair(3, label="b")).label == "b"


def test_a_subclass_of_subclasses_is_taken_apart_to_the_bottom() -> None:
    nested = TwoTensor(pair(3), pair(3), "outer")
    check(lambda x: x.sin() + 1, nested)


def test_a_nested_subclass_trains() -> None:
    nested = TwoTensor(pair(3), pair(3), "outer").requires_grad_()
    check(lambda x: x.sin() * x, nested)


class PairLinear(nn.Module):
    """A layer whose weight is a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn(3, 2), torch.randn(3, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight).relu()


def test_a_parameter_that_is_a_subclass_trains() -> None:
    check(PairLinear(), torch.randn(4, 3), calls=2)


def test_a_subclass_with_marked_sizes_runs_at_other_sizes() -> None:
    call = compiled(lambda x: x.sin() * x.shape[0], dynamic=True)
    for size in (3, 5, 8):
        x = pair(size)
        assert torch.allclose(call(x).second, x.second.sin() * size)


def test_double_backward_through_a_subclass() -> None:
    def use(fn: Any, x: Tensor) -> Any:
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return grad

    check(lambda x: x.sin() * x, pair(3, requires_grad=True), use=use)


# DTensor


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first; the other is imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_distributed_tensor_goes_in_and_comes_out(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)], run_check=False)
    check(lambda x: x.sin() * 2, x)


def test_a_distributed_tensor_trains(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)], run_check=False)
    check(lambda x: x.sin() * x, x.detach().requires_grad_())


def test_a_redistribution_inside_is_compiled(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)], run_check=False)
    check(lambda x: (x * 2).redistribute(mesh, [Replicate()]).sum(0), x)


def test_a_distributed_linear_layer_trains(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 2)
    for name, parameter in list(layer.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        setattr(layer, name, nn.Parameter(placed))
    x = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)], run_check=False)
    check(layer, x)


def test_local_tensors_become_distributed_inside(mesh: DeviceMesh) -> None:
    def fn(x: Tensor) -> Tensor:
        outer = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return (outer * 2).to_local()

    check(fn, torch.randn(2, 3, requires_grad=True))


# Nested


def test_a_jagged_tensor_goes_through_a_layer() -> None:
    values = torch.nested.nested_tensor(
        [torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged, requires_grad=True
    )
    layer = nn.Linear(4, 2)
    call = compiled(lambda x: layer(x).sin())
    ours, eager = call(values), layer(values).sin()
    assert torch.equal(ours.values(), eager.values())
    (grad,) = torch.autograd.grad(ours.values().sum(), values)
    (expected,) = torch.autograd.grad(eager.values().sum(), values)
    torch.testing.assert_close(grad.values(), expected.values())
