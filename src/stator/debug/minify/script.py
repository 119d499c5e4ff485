"""A case as one Python file that runs on its own, its tensors made there or stored beside it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from stator.debug.minify.case import Case, as_module, case_of
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How, judge
from stator.debug.minify.record import copy_of
from stator.debug.saved import imports, recorded, untyped

TENSORS: Final = "tensors.pt"

_END: Final = """

if __name__ == "__main__":
    replay(Graph(), inputs(), FAILURE, HOW)
"""


@dataclass(frozen=True, slots=True)
class Made:
    """How an input is made where its values do not matter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    requires_grad: bool = False

    def __str__(self) -> str:
        end = ", requires_grad=True" if self.requires_grad else ""
        return f"made({self.size}, {self.stride}, {self.dtype}, seed={self.seed}{end})"


def made(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int,
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor of numbers that follow from the seed; whole ones are 0 or 1, fit for an index."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(size, generator=generator).to(dtype)
    else:
        values = torch.randint(0, 2, tuple(size), generator=generator).to(dtype)
    reach = 1 + sum(max(0, n - 1) * s for n, s in zip(size, stride, strict=True))
    result = torch.zeros(max(1, reach), dtype=dtype).as_strided(tuple(size), tuple(stride))
    if 0 in stride:  # several elements in one place: one of them is it
        firsts = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)
        result[firsts] = values[firsts]
    else:
        result.copy_(values)
    return result.requires_grad_(requires_grad)


def made_like(value: torch.Tensor, seed: int) -> Made:
    """The way to make a tensor that lies like `value`."""
    size, stride = tuple(value.size()), tuple(value.stride())
    return Made(size, stride, value.dtype, seed, value.requires_grad)


def write_script(
    folder: Path, case: Case, failure: Failure, how: How, ways: Mapping[int, Made] | None = None
) -> Path:
    """Write `repro.py` and, if some inputs are stored, their file; `ways`: those that are made."""
    folder.mkdir(parents=True, exist_ok=True)
    ways = ways or {}
    stored: dict[str, torch.Tensor] = {}
    lines = []
    for number, (node, value) in enumerate(zip(case.placeholders, case.inputs, strict=True)):
        if number in ways:
            lines.append(str(ways[number]))
        elif isinstance(value, torch.Tensor):
            stored[node.name] = value
            lines.append(f'tensors["{node.name}"]')
        else:
            lines.append(repr(value))
    file = folder / "repro.py"
    tensors = folder / TENSORS
    if stored:
        torch.save({name: copy_of(value) for name, value in stored.items()}, tensors)
    else:
        tensors.unlink(missing_ok=True)
    file.write_text(script_text(case, failure, how, lines, stored), encoding="utf-8")
    return file


def script_text(
    case: Case, failure: Failure, how: How, inputs: Sequence[str], stored: Collection[str]
) -> str:
    """The text of a script."""
    code = untyped(case.graph).python_code("self")
    words = set(re.findall(r"\b[A-Za-z_]\w*\b", code.src))
    used = {name: value for name, value in code.globals.items() if name in words}
    # Without the `; x = None` by which generated code frees memory.
    method = [re.sub(r";  [\w =]+ = None$", "", line) for line in code.src.strip("\n").splitlines()]
    heading = f'"""Stator fails on this graph: {_plain(str(failure))}."""'
    parts = [heading, "", *(["from pathlib import Path", ""] if stored else [])]
    parts += [
        "import torch",
        *imports(used),
        "",
        "from stator.debug.minify.script import made, replay",
        "",
    ]
    parts += [f"FAILURE = {failure.stored()!r}"]
    parts += [f"HOW = {{'options': {dict(how.options)!r}, 'dynamic': {how.dynamic}}}", "", ""]
    parts += ["class Graph(torch.nn.Module):", *(f"    {line}".rstrip() for line in method), "", ""]
    parts += ["def inputs():"]
    if stored:
        load = f'torch.load(Path(__file__).with_name("{TENSORS}"), weights_only=True)'
        parts += [f"    tensors = {load}"]
    parts += ["    return [", *(f"        {line}," for line in inputs), "    ]"]
    return "\n".join(parts) + "\n" + _END


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'").partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Scripted:
    """What a script holds."""

    case: Case
    failure: Failure
    how: How


def read_script(file: Path) -> Scripted:
    """The case of a script, which is executed for that."""
    names = runpy.run_path(str(file), run_name="repro")
    case = traced(names["Graph"](), names["inputs"]())
    return Scripted(case, Failure.read(names["FAILURE"]), How(**names["HOW"]))


def traced(module: torch.nn.Module, inputs: Sequence[Any]) -> Case:
    """A script's module as a case, one node for each call that is written there."""
    graph = recorded(module)
    return case_of(as_module(graph, graph.graph), inputs)


def replay(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    failure: Mapping[str, Any],
    how: Mapping[str, Any],
) -> None:
    """Compile a script's graph as it was when it failed, and exit with 1 if it fails still."""
    case, wanted = traced(module, inputs), Failure.read(failure)
    found = judge(case, How(**how))
    for one in found:
        print(one)
    if not found:
        print(f"it runs well; it was: {wanted}")
    raise SystemExit(1 if found else 0)
