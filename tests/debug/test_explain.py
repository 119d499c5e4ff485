"""What an explanation says of a training step, in all its forms."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stator
from stator.core.events import collected_records
from stator.debug.explain import Explanation, watched
from stator.debug.report import histories
from stator.debug.report_kernels import traffic
from tests.debug.reports import text_after

ROWS, WIDTH = 32, 48


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    y = F.layer_norm(x @ weight, (WIDTH,))
    y = torch.softmax(y * 2.0 + 1.0, -1)
    return (y * x.t().t()).sum()


def line_of(text: str) -> str:
    """`file:line` of the line of `normalised` that has `text` in it."""
    lines, first = inspect.getsourcelines(normalised)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if text in line)}"


def step(x: Tensor, weight: Tensor) -> None:
    normalised(x, weight).backward()


def trained(**options: Any) -> Explanation:
    """A training step, called twice so that there is more than one time of each kernel."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    compiled = torch.compile(
        normalised, backend="stator", options={"explain": True, "strict": True, **options}
    )
    with watched() as seen:
        for _ in range(2):
            compiled(x, weight).backward()
    return seen.explanation()


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return trained()


@pytest.fixture(scope="module")
def graph(explanation: Explanation) -> Any:
    (found,) = explanation.to_dict()["graphs"]
    return found


def test_stages_have_times(graph: Any) -> None:
    names = [stage["name"] for stage in graph["stages"]]

    assert [name for name in names if "/" not in name] == ["trace", "partition"]
    assert {"forward/plan", "forward/executor", "backward/plan", "backward/executor"} <= {*names}
    assert all(stage["seconds"] >= 0 for stage in graph["stages"])
    assert graph["seconds"] == pytest.approx(sum(stage["seconds"] for stage in graph["stages"]))


def test_passes_tell_what_they_changed(graph: Any) -> None:
    (joint,) = [history for history in graph["graphs"] if history["name"] == "joint"]
    done = {one["name"]: one for one in joint["passes"]}

    assert done["simplify_views"]["rewrites"], "the two transposes cancel"
    assert done["simplify_views"]["edits"]
    assert done["pad_mm"]["rewrites"] == done["pad_mm"]["edits"] == []
    before, after = text_after(joint, 0), text_after(joint, len(joint["passes"]))
    assert sum("aten.t.default" in line for line in before) > sum(
        "aten.t.default" in line for line in after
    )


def test_edits_lead_from_one_graph_to_the_next() -> None:
    with collected_records() as records:
        trained()
    details = records[0].details
    assert details is not None, "it was asked for"
    built = {history["name"]: history for history in histories(details.passes)}

    for note in details.passes:
        history = built[note.graph]
        number = next(n for n, one in enumerate(history["passes"]) if one["name"] == note.name)
        assert text_after(history, number) == [text for _, text, _ in note.before]
        assert text_after(history, number + 1) == [text for _, text, _ in note.after]


def test_kernels_have_the_lines_of_both_directions(graph: Any) -> None:
    forward, backward = graph["halves"]

    for half in (forward, backward):
        lines = {line for kernel in half["kernels"] for line in kernel["lines"]}
        assert line_of("softmax") in lines, half["name"]
        assert line_of("layer_norm") in lines, half["name"]
        assert all(line.startswith(__file__) for line in lines)
        assert all(kernel["lines"] for kernel in half["kernels"])


def test_kernels_name_the_operators_inside(graph: Any) -> None:
    forward = graph["halves"][0]
    operators = [name for kernel in forward["kernels"] for _, name in kernel["operators"]]

    assert {"aten._softmax.default", "aten.mul.Tensor", "aten.sum.default"} <= {*operators}
    nodes = {line.split(":")[0] for line in text_after(graph["graphs"][-2], 99)}
    assert all(node in nodes for kernel in forward["kernels"] for node, _ in kernel["operators"])


def test_kernels_have_code_and_times(graph: Any) -> None:
    for half in graph["halves"]:
        for kernel in half["kernels"]:
            assert kernel["runs"] == 2
            assert 0 < kernel["least"] <= kernel["seconds"]
            assert kernel["loops"].startswith(f"kernel {kernel['name']}\n")
            assert "define" in half["code"][kernel["code"]]
            assert kernel["name"] in half["steps"][kernel["step"]]


def test_kernels_for_a_gpu_show_what_triton_compiles() -> None:
    pytest.importorskip("triton")
    found = stator.explain(
        torch.nn.functional.gelu, torch.randn(4, 5), options={"codegen": "triton"}
    )
    half = found.data["graphs"][0]["halves"][0]
    assert half["language"] == "Triton"
    assert "tl.load(" in half["code"][0]


def test_bytes_are_those_of_the_tensors() -> None:
    with collected_records() as records:
        compiled = torch.compile(
            lambda x, y: x * 2 + y[0], backend="stator", options={"explain": True}
        )
        compiled(torch.randn(64, 100), torch.randn(7, 100))
    details = records[0].details
    assert details is not None, "it was asked for"
    plan = details.plans["forward"].plan
    (kernel,) = [step.kernel for step in plan.steps if hasattr(step, "kernel")]

    assert traffic(kernel, plan) == {"read": 4 * (64 * 100 + 100), "written": 4 * 64 * 100}


def test_calls_say_why_they_are_no_kernels(graph: Any) -> None:
    calls = [call for half in graph["halves"] for call in half["calls"]]

    assert {call["operator"] for call in calls} == {"aten.mm.default"}
    assert {call["why"] for call in calls} == {"a library does it: loops of ours would be slower"}
    assert {call["function"] for call in calls} == {"aoti_torch_cpu_mm_out"}
    assert all(call["lines"] == [line_of("x @ weight")] for call in calls)


def test_an_operator_without_a_rule_says_so() -> None:
    told = stator.explain(torch.linalg.inv, torch.eye(3))

    (call,) = [one for one in told.to_dict()["graphs"][0]["halves"][0]["calls"] if one["why"]][:1]
    assert call["why"] == "no rule makes loops of it"


def test_neighbours_that_are_not_fused_have_a_reason(graph: Any) -> None:
    forward = graph["halves"][0]
    kernels = {kernel["name"] for kernel in forward["kernels"]}

    assert forward["unfused"]
    for pair in forward["unfused"]:
        assert pair["reason"]
        assert {*pair["kernels"]} - {None} <= kernels
    assert any("aten.mm.default is a call" in pair["reason"] for pair in forward["unfused"])


def test_loops_that_were_refused_have_the_fusers_reason() -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp().sum(0), x.exp()[:5].sum(1)

    told = stator.explain(halves, torch.randn(1000, 300))

    pairs = told.to_dict()["graphs"][0]["halves"][0]["unfused"]
    assert len(pairs) >= 1
    assert all(pair["kernels"][0] != pair["kernels"][1] for pair in pairs)


def test_saved_tensors_are_told(graph: Any) -> None:
    kept = [one for one in graph["saved"] if one["kind"] == "extra"]

    assert {one["kind"] for one in graph["saved"]} == {"primal", "extra"}
    assert {(one["bytes"], one["shape"]) for one in kept} >= {
        (4 * ROWS * WIDTH, f"f32[{ROWS}, {WIDTH}]")
    }
    assert {one["line"] for one in kept} <= {line_of("layer_norm"), line_of("softmax")}


def test_the_memory_plan_is_told(graph: Any) -> None:
    for half in graph["halves"]:
        memory, steps = half["memory"], len(half["steps"])
        assert memory["peak"] > 0
        for one in memory["buffers"]:
            assert 0 <= one["first"] <= one["last"] <= steps
            assert one["offset"] is None or one["offset"] + one["bytes"] <= memory["arena"]


def test_the_text_has_all_parts(explanation: Explanation) -> None:
    text = str(explanation)

    for part in (
        "compiled in",
        "cache: off: Options.cache",
        "stage",
        "simplify_views",
        "saved for the backward",
        "forward:",
        "backward:",
        "why it is no kernel",
        "not fused, because",
        f"{Path(__file__).name}:",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_plans_are_there_one_by_one(explanation: Explanation) -> None:
    plans = explanation.graphs[0].plans

    assert list(plans) == ["forward", "backward"]
    assert "mm = aten.mm.default" in plans["forward"]
    assert "memory: arena of" in plans["forward"]


def test_json_is_the_same_as_the_data(explanation: Explanation, tmp_path: Path) -> None:
    assert json.loads(explanation.json()) == explanation.to_dict()

    assert json.loads(explanation.save(tmp_path / "it.json").read_text()) == explanation.to_dict()
    page = explanation.save(tmp_path / "it.html").read_text()
    assert page == explanation.html()
    assert page.startswith("<!DOCTYPE html>")


def test_the_lines_of_the_program_are_quoted(explanation: Explanation) -> None:
    quoted = explanation.to_dict()["sources"]

    assert quoted[line_of("softmax")] == "y = torch.softmax(y * 2.0 + 1.0, -1)"


def test_a_backward_is_explained_if_the_call_runs_one() -> None:
    x, weight = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))

    alone = stator.explain(normalised, x, weight)
    both = stator.explain(step, x, weight)

    assert [half["name"] for half in alone.to_dict()["graphs"][0]["halves"]] == ["forward"]
    assert list(both.graphs[0].plans) == ["forward", "backward"]


def test_an_explanation_takes_options_and_keywords() -> None:
    told = stator.explain(torch.add, torch.ones(4), other=torch.ones(4), options={"kernels": False})

    (graph,) = told.to_dict()["graphs"]
    (half,) = graph["halves"]
    assert half["kernels"] == []
    assert half["calls"][0]["why"] == "nothing of this graph became kernels"


def test_a_program_in_the_cache_is_a_hit_and_explained_all_the_same(tmp_path: Path) -> None:
    options = {"cache": True, "cache_dir": str(tmp_path)}
    x = torch.randn(16, 16)

    def squared(x: Tensor) -> Tensor:
        return x * x + 1

    first = stator.explain(squared, x, options=options)
    torch._dynamo.reset()
    torch.compile(squared, backend="stator", options=options)(x)  # an explained one is not kept
    torch._dynamo.reset()
    second = stator.explain(squared, x, options=options)

    assert first.to_dict()["graphs"][0]["cache"].startswith("miss")
    assert second.to_dict()["graphs"][0]["cache"] == "hit"
    assert second.graphs[0].kernels
    assert "cache: hit, but compiled anew" in str(second)


def test_what_dynamo_leaves_to_eager_is_told_with_its_reason() -> None:
    network = torch.nn.LSTM(4, 4)

    def networked(x: Tensor) -> Tensor:
        outputs, _ = network(x)
        return outputs

    told = stator.explain(networked, torch.randn(3, 2, 4))
    (left,) = told.to_dict()["uncaptured"]
    assert left["function"] == "networked"
    assert left["line"].startswith(__file__)
    assert "allow_rnn=True" in left["reason"]
    assert "left to eager: networked" in str(told)


def test_compiling_again_has_the_guards_reason() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with watched() as seen:
        compiled = torch.compile(
            doubled, backend="stator", dynamic=False, options={"explain": True}
        )
        for size in (3, 5):
            compiled(torch.ones(size))

    told = seen.explanation()
    (again,) = told.to_dict()["recompilations"]
    assert again["function"] == "doubled"
    assert "size mismatch at index 0. expected 3, actual 5" in again["reason"]
    assert len(told.graphs) == 2
    assert "compiled again: doubled" in str(told)


def test_nothing_is_noted_unless_asked_for() -> None:
    with collected_records() as records:
        torch.compile(lambda x: x.exp() + 1, backend="stator")(torch.ones(3))

    assert [record.details for record in records] == [None]


def test_an_explained_program_computes_the_same() -> None:
    x, weight = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))
    compiled = torch.compile(normalised, backend="stator", options={"explain": True})

    assert torch.allclose(compiled(x, weight), normalised(x, weight), rtol=1e-4)


def test_a_graph_left_to_eager_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("stator.aot.compile.trace", broken)
    with pytest.warns(UserWarning, match="broken on purpose"):
        told = stator.explain(torch.exp, torch.ones(3))

    assert "broken on purpose" in told.to_dict()["graphs"][0]["fallback"]
    assert "runs in eager mode" in str(told)
