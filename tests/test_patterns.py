"""Replacements of users': traced from functions, stored, and proven wherever they are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from typer.testing import CliRunner

import stator
from stator import patterns
from stator.cli import app
from stator.errors import CompileError, OptionError
from stator.graph.pattern_text import pattern_text, read_pattern
from stator.patterns import PatternPass, fwd_only, joint_fwd_bwd, register_replacement

aten = torch.ops.aten


def rand(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(*sizes, requires_grad=grad)


def graph_of(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    return fwd_only(function, args)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0).contiguous()


@pytest.fixture
def attention_pass() -> PatternPass:
    found = PatternPass("attention")
    register_replacement(attention, fused, [rand(2, 3, 4, 8) for _ in range(3)], fwd_only, found)
    return found


def test_what_a_function_traces_to_is_replaced(attention_pass: PatternPass) -> None:
    inputs = [rand(1, 2, 6, 16) for _ in range(3)]
    module = graph_of(attention, *inputs)

    assert attention_pass.apply(module) == 1
    module.recompile()
    assert any("flash_attention" in name or "attention" in name for name in targets(module))
    torch.testing.assert_close(module(*inputs)[0], attention(*inputs))


def test_a_softmax_over_rows_is_left_alone(attention_pass: PatternPass) -> None:
    """The pattern leaves numbers open; the proof does not."""
    inputs = [rand(2, 3, 4, 4) for _ in range(3)]
    module = graph_of(lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -2) @ v, *inputs)
    assert attention_pass.apply(module) == 0


def test_a_permuted_k_is_left_alone(attention_pass: PatternPass) -> None:
    inputs = [rand(4, 4, 4, 4) for _ in range(3)]
    module = graph_of(lambda q, k, v: torch.softmax(q @ k.transpose(1, 3), -1) @ v, *inputs)
    assert attention_pass.apply(module) == 0


def test_the_proof_is_asked_again_for_other_sizes(attention_pass: PatternPass) -> None:
    for size in (4, 4, 7):
        assert attention_pass.apply(graph_of(attention, *(rand(2, 3, size, 8) for _ in "qkv"))) == 1
    (entry,) = attention_pass.known.values()
    assert len(entry.proven) == 2  # type: ignore[attr-defined]  # a Replacement


def test_symbolic_sizes_are_proven_as_such() -> None:
    def search(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1).sum(1)

    def replace(x: Tensor) -> Tensor:
        return x.sum((1, 2))

    found = PatternPass()
    register_replacement(search, replace, [rand(5, 3, 4)], fwd_only, found)
    handle = stator.passes.register("joint", found)
    try:
        compiled = torch.compile(search, backend="stator", dynamic=True, options={"strict": True})
        for size in (5, 9):
            x = rand(size, 3, 4)
            torch.testing.assert_close(compiled(x), search(x))
    finally:
        handle.remove()


def test_numbers_are_arguments() -> None:
    def search(x: Tensor, factor: float) -> Tensor:
        return (x * factor).sin()

    def replace(x: Tensor, factor: float) -> Tensor:
        return (x * (factor * 1.0)).sin().neg().neg()

    found = PatternPass()
    register_replacement(
        search, replace, [rand(3)], fwd_only, found, scalar_workaround={"factor": 0.113377}
    )
    module = graph_of(lambda x: (x * 2.5).sin(), x := rand(3))
    assert found.apply(module) == 1
    module.recompile()
    assert "aten.neg.default" in targets(module)
    torch.testing.assert_close(module(x)[0], (x * 2.5).sin())


def test_two_numbers_that_look_alike_are_refused() -> None:
    with pytest.raises(CompileError, match="the same"):
        register_replacement(
            lambda x, a, b: x * a + b,
            lambda x, a, b: x,
            [rand(3)],
            fwd_only,
            PatternPass(),
            scalar_workaround={"a": 0.5, "b": 0.5},
        )


def test_an_extra_check_has_the_last_word() -> None:
    found = PatternPass()
    seen = []

    def check(match: patterns.Match) -> bool:
        seen.append(match.kwargs["x"].meta["val"].shape)
        return False

    register_replacement(
        lambda x: x.sin().cos(), lambda x: x.cos().sin(), [rand(3)], fwd_only, found, check
    )
    assert found.apply(graph_of(lambda x: x.sin().cos(), rand(7))) == 0
    assert seen == [torch.Size([7])]


def test_a_replacement_of_another_shape_is_refused() -> None:
    found = PatternPass()
    register_replacement(
        lambda x: x.sin().cos(), lambda x: x.sin().cos()[None], [rand(3)], fwd_only, found
    )
    module = graph_of(lambda x: x.sin().cos(), rand(3))
    before = str(module.graph)
    assert found.apply(module) == 0
    assert str(module.graph) == before


def test_a_duplicate_is_refused_or_skipped() -> None:
    def search(x: Tensor) -> Tensor:
        return x.sin().cos()

    def replace(x: Tensor) -> Tensor:
        return x.cos()

    found = PatternPass()
    assert register_replacement(search, replace, [rand(3)], fwd_only, found)
    with pytest.raises(CompileError, match="registered already"):
        register_replacement(search, replace, [rand(3)], fwd_only, found)
    assert not register_replacement(
        search, replace, [rand(3)], fwd_only, found, skip_duplicates=True
    )


def test_forward_and_backward_are_one_pattern() -> None:
    def search(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def replace(x: Tensor) -> Tensor:
        return F.silu(x)

    found = PatternPass("silu")
    register_replacement(search, replace, [rand(4, grad=True)], joint_fwd_bwd, found)
    module = joint_fwd_bwd(search, [rand(6, grad=True)])
    assert found.apply(module) == 1
    assert "aten.silu.default" in targets(module)
    assert any("silu_backward" in name for name in targets(module))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own use
def test_forward_mode_duals_are_traced() -> None:
    module = patterns.forward_mode(lambda x: x.sin(), [rand(3)])
    x, t = rand(3), rand(3)
    value, tangent = module(x, t)
    torch.testing.assert_close(value, x.sin())
    torch.testing.assert_close(tangent, x.cos() * t)


def test_a_handler_edits_the_graph_itself() -> None:
    found = PatternPass()
    pattern = patterns.CallFunction(
        aten.cos.default, patterns.CallFunction(aten.sin.default, patterns.KeywordArg("x"))
    )

    @patterns.register_graph_pattern(pattern, pass_dict=found)
    def turn_around(match: patterns.Match, x: fx.Node) -> None:
        node = match.output_node()
        with node.graph.inserting_before(node):
            new = node.graph.call_function(aten.exp.default, (x,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        for old in reversed(match.nodes):
            node.graph.erase_node(old)

    module = graph_of(lambda x: x.sin().cos(), rand(3))
    assert found.apply(module) == 1
    assert targets(module) == ["aten.exp.default"]


def test_patterns_are_stored_as_text_and_read_again(tmp_path: Path) -> None:
    found = PatternPass()
    register_replacement(attention, fused, [rand(2, 3, 4, 8) for _ in "qkv"], fwd_only, found)
    ((pattern, _),) = found.all_entries()
    file = tmp_path / "attention.py"
    file.write_text(pattern_text(pattern))
    assert pattern_text(read_pattern(file)) == file.read_text()
    assert "ops.aten._softmax.default" in file.read_text()


def test_a_broken_file_says_how_to_mend_it(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("pattern = CallFunction(")
    with pytest.raises(CompileError, match="stator patterns build"):
        read_pattern(file)


# --- passes of users' ---


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for handle in made:
        handle.remove()


def test_a_pass_runs_where_it_is_put(handles: list[Any]) -> None:
    order: list[str] = []
    for stage in ("pre_grad", "joint", "post_grad"):

        def one(graph: fx.Graph, ctx: Any, stage: str = stage) -> int:
            order.append(stage)
            return 0

        one.__name__ = f"mine_{stage}"
        handles.append(stator.passes.register(stage, one))
    torch.compile(lambda x: x.sin() + 1, backend="stator", options={"strict": True})(rand(3))
    assert order == ["pre_grad", "joint", "post_grad"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", len), "unknown stage"),
        (("joint", 3), "is no pass"),
    ],
)
def test_a_wrong_registration_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stator.passes.register(*arguments)


def test_a_place_beside_an_unknown_pass_is_refused(handles: list[Any]) -> None:
    def mine(graph: fx.Graph, ctx: Any) -> int:
        return 0

    handles.append(stator.passes.register("joint", mine, after="nothing_of_the_kind"))
    with pytest.raises(Exception, match="nothing_of_the_kind"):  # Dynamo wraps it
        torch.compile(lambda x: x.sin(), backend="stator", options={"strict": True})(rand(3))


def test_a_rule_of_a_user_is_a_pass(handles: list[Any]) -> None:
    @stator.rule(example=lambda: (rand(3),))
    def sin_of_neg(x: Tensor) -> stator.Rewrite:
        """sin(-x)  -->  -sin(x)"""
        return stator.Rewrite(
            before=aten.sin.default(aten.neg.default(x)), after=-aten.sin.default(x)
        )

    handles.append(stator.passes.register("joint", sin_of_neg))
    x = rand(5)
    compiled = torch.compile(lambda x: (-x).sin(), backend="stator", options={"strict": True})
    torch.testing.assert_close(compiled(x), (-x).sin())
    graph = stator.last_compilation().graphs["forward"]  # type: ignore[union-attr]  # there is one
    assert graph.index("aten.sin.default") < graph.index("aten.neg.default")


STORED = """
import torch
from stator.patterns import PatternPass, fwd_only, gen_register_replacement

PASS = PatternPass("stored")


def search(x):
    return x.sin().cos()


def replace(x):
    return x.cos().sin()


gen_register_replacement("sin_cos", search, replace, [torch.randn(3)], fwd_only, PASS)
"""


def test_the_command_stores_patterns_and_tells_stale_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_patterns.py").write_text(STORED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patterns, "_stored", {})
    runner, command = CliRunner(), ["patterns", "build", "registers_patterns"]

    assert runner.invoke(app, [*command, "--check"]).exit_code == 1
    assert runner.invoke(app, command).exit_code == 0
    assert runner.invoke(app, [*command, "--check"]).exit_code == 0
    file = tmp_path / "stored_patterns" / "sin_cos.py"
    file.write_text(file.read_text().replace("cos", "tan"))
    result = runner.invoke(app, [*command, "--check"])
    assert result.exit_code == 1
    assert "sin_cos.py" in result.output


def test_a_stored_pattern_is_proven_as_any_other(tmp_path: Path) -> None:
    """A file that says another softmax: nothing is replaced."""
    found = PatternPass()
    register_replacement(attention, fused, [rand(2, 3, 4, 4) for _ in "qkv"], fwd_only, found)
    ((pattern, _),) = found.all_entries()
    file = tmp_path / "attention.py"
    file.write_text(pattern_text(pattern))
    stored = PatternPass()
    register_replacement(
        attention,
        fused,
        [rand(2, 3, 4, 4) for _ in "qkv"],
        fwd_only,
        stored,
        search_fn_pattern=read_pattern(file),
    )
    inputs = [rand(2, 3, 4, 4) for _ in "qkv"]
    wrong = graph_of(lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -2) @ v, *inputs)
    assert stored.apply(wrong) == 0
    assert stored.apply(graph_of(attention, *inputs)) == 1


# --- operators that write to their arguments ---

SCHEMAS = {
    "rms_norm": "(Tensor(a!) out, Tensor x, Tensor w) -> ()",
    "quantize": "(Tensor(a!) out, Tensor x, Tensor scale) -> ()",
    "rms_norm_quantize": "(Tensor(a!) out, Tensor x, Tensor w, Tensor scale) -> ()",
}


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


@pytest.fixture
def writing_operators() -> Iterator[Any]:
    library = torch.library.Library("stator_test_patterns", "DEF")
    kernels: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda out, x, w: out.copy_(normalized(x, w)),
        "quantize": lambda out, x, scale: out.copy_(quantized(x, scale)),
        "rms_norm_quantize": lambda out, x, w, scale: out.copy_(quantized(normalized(x, w), scale)),
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema)

        def run(*args: Tensor, kernel: Callable[..., Any] = kernels[name]) -> None:
            kernel(*args)

        library.impl(name, run, "CPU")
        torch.library.register_fake(f"stator_test_patterns::{name}", lambda *_: None, lib=library)
    yield torch.ops.stator_test_patterns
    library._destroy()


def test_operators_that_write_are_fused(writing_operators: Any, handles: list[Any]) -> None:
    def search(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        normal, whole = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)
        writing_operators.rms_norm(normal, x, w)
        writing_operators.quantize(whole, normal, scale)
        return whole

    def replace(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        whole = torch.empty_like(x, dtype=torch.int8)
        writing_operators.rms_norm_quantize(whole, x, w, scale)
        return whole

    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return search(x * 2, w, scale).float() + 1

    found = PatternPass("rms_norm_quantize")
    inputs = [rand(4, 8), rand(8), torch.tensor(0.1)]
    register_replacement(search, replace, inputs, fwd_only, found)
    handles.append(stator.passes.register("joint", found))
    compiled = torch.compile(program, backend="stator", options={"strict": True})

    assert torch.equal(compiled(*inputs), program(*inputs))
    graph = stator.last_compilation().graphs["forward"]  # type: ignore[union-attr]  # there is one
    assert "rms_norm_quantize.default" in graph
    assert "rms_norm.default" not in graph
