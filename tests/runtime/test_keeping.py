"""What operators do with their arguments: those whose results may share memory are known."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from stator.torch_api import OpOverload, keeps_nothing

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes which operators that should not return memory of an argument that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[OpOverload] = set()
        self.guilty: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if keeps_nothing(func):
            self.seen.add(func)
            with _disable_current_modes():
                mine, theirs = spans_of(result), spans_of((args, kwargs))
                if any(a < d and c < b for a, b in mine for c, d in theirs):
                    self.guilty.add(str(func))
        return result


def spans_of(tree: Any) -> list[tuple[int, int]]:
    """First and last address of the memory behind each tensor."""
    storages = [
        part.untyped_storage()
        for tensor in tree_leaves(tree)
        if isinstance(tensor, torch.Tensor)
        for part in dense_parts(tensor)
    ]
    return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensor itself; of a sparse one, those that it is made of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if not rows and tensor.layout not in (torch.sparse_csc, torch.sparse_bsc):
        return []  # nobody sees inside
    indices = (
        [tensor.crow_indices(), tensor.col_indices()]
        if rows
        else [tensor.ccol_indices(), tensor.row_indices()]
    )
    return [*indices, tensor.values()]


def samples(op: Any, dtype: torch.dtype, grad: bool, count: int = 2) -> Iterator[Any]:
    """Some of the inputs that torch tests an operator with."""
    if dtype in op.supported_dtypes("cpu"):
        for _, sample in zip(range(count), op.sample_inputs("cpu", dtype, grad), strict=False):
            yield sample


def watched(calls: Callable[[Any, Watch], None]) -> Watch:
    """Every operator of torch's database, called under a watch; those that fail are passed over.

    In a thread: the database seeds torch for every sample, torch notes the stack each time, and
    below a test that is a hundred frames deep.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_watched, calls).result()


def _watched(calls: Callable[[Any, Watch], None]) -> Watch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        watch = Watch()
        for op in op_db:
            with suppress(RuntimeError, TypeError, ValueError, AssertionError):  # under a mode
                calls(op, watch)
    return watch


def test_no_operator_returns_memory_that_it_should_not() -> None:
    def forward(op: Any, watch: Watch) -> None:
        for dtype in (torch.float32, torch.int64, torch.complex64):
            for sample in samples(op, dtype, grad=False):
                with watch:
                    op.op(sample.input, *sample.args, **sample.kwargs)

    watch = watched(forward)

    assert watch.guilty == set()
    assert len(watch.seen) > 400


def test_no_derivative_returns_memory_that_it_should_not() -> None:
    def backward(op: Any, watch: Watch) -> None:
        for sample in samples(op, torch.float32, grad=True) if op.supports_autograd else ():
            result = op.op(sample.input, *sample.args, **sample.kwargs)
            outputs = [t for t in tree_leaves(result) if getattr(t, "requires_grad", False)]
            tangents = [torch.ones_like(t) for t in outputs]
            with watch:
                torch.autograd.backward(outputs, tangents)

    watch = watched(backward)

    assert watch.guilty == set()
    assert len(watch.seen) > 150


SECRET: Final[dict[str, Callable[[Tensor], Any]]] = {
    "dequantize": lambda x: aten.dequantize.self(x),
    "lift": lambda x: aten.lift.default(x),
    "set": lambda x: aten.set.source_Tensor(torch.empty(0), x),
    "unsafe split": lambda x: aten.unsafe_split.Tensor(x, 2),
    "unsafe split with sizes": lambda x: aten.unsafe_split_with_sizes.default(x, [2, 2]),
    "unsafe view": lambda x: aten._unsafe_view.default(x, [2, 8]),
    "sparse": lambda x: aten._sparse_coo_tensor_with_dims_and_tensors.default(
        1, 1, [4, 4], torch.zeros(1, 4, dtype=torch.int64), x, layout=torch.sparse_coo
    ),
}


@pytest.mark.parametrize("name", SECRET)
def test_operators_known_to_return_their_argument_are_known(name: str) -> None:
    class Called(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            called.append(func)
            return result

    called: list[Any] = []
    x = torch.randn(4, 4)
    with Called():
        found = SECRET[name](x)

    assert not keeps_nothing(called[-1])
    start = x.untyped_storage().data_ptr()
    assert start in [first for first, _ in spans_of(found)]
