"""Fake results that are remembered are what fake tensors would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.aot.memo import Memo, twin_of
from stator.torch_api import FakeTensorMode, storage_of

aten = torch.ops.aten


def _fake(*sizes: int, dtype: torch.dtype = torch.float32) -> Any:
    with FakeTensorMode() as mode:
        return mode, torch.empty(*sizes, dtype=dtype)


def _look(value: Tensor) -> tuple[Any, ...]:
    place = (value.size(), value.stride(), value.storage_offset(), value.dtype, value.device)
    return (*place, value.untyped_storage().nbytes())


CALLS: dict[str, Callable[[Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "sum": lambda x: (aten.sum.dim_IntList, (x, [0], True), {"dtype": torch.float64}),
    "add": lambda x: (aten.add.Tensor, (x, 2), {}),
    "view": lambda x: (aten.view.default, (x, [6, 2]), {}),
    "slice": lambda x: (aten.slice.Tensor, (x, 1, 1, 3), {}),
    "expand": lambda x: (aten.expand.default, (x, [2, 3, 4]), {}),
    "cat": lambda x: (aten.cat.default, ([x, x], 1), {}),
    "clone": lambda x: (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    "norm": lambda x: (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {}),
    "new": lambda x: (aten.zeros.default, ([3],), {"dtype": torch.int32, "device": x.device}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_gives_what_the_first_gave(name: str) -> None:
    mode, x = _fake(3, 4)
    memo = Memo()
    with mode:
        func, args, kwargs = CALLS[name](x)
        first = memo.call(func, args, kwargs)
        assert len(memo.known) == 1
        second = memo.call(func, args, kwargs)
    pairs = [(first, second)] if isinstance(first, Tensor) else zip(first, second, strict=True)
    for one, other in pairs:
        assert one is not other
        assert _look(one) == _look(other)
        shares = storage_of(one) == storage_of(x)
        assert (storage_of(other) == storage_of(x)) == shares
        assert shares or storage_of(one) != storage_of(other)


def test_a_view_lies_in_the_memory_of_its_own_argument() -> None:
    mode, x = _fake(3, 4)
    memo = Memo()
    with mode:
        y = torch.empty(3, 4)
        memo.call(aten.t.default, (x,), {})
        turned = memo.call(aten.t.default, (y,), {})
    assert storage_of(turned) == storage_of(y)
    assert turned.stride() == (1, 4)


def test_numbers_of_another_type_are_other_arguments() -> None:
    mode, x = _fake(3, dtype=torch.int64)
    memo = Memo()
    with mode:
        found = [memo.call(aten.mul.Tensor, (x, number), {}).dtype for number in (1, 1.0, True, 1)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_what_a_layout_does_not_tell_is_not_remembered() -> None:
    mode, x = _fake(3, dtype=torch.complex64)
    memo = Memo()
    with mode:
        assert memo.call(aten._conj.default, (x,), {}).is_conj()
        memo.call(aten.mul.Tensor, (x.conj(), 2), {})
        x.add_(1)
        assert memo.call(aten.add_.Tensor, (x, 1), {}) is x
    assert not memo.known


def test_a_twin_has_the_memory_and_no_history() -> None:
    mode, x = _fake(3, 4)
    with mode:
        y = (x.requires_grad_() * 2).t()
        twin = twin_of(y)
    assert _look(twin) == _look(y)
    assert storage_of(twin) == storage_of(y)
    assert not twin.requires_grad
    assert twin.grad_fn is None
