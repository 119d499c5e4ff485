"""The pass runner: events, verification, dumps, fuel, skipping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed

import stator
from stator import pipeline
from stator.core import events
from stator.core.events import Compilation
from stator.core.fuel import Fuel
from stator.errors import CompileError, VerifyError
from stator.graph.run import Ctx, GraphPass, dump_graph, run_pass, run_passes
from stator.options import Options

aten = torch.ops.aten


def drop_double_negation(graph: fx.Graph, ctx: Ctx) -> int:
    """neg(neg(x)) is x."""
    dropped = 0
    for node in graph.find_nodes(op="call_function", target=aten.neg.default):
        inner = node.args[0]
        if inner.target is aten.neg.default and ctx.fuel.spend(node.name):
            node.replace_all_uses_with(inner.args[0])
            graph.erase_node(node)
            dropped += 1
    return dropped


def do_nothing(graph: fx.Graph, ctx: Ctx) -> int:
    """A pass that finds nothing to do."""
    return 0


def write_in_place(graph: fx.Graph, ctx: Ctx) -> int:
    """A wrong pass: it leaves a mutation in the middle of the graph."""
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = aten.relu_.default
    return 1


def negations(pairs: int = 1) -> fx.Graph:
    """relu, then pairs of negations with a sine between them."""
    graph = fx.Graph()
    value = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    for _ in range(pairs):
        for target in (aten.neg.default, aten.neg.default, aten.sin.default):
            value = graph.call_function(target, (value,))
    graph.output((value,))
    return graph


def ctx_with(**options: Any) -> Ctx:
    chosen = Options(**options)
    return Ctx(chosen, Fuel(chosen.fuel), Compilation())


# Events


def test_a_pass_is_recorded_with_graph_name_counts_and_changes() -> None:
    ctx, graph = ctx_with(), negations(pairs=2)

    changed = run_pass(drop_double_negation, graph, ctx, "forward")

    (event,) = ctx.record.stages
    assert changed == 2
    assert event.name == "forward/drop_double_negation"
    assert (event.nodes_before, event.nodes_after, event.changed) == (9, 7, 2)


def test_a_rewrite_is_noted_as_done_or_with_what_is_against_it_and_without_fuel_not_at_all() -> (
    None
):
    ctx, node = ctx_with(fuel=1), negations().find_nodes(op="placeholder")[0]
    answers = [
        ctx.may("turn", node, reason, ("is turned", "not turned"))
        for reason in (None, "it is round", None)
    ]

    assert answers == [True, False, False]
    assert ctx.record.notes == ["x is turned", "x not turned: it is round"]
    assert ctx.fuel.spent == ["turn: x"]


def test_the_time_of_a_pass_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.5])
    monkeypatch.setattr(events, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    ctx = ctx_with()

    run_pass(do_nothing, negations(), ctx, "forward")

    assert ctx.record.stages[0].seconds == 2.5


def test_passes_run_in_the_order_given() -> None:
    ctx = ctx_with()

    run_passes((do_nothing, drop_double_negation, do_nothing), negations(), ctx, "forward")

    assert [event.name for event in ctx.record.stages] == [
        "forward/do_nothing",
        "forward/drop_double_negation",
        "forward/do_nothing",
    ]


def test_a_finished_graph_is_kept_as_text() -> None:
    ctx, graph = ctx_with(), negations()

    dump_graph(graph, ctx, "forward")

    assert ctx.record.graphs == {"forward": str(graph)}


# Skipping


def test_a_skipped_pass_does_not_run_and_leaves_a_note() -> None:
    ctx, graph = ctx_with(skip=("drop_double_negation",)), negations()
    before = str(graph)

    run_passes((drop_double_negation, do_nothing), graph, ctx, "forward")

    assert str(graph) == before
    assert [event.name for event in ctx.record.stages] == ["forward/do_nothing"]
    (note,) = ctx.record.notes
    assert "drop_double_negation" in note
    assert "Options.skip" in note


# Verification


def test_verification_names_the_pass_that_broke_the_graph() -> None:
    ctx = ctx_with()

    with pytest.raises(VerifyError) as caught:
        run_passes((do_nothing, write_in_place, do_nothing), negations(), ctx, "forward")

    assert caught.value.stage == "forward/write_in_place"
    assert "relu_" in caught.value.what
    # The passes behind it never see the broken graph.
    assert ctx.record.stages[-1].name == "forward/write_in_place"


def test_a_pass_that_hides_what_it_changed_is_found_at_the_end() -> None:
    def hide(graph: fx.Graph, ctx: Ctx) -> int:
        write_in_place(graph, ctx)
        return 0

    with pytest.raises(VerifyError) as caught:
        run_passes((hide, do_nothing), negations(), ctx_with(), "forward")

    assert caught.value.stage == "forward: a pass that says it changed nothing"


def test_verification_can_be_turned_off() -> None:
    ctx, graph = ctx_with(verify=False), negations()

    run_pass(write_in_place, graph, ctx, "forward")

    assert len(graph.find_nodes(op="call_function", target=aten.relu_.default)) == 1


def test_a_pass_that_raises_is_the_stage_that_was_running() -> None:
    def explode(graph: fx.Graph, ctx: Ctx) -> int:
        raise KeyError("unheard of")

    ctx = ctx_with()
    with pytest.raises(KeyError):
        run_pass(explode, negations(), ctx, "forward")

    assert ctx.record.running == "forward/explode"


# Dumps


def test_a_dump_holds_the_graph_before_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    graph = negations()
    before = str(graph)

    run_pass(drop_double_negation, graph, ctx_with(dump_dir=folder), "forward")

    texts = {file.name: file.read_text() for file in folder.glob("compilation_*/*")}
    assert texts == {
        "001_drop_double_negation_before.txt": before + "\n",
        "001_drop_double_negation_after.txt": str(graph) + "\n",
    }
    assert before != str(graph)


def test_dumps_sort_in_the_order_the_passes_ran(tmp_path: Path) -> None:
    ctx, graph = ctx_with(dump_dir=tmp_path), negations()

    run_passes((write_nothing_twice, drop_double_negation), graph, ctx, "forward")
    dump_graph(graph, ctx, "some/graph")

    assert sorted(file.name for file in tmp_path.glob("compilation_*/*")) == [
        "001_write_nothing_twice_after.txt",
        "001_write_nothing_twice_before.txt",
        "002_drop_double_negation_after.txt",
        "002_drop_double_negation_before.txt",
        "some_graph.txt",
    ]
    (dumped,) = tmp_path.glob("compilation_*/some_graph.txt")
    assert dumped.read_text() == str(graph) + "\n"


def write_nothing_twice(graph: fx.Graph, ctx: Ctx) -> int:
    """A pass whose name sorts behind its successor's."""
    return 0


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ctx, graph = ctx_with(), negations()

    run_pass(drop_double_negation, graph, ctx, "forward")
    dump_graph(graph, ctx, "forward")

    assert list(tmp_path.iterdir()) == []


# Fuel


@pytest.mark.parametrize(("fuel", "changed"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3), (None, 3)])
def test_fuel_stops_rewrites(fuel: int | None, changed: int) -> None:
    ctx = ctx_with(fuel=fuel)

    assert run_pass(drop_double_negation, negations(pairs=3), ctx, "forward") == changed
    assert len(ctx.fuel.spent) == changed


def test_all_passes_of_a_compilation_draw_from_one_tank() -> None:
    ctx = ctx_with(fuel=3)

    run_passes((drop_double_negation,), negations(pairs=2), ctx, "forward")
    run_passes((drop_double_negation,), negations(pairs=2), ctx, "backward")

    assert [event.changed for event in ctx.record.stages] == [2, 1]


# In a compilation


def noop_view(x: Tensor) -> Tensor:
    return x.view(x.shape).sin() * 2


def events_of(**options: Any) -> Compilation:
    """The record of compiling `noop_view` and running it forward and backward."""
    x = torch.randn(2, 3, requires_grad=True)
    out = stator.compile(noop_view, strict=True, **options)(x)
    out.sum().backward()
    torch.testing.assert_close(out, noop_view(x))
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    record = stator.last_compilation()
    assert record is not None
    return record


STAGES: Final = [
    "captured/settle_dropout",
    "trace",
    "joint/drop_noops",
    "partition",
    "forward/drop_noops",
    "forward/plan",
    "forward/executor",
    "backward/drop_noops",
    "backward/plan",
    "backward/executor",
]


def test_the_last_compilation_tells_the_stages_in_order() -> None:
    record = events_of()

    # Others may stand between these.
    assert [event.name for event in record.stages if event.name in STAGES] == STAGES
    assert {"joint", "forward", "backward"} <= set(record.graphs)
    assert record.seconds > 0


def test_the_last_compilation_tells_what_a_pass_changed() -> None:
    (event,) = (e for e in events_of().stages if e.name == "joint/drop_noops")

    assert event.changed > 0
    assert event.nodes_before - event.nodes_after == event.changed


def test_a_compilation_without_fuel_rewrites_nothing_and_is_right_all_the_same() -> None:
    passes = [event for event in events_of(fuel=0).stages if event.name.endswith("drop_noops")]

    assert [event.changed for event in passes] == [0, 0, 0]


def test_a_compilation_leaves_out_what_skip_names() -> None:
    record = events_of(skip=("drop_noops",))

    assert not any("drop_noops" in event.name for event in record.stages)
    assert "forward: drop_noops skipped by Options.skip" in record.notes


def failing_compilation(
    monkeypatch: pytest.MonkeyPatch, pass_: GraphPass, compile_: Callable[..., Any]
) -> CompileError:
    """What a strict compilation raises with `pass_` in its list."""
    monkeypatch.setattr(pipeline, "POST_GRAD", (pass_,))
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_(torch.relu, strict=True)(torch.randn(3))
    inner = caught.value.inner_exception
    assert isinstance(inner, CompileError)
    return inner


def test_a_wrong_pass_is_named_by_the_compilation_it_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = failing_compilation(monkeypatch, write_in_place, stator.compile)

    assert isinstance(error, VerifyError)
    assert error.stage == "forward/write_in_place"
