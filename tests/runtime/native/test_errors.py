"""What goes wrong in the middle of a program is raised as eager raises it, and leaves no trace."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stator
from stator.runtime.plan import Call, Plan
from tests.runtime.native import operators
from tests.runtime.native.executors import agree, by_machine, compiled
from tests.runtime.native.test_image import count_tensors, value

aten = torch.ops.aten


def failing(kind: int) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).relu()
        z = operators.fail(y, kind)  # the line that is named
        return (z @ w).sin()

    return function


def raised(call: Callable[..., Any], *inputs: Any) -> BaseException:
    """What a call raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011  KeyboardInterrupt is none of Exception
        call(*inputs)
    return caught.value


# --- errors of Python ---


@pytest.mark.parametrize("kind", operators.ERRORS)
def test_an_exception_passes_with_type_and_message(kind: int) -> None:
    run, expected = compiled(failing(kind), "native"), operators.ERRORS[kind]()

    error = raised(run, torch.randn(4, 4), torch.randn(4, 4))

    assert type(error) is type(expected)
    assert error.args == expected.args


def test_a_note_names_the_operator_and_the_user_s_line() -> None:
    run = compiled(failing(1), "native", dynamic=False)

    error = raised(run, torch.randn(4, 4), torch.randn(4, 4))

    (note,) = error.__notes__
    line = failing.__code__.co_firstlineno + 3
    assert note.startswith("in stator_native.fail.default, ")
    assert note.endswith(f"test_errors.py:{line}")


def test_a_traceback_leads_into_the_operator() -> None:
    error = raised(compiled(failing(1), "native"), torch.randn(4, 4), torch.randn(4, 4))

    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "fail"


def test_nothing_is_held_after_an_error() -> None:
    good, bad = compiled(failing(0), "native"), compiled(failing(1), "native")
    x, w = torch.randn(300, 300), torch.randn(300, 300)
    good(x, w)
    with pytest.raises(ValueError, match="not this one"):
        bad(x, w)
    before = (count_tensors(), sys.getrefcount(x), sys.getrefcount(w), stator.memory())

    for _ in range(50):
        with pytest.raises(ValueError, match="not this one"):
            bad(x, w)

    assert (count_tensors(), sys.getrefcount(x), sys.getrefcount(w), stator.memory()) == before
    assert torch.allclose(good(x, w), ((x @ w).relu() @ w).sin(), atol=1e-3)


def test_inputs_are_as_eager_leaves_them() -> None:
    def function(p: Tensor, x: Tensor) -> Tensor:
        y = operators.fail(x @ x, 1)
        p.add_(y)
        return y

    run = compiled(function, "native")
    p, x = torch.zeros(4, 4), torch.randn(4, 4)
    old = x.clone()

    raised(run, p, x)

    assert not p.any()
    assert torch.equal(x, old)
    assert (p._version, x._version) == (0, 0)


def test_a_backward_pass_may_fail() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return operators.fail(grad * 2, 1)

    run = compiled(lambda x: Stop.apply(x @ x).sin(), "native", dynamic=False)
    x = torch.randn(4, 4, requires_grad=True)

    for _ in range(3):
        out = run(x)
        with pytest.raises(ValueError, match="not this one"):
            out.sum().backward()
    assert x.grad is None


# --- errors of kernels and of C functions ---

LOOKUPS: Final[dict[str, Callable[..., Any]]] = {
    "embedding": lambda w, i: F.embedding(i, w @ w.t()) + 1,
    "index": lambda w, i: (w @ w.t())[i].sin(),
    "gather": lambda w, i: (w * 2).gather(0, i.unsqueeze(1)),
    "index_select": lambda w, i: (w @ w.t()).index_select(0, i),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("wrong", [5, -6, 2**40])
def test_an_index_out_of_range_is_eager_s_error(name: str, wrong: int) -> None:
    function, w = LOOKUPS[name], torch.randn(5, 4)
    run = compiled(function, "native")
    assert run(w, torch.tensor([1, 4])).shape[0] == 2
    i = torch.tensor([0, wrong])

    ours, eager = raised(run, w, i), raised(function, w, i)

    assert type(ours) is type(eager)
    assert run(w, torch.tensor([1, 4])).shape[0] == 2


def test_a_c_function_that_fails_raises_what_python_raises() -> None:
    steps = (Call("y", aten.sort.default, (value("x"), 7), {}, symbol="aoti_torch_cpu_sort"),)
    run = by_machine(Plan(("x",), steps, (value("y"),)))
    x = torch.randn(3)

    for _ in range(3):
        with pytest.raises(IndexError, match="Dimension out of range") as caught:
            run([x])
    assert caught.value.__notes__ == ["in aten.sort.default"]
    assert sys.getrefcount(x) == 2


def test_a_product_of_the_wrong_shapes_raises_what_eager_raises(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (w @ operators.narrow(x @ w, 2)) @ w

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    run = compiled(function, "native", skip=("hold_to_promise",))

    ours = raised(run, x, w)

    assert (type(ours), str(ours)) == (RuntimeError, str(raised(function, x, w)))
    assert ours.__notes__[0].startswith("in aten.mm.default")
    written = capfd.readouterr().err
    assert not written or "c_shim_cpu.cpp" in written.splitlines()[0]  # torch 2.11 does so itself
    before = (count_tensors(), sys.getrefcount(x), sys.getrefcount(w))
    for _ in range(10):
        with pytest.raises(RuntimeError):
            run(x, w)
    assert (count_tensors(), sys.getrefcount(x), sys.getrefcount(w)) == before


@pytest.mark.parametrize("name", ["kernel", "product", "view"])
def test_an_operator_that_makes_less_than_it_says_is_found_out(name: str) -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "kernel": lambda x: operators.narrow(x * 2, 2).sin(),
        "product": lambda x: operators.narrow(x * 2, 2).t() @ x,
        "view": lambda x: operators.narrow(x * 2, 2)[1:] + 1,
    }

    for executor in ("native", "python"):
        with pytest.raises(RuntimeError, match="its fake implementation said"):
            compiled(functions[name], executor)(torch.randn(4, 4))


# --- what lies otherwise than foretold ---


@pytest.mark.parametrize("how", ["transposed", "with gaps", "as it says"])
def test_results_of_operators_may_lie_otherwise(how: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = operators.lay(x @ w, how)
        return y @ w, y.sin(), y.t() @ x, y[1:, 1:] * 2, y.sum(0)

    agree(function, torch.randn(4, 4), torch.randn(4, 4), eager=False)
    run = compiled(function, "native")
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for ours, eager in zip(run(x, w), function(x, w), strict=True):
        torch.testing.assert_close(ours, eager)


def test_results_of_operators_may_be_of_another_type() -> None:
    run = compiled(lambda x: operators.lay(x @ x, "double").sin() + 1, "native")
    x = torch.randn(4, 4)

    out = run(x)

    assert out.dtype is torch.float32
    assert torch.allclose(out, (x @ x).sin() + 1)


# --- operators that do more than compute ---


@pytest.mark.parametrize("size", [4, 200])
def test_what_an_operator_keeps_stays_right(size: int) -> None:
    def function(x: Tensor) -> Tensor:
        y = (x @ x).relu()
        z = operators.keep(y[1:])
        return z @ (x @ x.t()) @ x

    run = compiled(function, "native")
    inputs = [torch.randn(size, size) for _ in range(10)]
    operators.kept.clear()
    for x in inputs:
        run(x)
    gc.collect()

    assert len(operators.kept) == 10
    for x, found in zip(inputs, operators.kept, strict=True):
        torch.testing.assert_close(found, (x @ x).relu()[1:])
    operators.kept.clear()


def test_an_operator_may_write_to_an_intermediate() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        z = (y * 2)[1:]
        operators.negate_(z, w[1:])
        return y, z @ w, z

    agree(function, torch.randn(4, 4), torch.randn(4, 4))


def test_an_operator_may_write_to_an_input() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        before = x + 1
        operators.negate_(x, w @ w)
        return before + x

    agree(function, torch.randn(4, 4), torch.randn(4, 4))


HIDDEN: Final[dict[str, Callable[[Tensor], Any]]] = {
    "dequantize": lambda y: torch.dequantize(y),
    "unsafe split": lambda y: aten.unsafe_split.Tensor(y, 2),
    "unsafe split with sizes": lambda y: aten.unsafe_split_with_sizes(y, [1, 3]),
    "unsafe view": lambda y: aten._unsafe_view(y, [2, 8]),
    "lift": lambda y: aten.lift(y),
    "contiguous": lambda y: y.contiguous(),
    "to": lambda y: y.to(torch.float32),
    "reshape": lambda y: y.reshape(16),
    "real": lambda y: y.real,
    "positive": lambda y: y.positive(),
    "dropout that does nothing": lambda y: F.dropout(y, 0.5, training=False),
    "identity padding": lambda y: F.pad(y, (0, 0)),
    "lazy clone": lambda y: aten._lazy_clone(y),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_results_that_are_their_argument_in_disguise_stay_right(name: str) -> None:
    hidden = HIDDEN[name]
    if name == "lift" and torch.__version__ < (2, 13):
        pytest.skip("before torch 2.13, nobody can trace aten.lift")

    def function(x: Tensor) -> tuple[Any, ...]:
        found = hidden(x @ x)
        later = (x @ x.t()) @ x  # takes the place of x @ x, if nobody watches
        return found, later @ later

    run = compiled(function, "native")
    x = torch.randn(4, 4)

    results = torch.utils._pytree.tree_leaves(run(x))

    for ours, eager in zip(results, torch.utils._pytree.tree_leaves(function(x)), strict=True):
        torch.testing.assert_close(ours, eager)
