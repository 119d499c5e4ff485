"""A program that was compiled before does all that it did then, to the last bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from stator.core.events import Compilation, last_compilation
from tests.e2e.models import build
from tests.parity import check

Use = Callable[..., Any]


def options_in(folder: Path, **changed: Any) -> dict[str, Any]:
    """Options that keep programs in `folder`, and draw eager's random numbers, as `check` does."""
    return {
        "strict": True,
        "kernels": True,
        "fallback_random": True,
        "cache": True,
        "cache_dir": folder,
        **changed,
    }


def fresh(fn: Use, folder: Path, dynamic: bool | None = None, **changed: Any) -> Use:
    """`fn`, compiled as a new process would: nothing is remembered but the folder."""
    torch._dynamo.reset()
    options = options_in(folder, **changed)
    compiled: Use = torch.compile(fn, backend="stator", options=options, dynamic=dynamic)
    return compiled


def record() -> Compilation:
    found = last_compilation()
    assert found is not None, "nothing was compiled"
    return found


def answer() -> str:
    """What the cache said to the latest compilation, in one word."""
    return (record().cache or "nothing").partition(":")[0]


def identical(ours: Any, theirs: Any) -> bool:
    """Whether all tensors of two results lie alike, and are equal to the last bit."""
    one, other = tree_leaves(ours), tree_leaves(theirs)
    return len(one) == len(other) and all(map(_same_bits, one, other))


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    bytes_of = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)]
    return bool(torch.equal(*bytes_of))


def infer(fn: Use, *inputs: Any) -> Any:
    """The results, and the inputs afterwards."""
    return fn(*inputs), inputs


def train(fn: Use, *inputs: Any) -> Any:
    """The results, and the gradients of everything."""
    results = fn(*inputs)
    flat = [value for value in tree_leaves(results) if isinstance(value, torch.Tensor)]
    wanted = [value for value in flat if value.requires_grad]
    torch.autograd.backward(wanted, [torch.cos(value.detach()) for value in wanted])
    leaves = [value for value in inputs if isinstance(value, torch.Tensor)]
    if isinstance(fn, nn.Module):
        leaves += list(fn.parameters())
    return results, [leaf.grad for leaf in leaves if leaf.is_leaf]


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, dtype=dtype).requires_grad_()


@dataclass(frozen=True)
class Case:
    """A function or the maker of a module, its inputs, and how it is used."""

    make: Callable[[], Use]
    inputs: Callable[[], tuple[Any, ...]]
    use: Use = infer
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    settings: dict[str, Any] = field(default_factory=dict)  # of `check`


def plain(fn: Use, *inputs: Callable[[], Any], use: Use = infer, **settings: Any) -> Case:
    """A case that is a function."""
    return Case(lambda: fn, lambda: tuple(make() for make in inputs), use, settings=settings)


def normalized(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) * x.std(dim=0)


def layered(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w + b), (8,)) * b


def written(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    y[0] = x.sum()
    return x + y


def written_with_history(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(x.sin())
    return y


def shifted(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


def given_back(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return y, x + y, x, y


def parts(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y, y[1:], y.t(), x.view(-1), x[0]


def with_constants(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, -0.0, 3.0]) + torch.arange(3) - torch.tensor(float("inf"))


def selected(x: Tensor, where: Tensor) -> Tensor:
    return x[where].cos()


def many_kinds(x: Tensor, n: int, flag: bool, name: str | None = None) -> tuple[Any, ...]:
    return (x * n if flag else x - n), n, name, None


class Tied(nn.Module):
    """One weight in two places, and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.second(self.first(x).relu()) * self.seen


class Convolved(nn.Module):
    """Convolution, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)


class Doubled(torch.autograd.Function):
    """A derivative of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


def overlapping() -> tuple[Tensor, ...]:
    whole = torch.randn(8)
    return whole[:6], whole[2:]


def apart() -> tuple[Tensor, ...]:
    return torch.randn(8)[:6], torch.randn(8)[2:]


CASES: Final[dict[str, Case]] = {
    "inference": plain(normalized, lambda: torch.randn(5, 7)),
    "training": plain(layered, lambda: leaf(4, 8), lambda: leaf(8, 8), lambda: leaf(8), use=train),
    "float64": plain(normalized, lambda: leaf(3, 4, dtype=torch.float64), use=train),
    "bfloat16": plain(normalized, lambda: leaf(3, 4, dtype=torch.bfloat16), use=train),
    "empty": plain(lambda x: (x.softmax(-1), x.sum(0)), lambda: torch.randn(0, 4)),
    "empty, trained": plain(written_with_history, lambda: leaf(0, 4), use=train),
    "integers": plain(lambda x: (x % 7).cumsum(0), lambda: torch.arange(-9, 9)),
    "written inputs": plain(written, lambda: torch.randn(4), lambda: torch.randn(4)),
    "written with history": plain(written_with_history, lambda: leaf(5), use=train),
    "inputs that overlap": Case(lambda: shifted, overlapping),
    "inputs that are views": Case(lambda: shifted, apart),
    "inputs returned": plain(given_back, lambda: torch.randn(3), lambda: torch.randn(3)),
    "views": plain(parts, lambda: torch.randn(3, 3)),
    "views, trained": plain(parts, lambda: leaf(3, 3), use=train),
    "constants": plain(with_constants, lambda: torch.randn(3)),
    "not contiguous": plain(normalized, lambda: torch.randn(7, 5).t()),
    "index": plain(selected, lambda: torch.randn(5), lambda: torch.tensor([4, 0, -1])),
    "numbers": plain(many_kinds, lambda: torch.randn(3), lambda: 2, lambda: True, lambda: "name"),
    "a function of the user's": plain(Doubled.apply, lambda: leaf(3), use=train),
    "random": plain(lambda x: F.dropout(x, 0.4) + torch.rand(6), lambda: torch.ones(6), seed=3),
    "random, trained": plain(lambda x: F.dropout(x, 0.4), lambda: leaf(6), use=train, seed=3),
    "shared weights": Case(Tied, lambda: (torch.randn(2, 6),), train),
    "convolution": Case(Convolved, lambda: (torch.randn(2, 3, 6, 6),), train),
    "no grad": Case(
        lambda: layered, lambda: (leaf(4, 8), leaf(8, 8), leaf(8)), around=torch.no_grad
    ),
    "inference mode": Case(
        lambda: normalized, lambda: (torch.randn(5, 7),), around=torch.inference_mode
    ),
    "autocast": Case(
        lambda: lambda x, w: (x @ w).softmax(-1),
        lambda: (leaf(4, 8), leaf(8, 8)),
        train,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hit_gives_what_the_miss_gave_and_what_eager_gives(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    results = []
    for expected in ("miss", "hit"):
        torch.manual_seed(1)
        compiled = fresh(case.make(), tmp_path)
        with case.around():
            results.append(case.use(compiled, *case.inputs()))
        assert answer() == expected, record().cache

    assert identical(*results)
    torch.manual_seed(1)
    with case.around():
        check(case.make(), *case.inputs(), options=options_in(tmp_path), **case.settings)
    assert answer() == "hit"


def test_a_transformer_infers_and_trains_from_the_folder(tmp_path: Path) -> None:
    results, answers = [], []
    for _ in range(2):
        module, inputs = build("bert_eager")
        compiled = fresh(module.eval(), tmp_path)
        results.append(train(compiled, *inputs))
        answers.append(answer())

    assert answers == ["miss", "hit"]
    assert identical(*results)
    module, inputs = build("bert_eager")
    torch.testing.assert_close(results[1], train(module.eval(), *inputs))


def test_a_hit_compiles_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        train(fresh(layered, tmp_path), leaf(4, 8), leaf(8, 8), leaf(8))

    assert {stage.name for stage in record().stages} == {"key", "load"}
    assert record().fallback is None
    assert record().peaks.keys() == {"forward", "backward"}


def test_our_own_random_numbers_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        compiled = fresh(
            lambda x: F.dropout(x, 0.5) + torch.randn(64), tmp_path, fallback_random=False
        )
        torch.manual_seed(7)
        drawn.append([compiled(torch.ones(64)) for _ in range(2)])

    assert answer() == "hit"
    assert identical(*drawn)
    assert not identical(*drawn[1])


def test_inputs_that_overlap_after_a_hit_are_compiled_for(tmp_path: Path) -> None:
    for first in (apart, overlapping):
        compiled = fresh(shifted, tmp_path)
        for make in (first, apart, overlapping):
            torch.manual_seed(1)
            ours = compiled(*make())
            torch.manual_seed(1)
            assert torch.equal(ours, shifted(*make()))
    assert answer() == "hit"


@pytest.mark.parametrize(
    "modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)]
)
def test_no_grad_and_inference_mode_share_an_entry(tmp_path: Path, modes: tuple[Any, Any]) -> None:
    for mode, expected in zip(modes, ("miss", "hit"), strict=True):
        x = torch.randn(3, 3)
        with mode():
            ours, eager = fresh(parts, tmp_path)(x), parts(x)

        assert answer() == expected
        assert [t.is_inference() for t in ours] == [t.is_inference() for t in eager]
        assert [t._is_view() for t in ours] == [t._is_view() for t in eager]


# Derivatives


def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.sin(), y.cos() * w


def gradients(fn: Use, used: tuple[int, ...]) -> list[Any]:
    """What flows to the inputs where only some of the outputs are used."""
    torch.manual_seed(2)
    inputs = leaf(4, 4), leaf(4, 4)
    outputs = fn(*inputs)
    torch.autograd.backward([outputs[i].sum() for i in used])
    return [value.grad for value in inputs]


MASKS: Final = [(0,), (1,), (0, 1)]


def test_a_backward_that_is_not_in_the_folder_is_compiled_and_kept(tmp_path: Path) -> None:
    fresh(two, tmp_path)(leaf(4, 4), leaf(4, 4))  # nobody asks for gradients
    for stages in (["backward/plan"] * 3, []):
        compiled = fresh(two, tmp_path)
        ours = [gradients(compiled, used) for used in MASKS]

        assert answer() == "hit"
        found = [stage.name for stage in record().stages if stage.name == "backward/plan"]
        assert found == stages
        torch.testing.assert_close(ours, [gradients(two, used) for used in MASKS])


class Shared(nn.Module):
    """Parameters of every kind: plain, transposed, frozen, one with a buffer that shares memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = nn.Parameter(torch.randn(4, 4))
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.row: Tensor
        self.register_buffer("row", self.plain.detach()[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.plain * self.frozen + self.row
        return y.sin(), y.cos() @ self.turned


def test_a_backward_of_parameters_is_compiled_after_a_hit(tmp_path: Path) -> None:
    fresh(Shared(), tmp_path)(leaf(4, 4))  # nobody asks for gradients
    results = []
    for compile_it in (lambda model: fresh(model, tmp_path), lambda model: model):
        model = Shared()
        call, x = compile_it(model), torch.ones(4, 4, requires_grad=True)
        for used in MASKS:
            outputs = call(x)
            torch.autograd.backward([outputs[i].sum() for i in used])
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])

    assert answer() == "hit"
    torch.testing.assert_close(*results)


def test_an_entry_that_vanishes_before_the_backward_is_compiled_again(tmp_path: Path) -> None:
    gradients(fresh(two, tmp_path), (0, 1))
    expected = gradients(fresh(two, tmp_path), (0, 1))
    compiled = fresh(two, tmp_path)
    outputs = compiled(leaf(4, 4), leaf(4, 4))
    for file in tmp_path.iterdir():
        file.unlink()

    assert answer() == "hit"
    assert identical(gradients(compiled, (0, 1)), expected)
    assert len(outputs) == 2


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("forward", "backward"), [(nullcontext, bfloat16), (bfloat16, nullcontext)]
)
def test_autocast_of_the_backward_is_not_that_of_the_program(
    tmp_path: Path, forward: Callable[[], Any], backward: Callable[[], Any]
) -> None:
    def use(fn: Use, used: int) -> list[Any]:
        torch.manual_seed(2)
        inputs = leaf(4, 4), leaf(4, 4)
        with forward():
            loss = fn(*inputs)[used].sum()
        with backward():
            loss.backward()
        return [value.grad for value in inputs]

    expected = use(fresh(two, tmp_path), 1)
    for file in tmp_path.iterdir():  # all but the forward: its key has no such part
        if b'"backward"' in file.read_bytes().splitlines()[1]:
            file.unlink()
    compiled = fresh(two, tmp_path)

    assert identical(use(compiled, 1), expected)
    assert answer() == "hit"
    assert identical(use(fresh(two, tmp_path), 1), expected)  # what was kept is right too
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_default_dtype")
def test_a_default_dtype_set_before_the_backward_changes_nothing(tmp_path: Path) -> None:
    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * torch.full((3,), 0.1)  # of the default type
        return y.sin(), y.cos()

    def use(fn: Use) -> Any:
        x = torch.ones(3, requires_grad=True)
        first, _ = fn(x)
        torch.set_default_dtype(torch.float64)
        first.sum().backward()
        torch.set_default_dtype(torch.float32)
        return x.grad

    fresh(scaled, tmp_path)(torch.ones(3, requires_grad=True))
    for _ in range(2):  # traced after the hit, then kept
        assert identical(use(fresh(scaled, tmp_path)), use(scaled))
        assert answer() == "hit"


def test_derivatives_of_higher_order_follow_a_hit(tmp_path: Path) -> None:
    def derivatives(fn: Use) -> list[Tensor]:
        torch.manual_seed(2)
        x = leaf(5, dtype=torch.float64)
        found: list[Tensor] = [fn(x)]
        for _ in range(3):
            (slope,) = torch.autograd.grad(found[-1].sum(), x, create_graph=True)
            found.append(slope)
        return found

    def curve(x: Tensor) -> Tensor:
        return x.sin() * x.exp()

    results = [derivatives(fresh(curve, tmp_path)) for _ in range(2)]

    assert answer() == "hit"
    assert identical(*results)
    torch.testing.assert_close(results[1], derivatives(curve))


def test_a_backward_runs_twice_after_a_hit(tmp_path: Path) -> None:
    for _ in range(2):
        x, w = leaf(4, 4), leaf(4, 4)
        loss = fresh(two, tmp_path)(x, w)[0].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        once = torch.autograd.grad(two(x, w)[0].sum(), x)[0]
        torch.testing.assert_close(x.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert answer() == "hit"


def test_what_cannot_be_differentiated_says_so_after_a_hit(tmp_path: Path) -> None:
    messages = []
    for _ in range(2):
        loss = fresh(lambda x: torch.heaviside(x, x), tmp_path)(leaf(3)).sum()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        messages.append(str(caught.value))

    assert answer() == "hit"
    assert messages[0] == messages[1]


def test_a_hit_keeps_no_input_alive(tmp_path: Path) -> None:
    for _ in range(2):
        inputs = [leaf(4, 4), leaf(4, 4)]
        compiled = fresh(two, tmp_path)
        outputs = compiled(*inputs)
        outputs[0].sum().backward()
        known = [weakref.ref(value) for value in inputs]
        del inputs, outputs
        gc.collect()
        assert [ref() is None for ref in known] == [True, True]
    assert answer() == "hit"


# Symbolic sizes


def rows(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x, -1) * y.sum() + x.shape[0]


def test_one_entry_serves_all_sizes(tmp_path: Path) -> None:
    answers = []
    for size in (6, 10):
        compiled = fresh(rows, tmp_path, dynamic=True)
        for n in (size, 3, 17):
            inputs = torch.randn(n, 4), torch.randn(n)
            torch.testing.assert_close(compiled(*inputs), rows(*inputs))
        answers.append(answer())

    assert answers == ["miss", "hit"]


def test_a_backward_for_symbolic_sizes_is_traced_after_a_hit(tmp_path: Path) -> None:
    for size, used in ((4, 0), (6, 1), (8, 1)):
        compiled = fresh(
            lambda x: (x.sin() * x.shape[0], x.cos().cumsum(0)), tmp_path, dynamic=True
        )
        for n in (size, 5):
            x, twin = leaf(n), leaf(n)
            twin.data.copy_(x.detach())
            compiled(x)[used].sum().backward()
            (twin.sin() * n, twin.cos().cumsum(0))[used].sum().backward()
            torch.testing.assert_close(x.grad, twin.grad)
        assert answer() == ("miss" if size == 4 else "hit")


def test_a_graph_whose_sizes_obey_conditions_is_not_kept_and_says_so(tmp_path: Path) -> None:
    for size in (6, 10):
        x = torch.randn(size)
        compiled = fresh(lambda x: x.reshape(-1, 2).sum(-1), tmp_path, dynamic=True)
        torch.testing.assert_close(compiled(x), x.reshape(-1, 2).sum(-1))

        assert answer() == "miss"
        assert any("not kept" in note and "conditions" in note for note in record().notes)


def test_a_static_program_does_not_serve_other_sizes(tmp_path: Path) -> None:
    for size, dynamic in ((6, False), (6, True), (8, True)):
        inputs = torch.randn(size, 4), torch.randn(size)
        torch.testing.assert_close(fresh(rows, tmp_path, dynamic)(*inputs), rows(*inputs))
        assert answer() == ("hit" if size == 8 else "miss")
