"""Compilers that help to find a fault, and backends that run them, gradients included.

A compiler takes a graph and its inputs, and returns a function whose arguments come in a list:

    torch.compile(model, backend=stator.backend_of(stator.print_compile))
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from stator.aot.compile import compile_flat
from stator.aot.graphs import CompiledGraph
from stator.core.events import start_compilation
from stator.core.fallback import note_fallback
from stator.core.torch_types import Boxed
from stator.debug.checks import CheckingInterpreter
from stator.debug.saved import fresh_folder, save_graph
from stator.debug.torchscript import boxed, ts_compile
from stator.errors import StatorError
from stator.graph.capture import GraphRunner, attribute_tensors
from stator.graph.run import Ctx
from stator.options import Options, read_options
from stator.pipeline import make_tools
from stator.torch_api import fake_inputs

Compiler: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Boxed]
Backend: TypeAlias = Callable[..., Callable[..., Any]]

FOLDER: Final = "stator_debug"  # where graphs are saved, below the working directory

_SNIPPET: Final = '''"""Shrinks the graph beside this file to what still fails.

Put in `fails` what you look for.
"""

import sys
from pathlib import Path

import stator
from stator.debug.differs import differs

FOLDER = Path({folder!r})


def fails(graph, inputs):
    """Whether TorchScript raises, or is wrong, where eager is right."""
    return differs(graph, inputs, stator.ts_compile)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    graph, inputs = __import__(FOLDER.name).load()
    if not fails(graph, inputs):
        print("this graph does not fail: change `fails` to what you look for")
    else:
        small, inputs = stator.minifier(graph, inputs, fails)
        print(small.code)
'''


def nop(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
    """Run the graph as it is."""
    return boxed(fx_g)


def print_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
    """Print the graph's code, and run the graph as it is."""
    print(fx_g.print_readable(print_output=False))
    return boxed(fx_g)


def check_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
    """Run the graph node by node, each result held against what is noted of it."""
    return boxed(lambda *arguments: CheckingInterpreter(fx_g).run(*arguments))


def draw_compile(folder: str | Path) -> Compiler:
    """A compiler that draws each graph into `folder`, and runs it as it is."""

    def compiler(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = 0
        while (file := Path(folder) / f"graph_{number}.dot").exists():
            number += 1
        draw_graph(fx_g, file)
        return boxed(fx_g)

    return compiler


def dump_compile(folder: str | Path) -> Compiler:
    """A compiler that saves each graph with its inputs into `folder`, and runs it as it is."""

    def compiler(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
        save_graph(fx_g, inps, fresh_folder(Path(folder)))
        return boxed(fx_g)

    return compiler


def debug_compile(
    fx_g: fx.GraphModule, inps: Sequence[Any], folder: str | Path | None = None
) -> Boxed:
    """Save the graph with its inputs, say how to minimise it, and compile it with `ts_compile`.

    It goes to a new folder below `folder`, as Python that can be imported; the script `minify.py`
    in there shrinks it to what still fails.
    """
    home = fresh_folder(Path(FOLDER if folder is None else folder).resolve())
    save_graph(fx_g, inps, home)
    script = home / "minify.py"
    script.write_text(_SNIPPET.format(folder=str(home)), encoding="utf-8")
    count = sum(node.op == "call_function" for node in fx_g.graph.nodes)
    print(f"stator: a graph of {count} calls is saved in {home}")
    print(f"stator: to minimise it, run: {sys.executable} {script}")
    return ts_compile(fx_g, inps)


def draw_graph(fx_g: fx.GraphModule, file: str | Path) -> Path:
    """Draw the graph into `file`: DOT text, or by Graphviz what its ending says (.svg, .png, …)."""
    file = Path(file)
    text = dot_text(fx_g.graph)
    if file.suffix == ".dot":
        file.write_text(text, encoding="utf-8")
        return file
    program = shutil.which("dot")
    if program is None:
        raise StatorError(
            f"no Graphviz to draw {file.name} with", hint="install it, or name a file *.dot"
        )
    command = [program, f"-T{file.suffix.removeprefix('.')}", "-o", str(file)]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise StatorError(f"Graphviz did not draw {file.name}: {done.stderr.strip()}")
    return file


def dot_text(graph: fx.Graph) -> str:
    """The graph in Graphviz's language: a box a node, an arrow from each value to its readers."""
    lines = ["digraph {", '  node [shape=box, fontname="monospace"];']
    for node in graph.nodes:
        label = "\\n".join((node.name, f"{node.op} {_called(node)}".strip(), *_shown(node)))
        quoted = label.replace('"', "'")
        lines.append(f'  "{node.name}" [label="{quoted}"];')
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def _called(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _shown(node: fx.Node) -> list[str]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    sizes = ", ".join(map(str, value.size()))
    return [f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"]


# ---------------------------------------------------------------------------------------------
# Backends


def backend_of(compiler: Compiler) -> Backend:
    """A backend of torch.compile that traces as Stator does, and has `compiler` run the graphs.

    Each graph is compiled when it first runs, so that the compiler sees its real inputs.  A graph
    that it fails on runs as it is, with a warning; under `Options.strict` it raises.
    """

    def backend(
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | Options | None = None,
    ) -> Callable[..., Any]:
        chosen = replace(read_options(None, options), kernels=False, cache=False)
        return _traced(module, inputs, compiler, chosen)

    return backend


def stator_ts(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that runs graphs through TorchScript."""
    return backend_of(ts_compile)(module, inputs, options=options)


def stator_debug(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that saves each graph, then scripts it; `Options.dump_dir` says where."""
    folder = read_options(None, options).dump_dir

    def compiler(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Boxed:
        return debug_compile(fx_g, inps, folder)

    return backend_of(compiler)(module, inputs, options=options)


def stator_eager(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that traces as Stator does, and lets torch run the graphs."""
    return backend_of(nop)(module, inputs, options=options)


@dataclass(slots=True)
class _AtFirstCall:
    """A graph that is compiled for its first arguments."""

    module: fx.GraphModule
    compiler: Compiler
    ctx: Ctx
    compiled: Boxed | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        if self.compiled is None:
            try:
                self.compiled = self.compiler(self.module, list(arguments))
            except Exception as error:
                note_fallback(error, self.ctx.record, self.ctx.options.strict)
                self.compiled = boxed(self.module)
        return self.compiled(arguments)


def _traced(
    module: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, options: Options
) -> Callable[..., Any]:
    """The captured graph: traced, cut in two, each half left to the compiler."""
    lifted = attribute_tensors(module)
    fakes, mode = fake_inputs(inputs)
    fakes += [mode.from_tensor(tensor, static_shapes=True) for tensor in lifted.values()]
    tools = make_tools(options, start_compilation())

    def compile_graph(half: fx.GraphModule, name: str) -> CompiledGraph:
        return CompiledGraph(_AtFirstCall(half, compiler, tools.ctx))

    program = GraphRunner(module, list(lifted))
    call = compile_flat(program, fakes, mode, replace(tools, compile_graph=compile_graph))
    constants = tuple(lifted.values())
    (output,) = module.graph.find_nodes(op="output")
    single = not isinstance(output.args[0], tuple | list)

    def as_captured(*arguments: Any) -> Any:
        outputs = call(*arguments, *constants)
        return outputs[0] if single else outputs

    return as_captured
