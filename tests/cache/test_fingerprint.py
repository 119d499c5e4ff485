"""The key of a program: all that matters is in it, nothing else is, and no two share one."""

from __future__ import annotations

import functools
import operator
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stator.backend import compile_fx
from stator.cache import Key
from stator.cache import fingerprint as module_under_test
from stator.cache.fingerprint import NoKey, fingerprint, user_lines
from stator.core.events import last_compilation
from stator.options import Options
from tests.aot.custom_operators import scaled_sin
from tests.aot.two_tensor import TwoTensor

Use = Callable[..., Any]


def key_of(fn: Use, *inputs: Any, dynamic: bool | None = None, **options: Any) -> Key:
    """The key of the one graph that Dynamo makes of a call."""
    found: list[Key] = []

    def backend(module: fx.GraphModule, given: Sequence[Any]) -> Use:
        lines = user_lines(module)
        found.append(fingerprint(module, given, replace(Options(), **options), lines))
        eager: Use = module.forward
        return eager

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (key,) = found
    return key


def key_of_graph(graph: fx.Graph, *inputs: Any) -> Key:
    return key_of_module(fx.GraphModule(nn.Module(), graph), *inputs)


def key_of_module(module: fx.GraphModule, *inputs: Any) -> Key:
    return fingerprint(module, inputs, Options(), user_lines(module))


def doubled(x: Tensor) -> Tensor:
    return x * 2


X: Final = torch.arange(6.0).reshape(2, 3)

# What matters in the program and its inputs.

DIFFERENT_GRAPHS: Final[dict[str, tuple[Use, Use]]] = {
    "an operator": (lambda x: x.sin(), lambda x: x.cos()),
    "an integer and a float": (lambda x: x * 1, lambda x: x * 1.0),
    "an integer and a bool": (lambda x: x + 1, lambda x: x + True),
    "a constant": (lambda x: x * 2.0, lambda x: x * 2.0000000000000004),
    "the sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "a NaN": (lambda x: x * float("nan"), lambda x: x * float("inf")),
    "a dim": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "a dim and a list of it": (lambda x: x.sum(0), lambda x: x.sum((0,))),
    "a keyword": (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
    "a dtype": (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
    "an order": (lambda x: x - x.sin(), lambda x: x.sin() - x),
    "a slice": (lambda x: x[0:1], lambda x: x[0:1:1]),
    "an ellipsis": (lambda x: x[..., 0], lambda x: x[:, 0]),
    "a text": (
        lambda x: x.div(2, rounding_mode="floor"),
        lambda x: x.div(2, rounding_mode="trunc"),
    ),
    "an output": (lambda x: (x + 1, x + 2), lambda x: (x + 2, x + 1)),
    "an output less": (lambda x: (x + 1, x + 2), lambda x: (x + 1,)),
    "in place": (lambda x: x.clone().add_(1), lambda x: x.clone().add(1)),
    "a pool": (lambda x: F.max_pool1d(x, 2), lambda x: F.adaptive_max_pool1d(x, 2)),
    "a detour": (lambda x: x * x, lambda x: x * x.clone()),
    "a literal tensor": (lambda x: x + torch.tensor(1), lambda x: x + torch.tensor(2)),
    "grad mode inside": (lambda x: x * 2, torch.no_grad()(lambda x: x * 2)),
}


@pytest.mark.parametrize("name", DIFFERENT_GRAPHS)
def test_what_the_graph_does_is_in_the_key(name: str) -> None:
    one, other = (key_of(fn, X.clone()) for fn in DIFFERENT_GRAPHS[name])

    assert one.differing(other) == ("graph",)
    assert one.digest != other.digest


def strided(*stride: int) -> Tensor:
    return torch.zeros(64).as_strided((2, 3), stride)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


DIFFERENT_INPUTS: Final[dict[str, Callable[[], Any]]] = {
    "dtype": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "size": lambda: torch.zeros(2, 4),
    "rank": lambda: torch.zeros(2, 3, 1),
    "stride": lambda: strided(1, 2),
    "padding": lambda: strided(8, 1),
    "offset": lambda: torch.zeros(3, 3)[1:],
    "requires grad": lambda: torch.zeros(2, 3, requires_grad=True),
    "not a leaf": lambda: torch.zeros(2, 3, requires_grad=True).clone(),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3)),
    "inference": inference_tensor,
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    "integers": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "bools": lambda: torch.zeros(2, 3, dtype=torch.bool),
    "meta": lambda: torch.zeros(2, 3, device="meta"),
}


def test_how_an_input_lies_is_in_the_key() -> None:
    keys = {name: key_of(doubled, make()) for name, make in DIFFERENT_INPUTS.items()}
    keys["plain"] = key_of(doubled, torch.zeros(2, 3))

    assert len({key.digest for key in keys.values()}) == len(keys)
    for name, key in keys.items():
        assert key.differing(keys["plain"]) in ((), ("inputs",)), name


def test_an_input_counts_as_it_came_not_as_the_program_left_it() -> None:
    def replaced(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        x.data = torch.ones(2)
        return y, x + 1

    def squeezed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        torch.ops.aten.squeeze_(x)
        return y, x + 1

    assert key_of(replaced, torch.ones(2, 3)) != key_of(replaced, torch.ones(3, 2))
    assert key_of(squeezed, torch.ones(1, 3)) != key_of(squeezed, torch.ones(3, 1))
    dynamic = [key_of(replaced, torch.ones(size), dynamic=True) for size in ((2, 3), (5, 4), (6,))]
    assert dynamic[0] == dynamic[1] != dynamic[2]
    assert dynamic[0] != key_of(replaced, torch.ones(2, 3))


def test_numbers_among_the_inputs_are_in_the_key() -> None:
    def shown(x: Tensor, n: Any) -> Tensor:
        return x * n

    keys = [key_of(shown, X, n) for n in (1, 1.0, True, 2, -0.0, 0.0)]

    assert len({key.digest for key in keys}) == len(keys)


def test_what_dynamo_knows_of_sizes_is_in_the_key() -> None:
    def even(x: Tensor) -> Tensor:
        assert x.shape[0] % 2 == 0
        return x.sin()

    def nonempty(x: Tensor) -> Tensor:
        assert x.shape[0] != 0
        return x.sin()

    def large(x: Tensor) -> Tensor:
        assert x.shape[0] > 5
        return x.sin()

    x = torch.ones(8)
    keys = [key_of(fn, x, dynamic=True) for fn in (even, nonempty, large)]
    keys += [key_of(nonempty, x, dynamic=False)]

    assert len({key.digest for key in keys}) == 4
    assert {key.differing(keys[1]) for key in keys[::2]} == {("inputs",)}
    assert key_of(even, torch.ones(10), dynamic=True) == keys[0]


# What matters around it.


@contextmanager
def turned(set_: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


STATES: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype": lambda: turned(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: turned(torch.use_deterministic_algorithms, True, False),
    "matmul precision": lambda: turned(torch.set_float32_matmul_precision, "medium", "highest"),
    "without oneDNN": lambda: turned(torch._C._set_mkldnn_enabled, False, True),
    "flash attention": lambda: turned(torch.backends.cuda.enable_flash_sdp, False, True),
    "attention by formula": lambda: turned(torch.backends.cuda.enable_math_sdp, False, True),
}


def test_the_switches_of_torch_are_in_the_key() -> None:
    keys = {"none": key_of(doubled, X)}
    for name, context in STATES.items():
        with context():
            keys[name] = key_of(doubled, X)

    assert len({key.digest for key in keys.values()}) == len(keys)
    for name, key in keys.items():
        assert key.differing(keys["none"]) in ((), ("state",)), name
    assert key_of(doubled, X) == keys["none"]


def test_the_device_of_new_tensors_is_in_the_key() -> None:
    def made(x: Tensor) -> Tensor:
        return torch.ones(3)

    with torch.device("meta"):
        key = key_of(made, X)

    assert key != key_of(made, X)


OPTIONS: Final[dict[str, Any]] = {
    "strict": True,
    "kernels": False,
    **{"codegen": "triton", "executor": "python"},
    **{"fallback_random": True, "numerics": "eager", "cuda_graphs": True, "tune": True},
    "verify": "kernels",
    "verify_passes": "values",
    **{"skip": ("drop_noops",), "profile_ranges": True},
    **{"fuel": 3, "pass_fuel": 3, "kernel_fuel": 3},
    **{"freezing": True, "discard_parameters": True},
    "pack_weights": False,
    **{"memory_budget": 0.5, "memory_limit": 1 << 30, "save_policy": len, "knapsack": "ilp"},
    **{"aggressive_recomputation": True, "recompute_costs": "profile", "explain_memory": True},
}


def test_options_that_change_what_is_compiled_are_in_the_key() -> None:
    keys = [key_of(doubled, X, **{name: value}) for name, value in OPTIONS.items()]
    default = key_of(doubled, X)

    assert len({key.digest for key in [default, *keys]}) == len(keys) + 1
    assert {key.differing(default) for key in keys} == {("options",)}


def test_options_of_the_cache_and_of_dumps_are_not_in_the_key(tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "cache": False,
        "cache_dir": tmp_path,
        "cache_limit": 1,
        "dump_dir": tmp_path,
        "fuel_log": tmp_path / "log",
        **{"explain": True, "logs": ("fusion",), "progress": False},
    }

    assert key_of(doubled, X, remote_cache="memory://x", **changed) == key_of(doubled, X)
    assert OPTIONS.keys() | changed.keys() | {"remote_cache"} == set(Options.__dataclass_fields__)


def test_the_order_of_skipped_passes_is_not_in_the_key() -> None:
    one, other = (key_of(doubled, X, skip=names) for names in (("a", "b"), ("b", "a")))

    assert one == other != key_of(doubled, X, skip=("a",))


@pytest.mark.parametrize(
    ("owner", "name", "value", "part"),
    [
        (torch, "__version__", "2.99.0", "torch"),
        (torch.version, "git_version", "0" * 40, "torch"),
        (module_under_test, "own_code", lambda: "0", "stator"),
        (module_under_test, "_machine", lambda: "0", "machine"),
        (module_under_test, "version", lambda _: "0", "llvmlite"),
        (platform, "python_version", lambda: "4.0", "python"),
        (platform, "python_implementation", lambda: "PyPy", "python"),
    ],
)
def test_versions_and_the_machine_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, part: str
) -> None:
    before = key_of(doubled, X)
    monkeypatch.setattr(owner, name, value)

    assert key_of(doubled, X).differing(before) == (part,)


def test_any_change_of_our_own_source_changes_its_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def digest() -> str:
        return module_under_test.own_code.__wrapped__()

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(module_under_test, "__file__", str(tmp_path / "cache" / "fingerprint.py"))
    found = [digest()]
    for name, text in (("a.py", "é"), ("b.ll", ""), ("a.py", "e"), ("c.py", "é")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found.append(digest())
    (tmp_path / "d.txt").write_text("no code")
    (tmp_path / ".#a.py").symlink_to("nobody@nowhere")  # an editor's lock

    assert len(set(found)) == len(found)
    assert digest() == found[-1]


def test_without_llvmlite_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module_under_test, "version", missing)

    assert cache_word(doubled, X, options={}) == "off: llvmlite is not installed"


# What does not matter.


def in_file(path: Path, text: str) -> Use:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, str(path), "exec"), names)
    found: Use = names["f"]
    return found


def test_where_the_program_stands_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def f(x):\n    y = x.sin()\n    return y.cos() + 1\n"
    one = key_of(in_file(tmp_path / "a.py", text), X)
    monkeypatch.chdir(tmp_path)
    other = key_of(in_file(Path("below/b.py"), f"import os\n\n\n{text}"), X)

    assert one == other


def test_names_of_variables_do_not_matter(tmp_path: Path) -> None:
    one = "def f(x, w):\n    y = x @ w\n    return y.sin() + y\n"
    other = "def f(mul, sin):\n    l_x_ = mul @ sin\n    return l_x_.sin() + l_x_\n"
    texts = enumerate((one, other))
    keys = [key_of(in_file(tmp_path / f"{n}.py", text), X, X.t()) for n, text in texts]

    assert keys[0] == keys[1]


class Scaled(nn.Module):
    """Two parameters, whose names are given."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = first, second
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return x * first - second


def test_names_of_parameters_do_not_matter_and_their_order_does() -> None:
    def symbolic(*names: str) -> Key:
        return key_of_module(fx.symbolic_trace(Scaled(*names)), X)

    assert key_of(Scaled("a", "b"), X) == key_of(Scaled("c", "d"), X)
    assert symbolic("a", "b") == symbolic("b", "a") != symbolic("a", "a")


def test_a_tensor_of_the_module_counts_with_its_need_of_a_gradient() -> None:
    modules = [fx.symbolic_trace(Scaled("a", "b")) for _ in range(3)]
    modules[1].a.requires_grad_(False)
    modules[2].b = nn.Parameter(torch.ones(3), requires_grad=False)

    assert len({key_of_module(module, X).digest for module in modules}) == 3


# What has no key.


def cache_word(fn: Use, *inputs: Any, options: dict[str, Any]) -> str:
    """What the record says of the cache, once the results are seen to be right."""
    torch._dynamo.reset()
    given = {"strict": True, "cache": True, "cache_limit": 0, **options}
    compiled = torch.compile(fn, backend="stator", options=given)
    torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    record = last_compilation()
    assert record is not None, "nothing was compiled"
    return record.cache or ""


@torch.compiler.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return x * 3


@torch.compiler.allow_in_graph
@functools.wraps(F.relu)
def in_disguise(x: Tensor) -> Tensor:
    return x * 3


class Tripled(torch.autograd.Function):
    """A function that Dynamo is told not to look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


torch.compiler.allow_in_graph(Tripled)


def must_save(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def selectively_checkpointed(x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, must_save)
    result: Tensor = checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)
    return result


def grad_input() -> Tensor:
    return torch.ones(3, requires_grad=True)


WITHOUT_KEY: Final[dict[str, tuple[Use, Callable[[], Any], str]]] = {
    "custom operator": (
        lambda x: scaled_sin(x, 2.0) + 1,
        lambda: X,
        "operator of the user's",
    ),
    "opaque function": (lambda x: opaque(x) + 1, lambda: X, "opaque is a function of the user's"),
    "function in disguise": (lambda x: in_disguise(x), lambda: X, "relu is a function of the user"),
    "opaque derivative": (lambda x: Tripled.apply(x), grad_input, "function of the user's"),
    "subclass": (doubled, lambda: TwoTensor(X, X + 1), "TwoTensor"),
    "checkpoint policy": (selectively_checkpointed, grad_input, "notes"),
    "control flow": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        lambda: X,
        "cond",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_what_its_text_does_not_identify_has_no_key(name: str, tmp_path: Path) -> None:
    fn, make, reason = WITHOUT_KEY[name]
    told = cache_word(fn, make(), options={"cache_dir": tmp_path})

    assert told.startswith("off: ")
    assert reason in told
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_policy_has_a_key() -> None:
    def checkpointed(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
        return result

    assert key_of(checkpointed, grad_input()) != key_of(torch.sin, grad_input())


def test_a_graph_that_calls_a_module_has_no_key(tmp_path: Path) -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    compiled = compile_fx(module, [X], options={"cache": True, "cache_dir": tmp_path})

    torch.testing.assert_close(compiled(X), module(X))
    record = last_compilation()
    assert record is not None
    assert "calls a module" in (record.cache or "")


@pytest.mark.parametrize(
    "value",
    [object(), torch.Generator(), range(3), {1, 2}, nn.Linear(1, 1), lambda x: x, os.system],
)
def test_an_argument_that_is_no_value_has_no_key(value: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.add, (x, x))
    graph.output(node)
    module = fx.GraphModule(nn.Module(), graph)
    node.args = (x, value)  # fx writes no code for these

    with pytest.raises(NoKey):
        key_of_module(module, X)


def test_functions_that_torch_makes_alike_are_told_apart() -> None:
    made = [F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool2d, torch.unique]

    assert len({module_under_test._function(function) for function in made}) == len(made)


# No two programs share a key.

FUNCTIONS: Final = [torch.add, torch.mul, operator.add, operator.sub, torch.maximum]
METHODS: Final = ["sin", "cos", "neg", "t"]
NUMBERS: Final = st.sampled_from([0, 1, -1, 0.0, -0.0, 1.0, True, False, 2**70, 1e300, 1j])
VALUES: Final = st.recursive(
    st.one_of(NUMBERS, st.none(), st.text(max_size=2), st.sampled_from([torch.float32, ...])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.text(max_size=1), inner, max_size=2),
        st.tuples(inner, inner, inner).map(lambda parts: slice(*parts)),
    ),
    max_leaves=4,
)


@st.composite
def graphs(draw: Any) -> fx.Graph:
    """A small graph: inputs, calls, one or two results."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(draw(st.integers(1, 2)))]
    one_of = st.sampled_from
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            nodes.append(graph.call_method(draw(one_of(METHODS)), (draw(one_of(nodes)),)))
            continue
        right = draw(st.one_of(VALUES, one_of(nodes)))
        named = draw(st.dictionaries(one_of(["alpha", "out"]), VALUES, max_size=1))
        arguments = draw(one_of(nodes)), right
        nodes.append(graph.call_function(draw(one_of(FUNCTIONS)), arguments, named))
    results = draw(st.lists(one_of(nodes), min_size=1, max_size=2))
    graph.output(results[0] if draw(st.booleans()) else tuple(results))
    return graph


def meaning(graph: fx.Graph) -> Any:
    """The graph as plain data, in which equal means the same: by other code than the key's."""
    places = {node: ("node", n) for n, node in enumerate(graph.nodes)}

    def told(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return places[value]
        if isinstance(value, dict):
            return "dict", tuple((told(key), told(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(map(told, value))
        if isinstance(value, slice):
            return "slice", told(value.start), told(value.stop), told(value.step)
        return type(value), repr(value)

    kinds = ("placeholder", "output")
    return tuple(
        (node.op, None if node.op in kinds else node.target, told(node.args), told(node.kwargs))
        for node in graph.nodes
    )


@settings(max_examples=150, deadline=None)
@given(graphs(), graphs())
def test_two_graphs_share_a_key_exactly_if_they_are_the_same(
    one: fx.Graph, other: fx.Graph
) -> None:
    keys = [key_of_graph(g, *[X] * len(g.find_nodes(op="placeholder"))) for g in (one, other)]

    assert (keys[0] == keys[1]) == (meaning(one) == meaning(other))


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_two_arguments_share_a_key_exactly_if_they_are_the_same(one: Any, other: Any) -> None:
    made = []
    for value in (one, other):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.add, (x, value)))
        made.append(graph)

    assert (key_of_graph(made[0], X) == key_of_graph(made[1], X)) == (
        meaning(made[0]) == meaning(made[1])
    )
