"""Views, empty tensors, sizes known at run time, inputs that are written: as Python has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.runtime.native.executors import agree, agree_over, compiled

aten = torch.ops.aten

VIEWS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "all but the first": lambda x: x[1:],
    "the last two": lambda x: x[-2:],
    "every second": lambda x: x[::2],
    "columns from behind": lambda x: x[:, -3:-1],
    "behind the end": lambda x: x[10:],
    "before the start": lambda x: x[-10:2],
    "nothing": lambda x: x[2:2],
    "the first": lambda x: x[0],
    "the last column": lambda x: x[:, -1],
    "one element": lambda x: x[1, -2],
    "transposed": lambda x: x.t(),
    "axes exchanged": lambda x: x.transpose(-1, -2),
    "permuted": lambda x: x.unsqueeze(1).permute(2, 0, 1),
    "expanded": lambda x: x.expand(3, *x.shape),
    "an axis more": lambda x: x.unsqueeze(-1),
    "an axis more and less": lambda x: x.unsqueeze(0).squeeze(0),
    "squeezed": lambda x: x[:1].squeeze(),
    "squeezed by two": lambda x: x[:1, :1].squeeze((0, 1)),
    "detached": lambda x: x.detach(),
    "reshaped": lambda x: x.unflatten(0, (2, 2)),
    "flat": lambda x: x.flatten(),
    "a view of a view": lambda x: x.t()[1:].t()[:, 1:][-1],
    "the diagonal": lambda x: x.diagonal(),
    "unfolded": lambda x: x.unfold(1, 2, 1),
    "by strides": lambda x: x.as_strided((2, 2), (1, 4), 3),
    "as integers": lambda x: x.view(torch.int32),
    "split": lambda x: x.split([1, 3])[1],
    "chunked": lambda x: x.chunk(2, 1)[1],
    "unbound": lambda x: x.unbind()[2],
    "windows that meet": lambda x: x.as_strided((3, 4), (2, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_input_an_intermediate_and_an_output(name: str) -> None:
    view = VIEWS[name]

    def three(x: Tensor) -> tuple[Tensor, ...]:
        inside, returned = x @ x, (x @ x.t()) * 2
        used = view(inside)
        return view(x), used * 3, returned, view(returned), view(inside + 1)

    agree(three, torch.randn(4, 4))
    agree(three, torch.randn(4, 4).t())


@pytest.mark.parametrize("name", ["all but the first", "transposed", "the last column", "unbound"])
def test_a_view_is_read_by_a_c_function(name: str) -> None:
    view = VIEWS[name]

    def chain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x @ w
        b = w @ x
        part = view(a).reshape(-1, 4)
        return part @ b, (view(b).reshape(-1, 4) @ a).relu(), view(x).reshape(-1, 4) @ w

    agree(chain, torch.randn(4, 4), torch.randn(4, 4))


def test_a_buffer_stays_while_a_view_of_it_is_read() -> None:
    def chain(x: Tensor) -> Tensor:
        a = x @ x
        part = a.t()[1:]  # the last look at `a` itself
        b = x @ x.t()
        c = b @ x
        d = c @ b
        return part @ d

    agree(chain, torch.randn(32, 32))


def test_large_views_of_an_output_outlive_it() -> None:
    run = compiled(lambda x: ((x @ x)[100:].t(), x + 1), "native")
    x = torch.randn(300, 300)

    view, other = run(x)
    del other
    run(x * 2)

    assert torch.equal(view, (x @ x)[100:].t())


def test_views_of_one_output_share_its_storage() -> None:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.sin(x @ x)
        return y, y[1:], y.t()[-1], y.view(-1)

    agree(parts, torch.randn(200, 200))
    agree(parts, torch.randn(3, 3))


# --- inputs as they come ---

LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "transposed": lambda x: x.t(),
    "with steps": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "with an offset": lambda x: x[1:, 1:],
    "reversed in memory": lambda x: x.flip(0).t(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_inputs_that_are_not_contiguous(name: str) -> None:
    def work(x: Tensor) -> tuple[Tensor, ...]:
        return x @ x, x.exp(), x.t()[1:] @ x, x[-1], x.sum(0)

    agree(work, LAYOUTS[name](torch.randn(6, 6)))


def test_no_elements() -> None:
    def work(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return y, y.relu(), y.t() @ x, y.sum(), y.t()[1:], torch.cat([y, w]), x[:, 1:]

    agree(work, torch.randn(0, 4), torch.randn(4, 4))
    agree(lambda x, y: ((x @ y).exp(), x.t()), torch.randn(3, 0), torch.randn(0, 5))
    agree(lambda x: (x.topk(2), x.sort(), x * 2), torch.randn(0, 4))
    agree(lambda x: x[2:2] @ x, torch.randn(4, 4))


def test_nothing_but_buffers_of_no_bytes() -> None:
    agree(lambda x, w: ((x @ w).relu() @ w.t()).sin(), torch.randn(0, 4), torch.randn(4, 5))


def test_no_axes() -> None:
    x = torch.tensor(3.0)

    agree(lambda x: (x * 2, x.view(1), x.expand(2, 2), x.detach(), x.exp().unsqueeze(0)), x)
    agree(lambda x, y: torch.dot(x, y) + 1, torch.randn(5), torch.randn(5))


def test_no_inputs() -> None:
    agree(lambda: (torch.arange(5), torch.zeros(3, 3) @ torch.ones(3, 3)))


# --- what is returned ---


def test_results_that_are_not_tensors() -> None:
    def plain(x: Tensor) -> tuple[Any, ...]:
        return None, 3, 2.5, True, x.shape[0], x + 1, {"sizes": x.shape, "x": x}

    agree_over(plain, [(torch.randn(3),)], dynamic=False)
    agree_over(plain, [(torch.randn(n),) for n in (3, 7, 20)], dynamic=True)


def test_one_result_may_be_returned_twice() -> None:
    def twice(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        return y, y, x, x, y.t(), y.t()

    agree(twice, torch.randn(3, 3))
    agree(twice, torch.randn(200, 200))


def test_nothing_is_computed() -> None:
    agree(lambda x, y: (y, x), torch.randn(3), torch.randn(4))


def test_a_gradient_that_is_none() -> None:
    def conv(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, w)

    for asked in ((True, False), (False, True)):
        inputs = [
            torch.randn(size, requires_grad=flag)
            for size, flag in zip(((1, 2, 5, 5), (3, 2, 3, 3)), asked, strict=True)
        ]
        agree(conv, *inputs, grad=True)


# --- inputs that are written ---


def test_an_input_is_updated_in_place() -> None:
    def step(p: Tensor, g: Tensor) -> Tensor:
        p.sub_(g * 0.1)
        p.mul_(2).clamp_(-1, 1)
        return p.sum()

    agree(step, torch.randn(5, 5), torch.randn(5, 5))
    agree(step, torch.randn(5, 5).t(), torch.randn(5, 5))


def test_a_view_of_an_input_is_updated_in_place() -> None:
    def step(p: Tensor) -> tuple[Tensor, ...]:
        p[1:].add_(p[:-1] @ p.t() @ p)
        p.t()[0].zero_()
        return p[-1], p.diagonal()

    agree(step, torch.randn(5, 5))


def test_a_result_of_an_update_and_of_a_product() -> None:
    def step(p: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        old = p @ w
        p.copy_(torch.addmm(p, w, w))
        return old, p, p @ w

    agree(step, torch.randn(4, 4), torch.randn(4, 4))


def test_inputs_that_overlap() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x @ y

    base = torch.randn(8, 4)

    agree(step, base[:4], base[2:6])


# --- sizes known at run time ---

SIZES: Final = (7, 3, 12, 64, 2, 200)


@pytest.mark.parametrize("length", [4, 300])
def test_sizes_of_one_axis(length: int) -> None:
    def work(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        y = (x @ w).relu()
        z = y.t() @ y
        return y, z[1:], y[1:].softmax(-1) @ z, y.shape[0] * 2, x.sum(0), y[-1], y.unsqueeze(0)

    w = torch.randn(length, length)

    agree_over(work, [(torch.randn(n, length), w) for n in SIZES], dynamic=True)


def test_sizes_of_every_axis() -> None:
    def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.bmm(x, y)
        flat = z.view(z.shape[0], -1)
        return z.sin(), flat @ flat.t(), torch.cat([z, z], 1), z.transpose(1, 2)[:, 1:] * 2

    sizes = ((2, 3, 4, 5), (5, 4, 3, 2), (2, 30, 17, 9), (7, 2, 2, 2))
    sets = [(torch.randn(b, m, k), torch.randn(b, k, n)) for b, m, k, n in sizes]

    agree_over(work, sets, dynamic=True)


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_that_compilers_like_to_fix(size: int) -> None:
    def work(x: Tensor) -> tuple[Any, ...]:
        y = x @ x.t()
        return y.exp(), y @ x, x[:-1], x.sum(0), x.shape[0]

    sets = [(torch.randn(n, 4),) for n in (5, size, 6, size)]

    agree_over(work, sets, dynamic=True)


def test_an_axis_that_is_marked() -> None:
    def marked(n: int) -> Tensor:
        x = torch.randn(n, 6)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
        return x

    agree_over(
        lambda x: ((x @ x.t()).softmax(-1) @ x, x[-1], x.shape[0] // 2),
        [(marked(n),) for n in (4, 9, 2, 300)],
        dynamic=False,
    )


def test_numbers_that_are_arguments() -> None:
    def work(x: Tensor, n: int, k: int) -> tuple[Any, ...]:
        return x[:n] @ x[:n].t(), x.expand(k, *x.shape) * n, n * k, n // 2 - k, x.topk(n, 0)

    sets = [(torch.randn(8, 4), n, k) for n, k in ((3, 5), (4, 2), (7, 3))]

    agree_over(work, sets, dynamic=True)


def test_a_factor_known_at_run_time_goes_through_python() -> None:
    def work(b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        wide = (x @ y) @ y.t()  # without Python's lock
        return torch.addmm(b, wide, y, alpha=x.shape[0]) + torch.addmm(b, x, y, beta=y.shape[1])

    sets = [(torch.randn(n, 5), torch.randn(n, 4), torch.randn(4, 5)) for n in (3, 6, 9)]

    agree_over(work, sets, dynamic=True)


def test_gradients_of_sizes_known_at_run_time() -> None:
    def work(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).relu() @ w.t()).softmax(0)[1:]

    sets = [
        (torch.randn(n, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True))
        for n in (4, 9, 300, 2)
    ]

    agree_over(work, sets, dynamic=True, grad=True)


CAPTURED: Final = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@torch._dynamo.config.patch(CAPTURED)
def test_sizes_that_depend_on_values() -> None:
    def work(x: Tensor, i: Tensor) -> tuple[Any, ...]:
        n = i.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        chosen = x[x > 0] * 2
        return x[:n].sum(0), torch.zeros(n, 3) + 1, n * 2, chosen, x.nonzero(), chosen.shape[0]

    sets = [(torch.randn(5, 4), torch.tensor(n)) for n in (3, 0, 5, 1)]

    agree_over(work, sets, dynamic=True)


def test_an_axis_of_which_nothing_is_known() -> None:
    def marked(n: int) -> Tensor:
        x = torch.randn(n, 6)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return x

    def work(x: Tensor) -> tuple[Any, ...]:
        return (x * 2) @ torch.ones(6, 3), x.sum(0), x.shape[0] * 2, x.t()

    agree_over(work, [(marked(n),) for n in (4, 0, 1, 9)], dynamic=False)
