"""What a module of the package may import, and what it may never touch."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.style.names import module_name, references, strings
from tests.style.tree import PACKAGE, package_files, parsed, shown

# Imports point one way: a part may import the parts on the lines above its own, no others.
# Parts on one line do not see each other.
LAYERS: Final[tuple[tuple[str, ...], ...]] = (
    ("core",),
    ("loops",),
    ("ops",),
    ("graph",),
    ("rules", "passes", "aot"),
    ("lower",),
    ("schedule",),
    ("codegen",),
    ("runtime",),
    ("cache",),
    ("package",),
    ("pipeline",),
    ("stored",),
    # With Dynamo, without it, for writers of passes, for those who trace themselves, for servers.
    ("backend", "freezing", "functions", "patterns", "partitioners", "ahead"),
    ("eager_ops",),
)
LEAVES: Final = ("errors", "options", "torch_api")  # anyone may import them; they import each other
DOORS: Final = ("__init__", "__main__", "cli", "debug")  # see everything; nothing else imports them

# The compilers whose job this package does itself, and the doors through which they are reached.
RIVALS: Final = (
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch._functorch.partitioners",
    "torch._functorch.compilers",
    "torch._functorch.fx_minifier",
    "torch._dynamo.backends.common.aot_autograd",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.inductor",
    "functorch.compile",
)
PRIVATE: Final = re.compile(r"(?:torch|functorch)\b.*\._(?!_)")
ENVIRONMENT: Final = re.compile(r"os\.(?:environb?|getenvb?|putenv|unsetenv)\b")

each_file = pytest.mark.parametrize("path", package_files(), ids=shown)


def part_of(name: str) -> str:
    """The folder or root module of the package that the dotted name `stator.…` falls into."""
    pieces = name.split(".")
    part = pieces[1] if len(pieces) > 1 else "__init__"
    exists = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
    return part if exists else "__init__"  # a name that the package itself offers


def may_import(part: str) -> set[str]:
    """The other parts that `part` may import."""
    if part in LEAVES:
        return set(LEAVES)
    below = set(LEAVES)
    for layer in LAYERS:
        if part in layer:
            return below
        below.update(layer)
    assert part in DOORS, f"give {part} its place in LAYERS"
    return below | set(DOORS)


def wrong_imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Each import of another part against the direction."""
    part = part_of(module)
    for reference in references(tree, module):
        if re.match(r"stator(\.|$)", reference.name):
            other = part_of(reference.name)
            if other != part and other not in may_import(part):
                yield f"line {reference.line}: {part} imports {other} ({reference.name})"


def is_rival(name: str) -> bool:
    """Does the dotted name lie in a rival?"""
    return any(name == rival or name.startswith(f"{rival}.") for rival in RIVALS)


def rivals_touched(tree: ast.Module, module: str) -> Iterator[str]:
    """Each use of a rival: imported, reached by attribute, or spelled out in a string."""
    for reference in references(tree, module):
        if is_rival(reference.name):
            yield f"line {reference.line}: {reference.name}"
    for string in strings(tree):
        if any(rival in string.name for rival in RIVALS):
            yield f"line {string.line}: {string.name!r}"


def private_names(tree: ast.Module, module: str) -> Iterator[str]:
    """Each private name of torch: imported, reached by attribute, or the whole of a string."""
    for reference in [*references(tree, module), *strings(tree)]:
        if PRIVATE.match(reference.name) and " " not in reference.name:
            yield f"line {reference.line}: {reference.name}"


def environment_uses(tree: ast.Module, module: str) -> Iterator[str]:
    """Each touch of the process's environment."""
    for reference in references(tree, module):
        if ENVIRONMENT.match(reference.name):
            yield f"line {reference.line}: {reference.name}"


@each_file
def test_imports_point_one_way(path: Path) -> None:
    assert list(wrong_imports(parsed(path), module_name(path))) == []


@each_file
def test_no_rival_is_touched(path: Path) -> None:
    assert list(rivals_touched(parsed(path), module_name(path))) == []


@each_file
def test_private_torch_names_stay_in_torch_api(path: Path) -> None:
    if path != PACKAGE / "torch_api.py":
        assert list(private_names(parsed(path), module_name(path))) == []


@each_file
def test_environment_is_read_in_options_alone(path: Path) -> None:
    if path != PACKAGE / "options.py":
        assert list(environment_uses(parsed(path), module_name(path))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._functorch.partitioners",
        "from torch._functorch import aot_autograd",
        "import torch\ndef f(): torch._inductor.compile(f)",
        "from torch import _inductor as quick",
        "import importlib\nimportlib.import_module('torch._inductor.compile_fx')",
        "from functorch.compile import aot_function",
    ],
)
def test_each_way_to_a_rival_is_found(source: str) -> None:
    assert list(rivals_touched(ast.parse(source), "stator.backend"))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch.utils import _pytree as tree",
        "import torch.utils as u\nu._pytree.tree_map(f, x)",
        "import torch\ngetattr(torch, '_C')",
        "from torch import Tensor\nTensor._make_subclass(Tensor, x)",
        "__import__('torch._dynamo')",
    ],
)
def test_each_way_to_a_private_name_is_found(source: str) -> None:
    assert list(private_names(ast.parse(source), "stator.backend"))


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.fx.Graph()", "import torch\nx.__class__", "a._b = 'torch._c is'"],
)
def test_public_names_and_our_own_are_not(source: str) -> None:
    assert list(private_names(ast.parse(source), "stator.backend")) == []


@pytest.mark.parametrize("source", ["import os\nos.environ['A']", "from os import getenv"])
def test_each_way_to_the_environment_is_found(source: str) -> None:
    assert list(environment_uses(ast.parse(source), "stator.backend"))


def test_leaves_see_only_leaves_and_layers_only_what_is_below() -> None:
    assert may_import("errors") == set(LEAVES)
    assert may_import("core") == set(LEAVES)
    assert may_import("aot") == {*LEAVES, "core", "loops", "ops", "graph"}
    assert "pipeline" in may_import("backend")
    assert "debug" not in may_import("backend")
