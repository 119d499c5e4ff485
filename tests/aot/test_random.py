"""Random numbers: drawn once, and the same again in backward; on request those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stator.aot.compile import Specialized
from stator.errors import Unsupported
from stator.ops import draws
from tests.parity import check, compiled

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randn_like": lambda x: torch.randn_like(x) * x,
    "randint_like": lambda x: torch.randint_like(x, 10) + x,
    "rand": lambda x: torch.rand(x.shape) + x,
    "randn": lambda x: torch.randn(3, 4) + x,
    "randint": lambda x: torch.randint(0, 9, (3, 4)) + x,
    "randperm": lambda x: x[torch.randperm(3)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "poisson": lambda x: torch.poisson(x.exp()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1) * x,
    "normal_": lambda x: torch.empty_like(x).normal_() * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_() * x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}

either_generator = pytest.mark.parametrize(
    "generator",
    [{"fallback_random": True}, {"fallback_random": False}],
    ids=["eager's", "kernels'"],
)


@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_drawn_are_those_of_eager(name: str) -> None:
    flat = name in ("poisson", "bernoulli_p")  # steps: gradients say nothing about the draw
    check(DRAWS[name], torch.randn(3, 4, requires_grad=not flat), seed=5)


def test_the_generator_is_left_where_eager_leaves_it() -> None:
    def next_number(call: Callable[..., Any]) -> float:
        torch.manual_seed(2)
        call(torch.ones(5))
        return float(torch.rand(()))

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.randn_like(x)

    assert next_number(compiled(fn)) == next_number(fn)


@either_generator
def test_two_calls_draw_different_numbers(generator: dict[str, bool]) -> None:
    call = compiled(lambda x: torch.rand_like(x) + x, options=generator)
    assert not torch.equal(call(torch.zeros(8)), call(torch.zeros(8)))


@either_generator
def test_the_same_seed_draws_the_same_numbers(generator: dict[str, bool]) -> None:
    call = compiled(lambda x: torch.rand_like(x) + x, options=generator)
    torch.manual_seed(7)
    first = call(torch.zeros(8))
    torch.manual_seed(7)
    assert torch.equal(first, call(torch.zeros(8)))


@either_generator
def test_two_draws_in_one_graph_differ(generator: dict[str, bool]) -> None:
    call = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)), options=generator)
    first, second = call(torch.zeros(8))
    assert not torch.equal(first, second)


@either_generator
def test_backward_of_dropout_uses_the_mask_of_forward(generator: dict[str, bool]) -> None:
    x = torch.ones(100, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5), options=generator)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


@either_generator
def test_backward_of_drawn_noise_uses_the_same_noise(generator: dict[str, bool]) -> None:
    x = torch.ones(10, requires_grad=True)
    out = compiled(lambda x: torch.randn_like(x) * x, options=generator)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


@either_generator
def test_backward_draws_nothing(generator: dict[str, bool]) -> None:
    x = torch.ones(10, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5), options=generator)(x).sum()
    state = torch.get_rng_state()
    out.backward()
    assert torch.equal(state, torch.get_rng_state())


@either_generator
def test_two_forwards_before_two_backwards_keep_their_own_masks(generator: dict[str, bool]) -> None:
    call = compiled(lambda x: F.dropout(x, 0.5), options=generator)
    x, y = torch.ones(50, requires_grad=True), torch.ones(50, requires_grad=True)
    first, second = call(x), call(y)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(x.grad, first)
    assert torch.equal(y.grad, second)


@either_generator
def test_a_second_backward_over_a_retained_graph_uses_the_same_mask(
    generator: dict[str, bool],
) -> None:
    x = torch.ones(50, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5), options=generator)(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first, second)


@either_generator
def test_double_backward_through_dropout_uses_the_same_mask(generator: dict[str, bool]) -> None:
    x = torch.full((50,), 2.0, requires_grad=True)
    out = compiled(lambda x: F.dropout(x * x, 0.5), options=generator)(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second != 0, out != 0)


def test_dropout_in_eval_draws_nothing() -> None:
    check(nn.Dropout(0.5).eval(), torch.randn(8, requires_grad=True), expect_graph=False)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything_are_as_in_eager(p: float) -> None:
    check(lambda x: F.dropout(x, p) * 2, torch.randn(8, requires_grad=True), seed=0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("numerics", ["eager", "fast"])
def test_a_mask_lies_as_what_it_drops_does(numerics: str, inplace: bool) -> None:
    """Eager draws by the order in memory, on most processors."""

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x.t() + 1, 0.5, inplace=inplace)

    options = {"numerics": numerics, "fallback_random": True}
    check(fn, torch.randn(5, 7, requires_grad=True), seed=3, options=options)


def test_an_input_is_filled_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        x.uniform_()
        return x * 2

    check(fn, torch.zeros(8), seed=1)


def test_a_graph_without_random_numbers_leaves_the_generator_alone() -> None:
    check(lambda x: x.sin() * 2, torch.randn(3, requires_grad=True))


def test_a_transformer_layer_with_dropout_trains_as_eager_does() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    check(layer, torch.randn(2, 5, 8, requires_grad=True), seed=4)


def test_attention_with_dropout_trains_as_eager_does() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in "qkv")

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    check(fn, query, key, value, seed=4)


def test_a_seed_set_between_calls_is_obeyed() -> None:
    call = compiled(lambda x: torch.rand_like(x) + x)
    call(torch.zeros(4))
    torch.manual_seed(11)
    ours = call(torch.zeros(4))
    torch.manual_seed(11)
    assert torch.equal(ours, torch.rand(4))


def test_a_generator_of_the_users_own_is_drawn_from() -> None:
    def fn(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(4, generator=generator)

    ours = compiled(fn)(torch.zeros(4), torch.Generator().manual_seed(3))
    assert torch.equal(ours, torch.rand(4, generator=torch.Generator().manual_seed(3)))


# --- the kernels' own numbers ---


def ours(fn: Callable[..., Any], dynamic: bool | None = None, strict: bool = True) -> Any:
    """`fn` compiled so that kernels draw."""
    options = {"strict": strict, "kernels": True, "fallback_random": False}
    return compiled(fn, backend="stator", dynamic=dynamic, options=options)


def test_kernels_draw_what_they_are_asked_to_by_the_seed_alone() -> None:
    call = ours(lambda x: F.dropout(x, 0.5) + torch.randn_like(x))
    torch.manual_seed(7)
    first, second = call(torch.ones(50)), call(torch.ones(50))
    torch.manual_seed(7)

    assert torch.equal(first, call(torch.ones(50)))
    assert torch.equal(second, call(torch.ones(50)))


def test_a_saved_state_of_the_generator_brings_the_numbers_back() -> None:
    call = ours(lambda x: torch.rand_like(x) + x)
    call(torch.ones(50))
    state = torch.get_rng_state()
    first = call(torch.ones(50))
    torch.set_rng_state(state)

    assert torch.equal(first, call(torch.ones(50)))


def test_a_call_moves_the_generator_once_however_much_it_draws() -> None:
    one = ours(lambda x: torch.rand_like(x) + x)
    two = ours(lambda x: torch.rand_like(x) + torch.randn_like(x))
    states = []
    for call in (one, two):
        torch.manual_seed(0)
        call(torch.ones(50))
        states.append(torch.get_rng_state())

    assert torch.equal(*states)
    torch.manual_seed(0)
    assert not torch.equal(states[0], torch.get_rng_state())


def test_what_torch_draws_keeps_its_place() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x), torch.randperm(50) + x

    call = ours(fn)
    torch.manual_seed(0)
    call(torch.zeros(50))
    torch.manual_seed(0)
    _, found = call(torch.zeros(50))
    torch.manual_seed(0)
    draws.draw_seed()

    assert torch.equal(found, torch.randperm(50).float())


def gradient(call: Callable[..., Any], x: Tensor, create_graph: bool) -> tuple[Tensor, Tensor]:
    """Output and gradient of a call from the same seed."""
    torch.manual_seed(3)
    out = call(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=create_graph)
    return out, grad


def _several(x: Tensor) -> Tensor:
    """Some draws that gradients need, some that they do not, some that torch makes."""
    noise = torch.rand_like(x)
    dropped = F.dropout(x * x, 0.5) + noise
    order = torch.randperm(x.shape[0])
    return F.dropout(dropped[order] * torch.randn_like(x), 0.3) + torch.bernoulli(noise)


HIGHER: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x * x, 0.5),
    "noise": lambda x: torch.randn_like(x) * x.sin(),
    "a draw without a gradient": lambda x: x.sin() + torch.rand_like(x),
    "two": lambda x: F.dropout(x.sin(), 0.5) * torch.rand_like(x) * x,
    "several": _several,
    "in place": lambda x: torch.empty_like(x).normal_() * x * x,
    "none at all": lambda x: F.dropout(x * x, 0.5)[:0],
}


@pytest.mark.parametrize("name", HIGHER)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_that_go_on_are_those_of_the_same_draw(name: str, dynamic: bool) -> None:
    call = ours(HIGHER[name], dynamic)
    x = torch.randn(40, 3, requires_grad=True)
    out, plain = gradient(call, x, create_graph=False)
    again, going_on = gradient(call, x, create_graph=True)

    assert torch.equal(out, again)
    torch.testing.assert_close(plain, going_on)
    (second,) = torch.autograd.grad(going_on.sin().sum(), x, retain_graph=True, allow_unused=True)
    assert second is None or second.isfinite().all()


def test_a_second_derivative_is_that_of_the_same_mask() -> None:
    x = torch.randn(50, requires_grad=True)
    out, grad = gradient(ours(lambda x: F.dropout(x**4, 0.5)), x, True)
    (second,) = torch.autograd.grad(grad.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    mask = (out != 0).float() * 2

    torch.testing.assert_close(grad, mask * 4 * x**3)
    torch.testing.assert_close(second, mask * 12 * x**2)
    torch.testing.assert_close(third, mask * 24 * x)


def test_a_backward_that_draws_itself_leaves_the_draws_of_the_forward() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + torch.rand_like(grad) * 1e-9

    call = ours(lambda x: Noisy.apply(F.dropout(x * x, 0.5)))
    x = torch.randn(50, requires_grad=True)
    _, plain = gradient(call, x, create_graph=False)
    _, going_on = gradient(call, x, create_graph=True)

    torch.testing.assert_close(plain, going_on)


def test_where_the_same_numbers_cannot_be_drawn_again_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = ours(lambda x: F.dropout(x * x, 0.5), strict=False)
    x = torch.randn(50, requires_grad=True)
    out = call(x).sum()
    monkeypatch.setattr(Specialized, "_compile", _fails)

    with pytest.raises(Unsupported, match="other random numbers"):
        torch.autograd.grad(out, x, create_graph=True)


def _fails(*arguments: Any) -> Any:
    raise NotImplementedError("for the test")


def _again(fn: Callable[..., Any], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(fn, x, use_reentrant=False, preserve_rng_state=True)
    return out


def _dropped_square(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5).square()


def test_a_checkpoint_inside_computes_with_the_same_mask_again() -> None:
    x = torch.randn(64, requires_grad=True)
    out = ours(lambda x: F.dropout(_again(_dropped_square, x), 0.5))(x)
    (grad,) = torch.autograd.grad(out.sum(), x)

    assert 5 < (out != 0).sum() < 30
    torch.testing.assert_close(grad * x, 2 * out)


def test_a_checkpoint_around_computes_with_the_same_mask_again() -> None:
    x = torch.randn(64, requires_grad=True)
    out = F.dropout(_again(ours(_dropped_square), x), 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)

    assert 5 < (out != 0).sum() < 30
    torch.testing.assert_close(grad * x, 2 * out)


def test_a_transformer_layer_trains_on_the_numbers_of_kernels() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    call = ours(layer)
    x = torch.randn(2, 5, 8, requires_grad=True)
    found = [gradient(call, x, create_graph=False) for _ in range(2)]

    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert found[0][1].isfinite().all()
