"""A graph as a folder of importable Python, its tensors and its inputs beside it.

    from my_graph import load
    graph, inputs = load()

`graph` is an fx.GraphModule again, node by node as it was saved.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from stator.errors import StatorError
from stator.graph.capture import attribute_tensors
from stator.graph.compare import example_inputs
from stator.torch_api import is_fake, unset_fake_temporarily

_LOAD: Final = '''

def load():
    """The graph as an fx.GraphModule, and the inputs that it was saved with."""
    folder = Path(__file__).parent
    module = Graph()
    module.load_state(torch.load(folder / "tensors.pt", weights_only=False))
    return recorded(module), torch.load(folder / "inputs.pt", weights_only=False)
'''
_STATE: Final = '''
    def load_state(self, attributes):
        """Tensors and modules that the graph reads from itself."""
        for path, value in attributes.items():
            *folders, name = path.split(".")
            owner = self
            for folder in folders:
                if not hasattr(owner, folder):
                    setattr(owner, folder, torch.nn.Module())
                owner = getattr(owner, folder)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                owner.register_buffer(name, value)
            else:
                setattr(owner, name, value)
'''


def save_graph(fx_g: fx.GraphModule, inputs: Sequence[Any], folder: Path) -> None:
    """Write the graph, its tensors and its inputs to `folder`, which must not exist.

    Of fake inputs, others of the same kinds are made up.
    """
    text = module_text(fx_g)
    real = example_inputs(fx_g.graph, ()) if any(map(_is_fake, inputs)) else list(inputs)
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text, encoding="utf-8")
    with unset_fake_temporarily():
        torch.save(_attributes(fx_g), folder / "tensors.pt")
        torch.save([_detached(value) for value in real], folder / "inputs.pt")


def recorded(module: torch.nn.Module) -> fx.GraphModule:
    """The module's code as a graph, one node for each call that stands there.

    fx.symbolic_trace would execute the calls that take no argument of the graph, such as `full` or
    `rand`, and keep what they returned.
    """
    tracer = fx.Tracer()

    class EveryCall(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.device:  # a constant, for all that it is called
                return func(*args, **(kwargs or {}))
            return tracer.create_proxy("call_function", func, args, kwargs or {})

    with EveryCall():
        graph = tracer.trace(module)
    return fx.GraphModule(module, graph, "Graph")


def fresh_folder(parent: Path, name: str = "graph") -> Path:
    """The first of `parent`/graph_0, graph_1, … that does not exist."""
    number = 0
    while (parent / f"{name}_{number}").exists():
        number += 1
    return parent / f"{name}_{number}"


def module_text(fx_g: fx.GraphModule) -> str:
    """Python that defines a module `Graph` with the graph's code, and `load`."""
    code = untyped(fx_g.graph).python_code("self")
    body = code.src.strip("\n").removeprefix("def forward(")
    lines = ["from pathlib import Path", "", "import torch", *imports(_used(code))]
    lines += ["", "from stator.debug.saved import recorded", ""]
    text = "\n".join(lines) + "\n\nclass Graph(torch.nn.Module):\n" + _STATE.removeprefix("\n")
    method = ("def forward(" + body.strip()).splitlines()
    return text + "\n" + "\n".join(f"    {line}".rstrip() for line in method) + "\n" + _LOAD


def untyped(graph: fx.Graph) -> fx.Graph:
    """A copy without annotations: some are words that mean something to their author alone."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in copied.nodes:
        node.type = None
    return copied


def _used(code: Any) -> dict[str, Any]:
    """The names that generated code mentions; it comes with more."""
    words = set(re.findall(r"\b[A-Za-z_]\w*\b", code.src))
    return {name: value for name, value in code.globals.items() if name in words}


def imports(names: Mapping[str, Any]) -> Iterator[str]:
    """A line for each object that generated code calls by name."""
    for name, value in sorted(names.items()):
        if name == "torch":
            continue
        if isinstance(value, float):
            yield f'{name} = float("{value}")'
        elif isinstance(value, types.ModuleType):
            plain = value.__name__ == name
            yield f"import {name}" if plain else f"import {value.__name__} as {name}"
        elif value is type(None):
            yield f"{name} = type(None)"
        else:
            yield _imported(name, value)


def _imported(name: str, value: Any) -> str:
    """An import of a function or class; refused where none would find it again."""
    home, called = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found: Any = importlib.import_module(home) if home else None
    for part in called.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise StatorError(
            f"{value!r} cannot be imported, so a graph that calls it cannot be saved",
            hint="define it at the top of a module, or register it as an operator (torch.library)",
        )
    first, *rest = called.split(".")
    if not rest:
        return f"from {home} import {first}" + ("" if first == name else f" as {name}")
    return f"import {home}\n{name} = {home}.{called}"


def _attributes(fx_g: fx.GraphModule) -> dict[str, Any]:
    """Tensors and modules that the graph reads, by their paths."""
    found: dict[str, Any] = dict(attribute_tensors(fx_g))
    for node in fx_g.graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target not in found:
            value: Any = fx_g
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[str(node.target)] = value
    return found


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat) or (
        isinstance(value, torch.Tensor) and is_fake(value)
    )


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
