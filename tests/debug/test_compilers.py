"""Compilers for finding faults: what they compute, what they write, and that it runs elsewhere."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import stator
from stator.debug.checks import CheckingInterpreter
from stator.debug.differs import differs
from stator.debug.saved import fresh_folder, save_graph
from stator.debug.torchscript import scriptable
from stator.errors import CompileError, StatorError, StatorWarning
from stator.torch_api import make_fx

BACKENDS = ("stator_ts", "stator_debug", "stator_eager")


class Layers(nn.Module):
    """A product, batch statistics, masks, casts and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.product(x)))
        y = y.masked_fill(y > 1, float("inf")).clamp(max=2.0)
        return F.dropout(y, 0.25).to(torch.bfloat16).float()


def step(model: Callable[[Tensor], Tensor], layers: Layers) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()
    layers.zero_grad()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_train(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    layers, own = Layers(), Layers()
    own.load_state_dict(layers.state_dict())
    compiled = torch.compile(own, backend=backend, options={"strict": True})

    for got, wanted in zip(step(compiled, own), step(layers, layers), strict=True):
        torch.testing.assert_close(got, wanted)
    assert own.norm.num_batches_tracked == 1  # running once on inputs is running on copies
    torch.testing.assert_close(own.norm.running_mean, layers.norm.running_mean)
    saved = sorted(path.name for path in tmp_path.glob("stator_debug/*"))
    assert saved == (["graph_0", "graph_1"] if backend == "stator_debug" else [])


def test_backends_take_symbolic_sizes() -> None:
    def function(x: Tensor) -> Tensor:
        return x.reshape(-1) * x.size(0) + torch.zeros(x.numel())

    for compiler in (stator.ts_compile, stator.check_compile):
        torch._dynamo.reset()
        backend = stator.backend_of(compiler)
        compiled = torch.compile(function, backend=backend, dynamic=True, options={"strict": True})
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), function(x))


def graph_of(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    found: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    return found


def mixed(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts that change nothing and some that do, devices, infinities, an update of an input."""
    n.add_(1)
    made = torch.full((3,), float("-inf"), device=x.device)
    return x.to(torch.float64) + n, torch.maximum(x, made), x.to(x.dtype, copy=True)


def test_ts_compile_computes_what_the_graph_does() -> None:
    x, n = torch.randn(2, 3), torch.zeros(3)
    graph = graph_of(mixed, x, n)
    before = graph.code

    run = stator.ts_compile(graph, [x, n])

    assert graph.code == before
    assert torch.equal(n, torch.zeros(3))  # the run to warm up was on copies
    arguments = [x, n]
    wide, higher, copy = run(arguments)
    assert arguments == []
    torch.testing.assert_close((wide, higher, copy), mixed(x, torch.zeros(3)))
    assert copy.data_ptr() != x.data_ptr()
    assert torch.equal(n, torch.ones(3))


def test_ts_compile_spells_operators_without_overloads() -> None:
    graph = graph_of(lambda x: torch.relu(x).to(torch.float64), torch.randn(3))
    spelled = [str(node.target) for node in scriptable(graph).graph.nodes]
    assert "aten.relu" in spelled
    assert "aten.to" in spelled


def collected(x: Tensor) -> Any:
    return {*x}  # a set: no type of TorchScript's


def test_ts_compile_says_what_it_cannot_do() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(collected, (graph.placeholder("x"),)))
    with pytest.raises(CompileError, match="torchscript"):
        stator.ts_compile(fx.GraphModule(nn.Module(), graph), [torch.ones(2)])


def test_a_graph_that_a_compiler_fails_on_runs_as_it_is() -> None:
    def broken(graph: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("not today")

    compiled = torch.compile(lambda x: x + 1, backend=stator.backend_of(broken))
    with pytest.warns(StatorWarning, match="not today"):
        assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def drawn(x: Tensor) -> Tensor:
    return x + torch.rand(3) * torch.full((3,), 2.0)


def run_python(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_saved_graph_is_read_in_another_process(tmp_path: Path) -> None:
    graph = graph_of(drawn, torch.randn(3))
    save_graph(graph, [torch.ones(3)], tmp_path / "mine")
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    script = (
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r}); import mine\n"
        "graph, inputs = mine.load(); torch.manual_seed(3); print(graph(*inputs).tolist())\n"
        "print([str(n.target) for n in graph.graph.nodes if n.op == 'call_function'])"
    )
    values, targets = run_python("-c", script).splitlines()

    torch.manual_seed(3)
    assert values == str(drawn(torch.ones(3)).tolist())
    assert targets == str(names)


def test_a_saved_graph_keeps_its_tensors_and_modules(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    graph = fx.symbolic_trace(layers)
    save_graph(graph, [torch.ones(2, 3)], tmp_path / "layers_0")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import layers_0\n"
        "graph, inputs = layers_0.load(); print(graph(*inputs).tolist())"
    )
    assert run_python("-c", script).strip() == str(layers(torch.ones(2, 3)).tolist())


def test_what_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    def local(x: Tensor) -> Tensor:
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(local, (graph.placeholder("x"),)))
    with pytest.raises(StatorError, match="cannot be imported"):
        save_graph(fx.GraphModule(nn.Module(), graph), [torch.ones(1)], tmp_path / "graph")
    assert not (tmp_path / "graph").exists()


def test_debug_compile_leaves_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "graph_0").write_text("mine")
    assert fresh_folder(tmp_path) == tmp_path / "graph_1"
    graph = graph_of(torch.relu, torch.randn(3))
    stator.debug_compile(graph, [torch.ones(3)], tmp_path)
    stator.debug_compile(graph, [torch.ones(3)], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph_0", "graph_1", "graph_2"]
    assert (tmp_path / "graph_0").read_text() == "mine"


def test_the_printed_command_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(lambda x: torch.relu(x).exp().sin() + 1, torch.randn(3))
    run = stator.debug_compile(graph, [torch.ones(3)], tmp_path)
    torch.testing.assert_close(run([torch.ones(3)]), graph(torch.ones(3)))

    (command,) = (line for line in capsys.readouterr().out.splitlines() if " run: " in line)
    script = command.split(" run: ")[1].removeprefix(f"{sys.executable} ")
    assert "does not fail" in run_python(script)

    # The same for something that does fail: what the user puts in the place of `fails`.
    text = Path(script).read_text()
    fault = "any(n.target is torch.ops.aten.sin.default for n in graph.graph.nodes)"
    Path(script).write_text(
        text.replace("differs(graph, inputs, stator.ts_compile)", fault).replace(
            "import stator\n", "import stator\nimport torch\n"
        )
    )
    told = run_python(script)
    assert "aten.sin" in told
    assert "aten.relu" not in told


def test_what_differs_is_told_from_what_does_not() -> None:
    graph = graph_of(lambda x: torch.softmax(x, -1).bfloat16(), torch.randn(4, 8))
    x = [torch.randn(4, 8)]

    def off(module: fx.GraphModule, inputs: Any) -> Any:
        return lambda arguments: module(*arguments) * 1.02

    def broken(module: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("broken")

    assert not differs(graph, x, stator.nop)
    assert not differs(graph, x, stator.ts_compile)
    assert differs(graph, x, off)
    assert differs(graph, x, broken)


def test_print_and_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(lambda x: torch.relu(x) + 1, torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(stator.print_compile(graph, [x])([x]), graph(x))
    assert "aten.relu" in capsys.readouterr().out
    assert torch.equal(stator.draw_compile(tmp_path)(graph, [x])([x]), graph(x))
    text = (tmp_path / "graph_0.dot").read_text()
    assert '"relu" -> "add";' in text
    assert "float32[3]" in text
    assert torch.equal(stator.dump_compile(tmp_path)(graph, [x])([x]), graph(x))
    assert (tmp_path / "graph_0" / "inputs.pt").exists()


def test_drawing_a_picture_takes_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    graph = graph_of(torch.relu, torch.randn(3))
    with pytest.raises(StatorError, match="Graphviz"):
        stator.draw_graph(graph, tmp_path / "graph.svg")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y: y.double(), "type torch.float64, foreseen torch.float32"),
        (lambda y: y[:1], r"size \(1, 3\), foreseen \(2, 3\)"),
        (lambda y: y.t().contiguous().t(), r"strides \(1, 2\), foreseen \(3, 1\)"),
        (lambda y: [y], "list where a tensor was foreseen"),
    ],
)
def test_the_checking_interpreter_names_the_node(
    change: Callable[[Tensor], Any], told: str
) -> None:
    graph = graph_of(lambda x: torch.relu(x) + 1, torch.randn(2, 3))
    (node,) = (n for n in graph.graph.nodes if n.name == "relu")
    node.meta["stack_trace"] = 'File "model.py", line 7, in forward'
    x = torch.randn(2, 3)
    assert torch.equal(CheckingInterpreter(graph).run(x), graph(x))

    node.target = lambda x: change(torch.relu(x))
    with pytest.raises(StatorError, match=f"(?s)relu = .*{told}.*model.py:7"):
        CheckingInterpreter(graph).run(x)


def test_strides_that_do_not_matter_are_not_compared() -> None:
    graph = graph_of(torch.relu, torch.randn(1, 3))
    x = torch.randn(3).as_strided((1, 3), (77, 1))
    CheckingInterpreter(graph).run(x)


def test_no_warning_of_torchscript_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stator.ts_compile(graph_of(torch.relu, torch.randn(3)), [torch.ones(3)])
