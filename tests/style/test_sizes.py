"""Files, functions and signatures stay small enough to read."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests.style.tree import code_files, parsed, shown

FILE_LINES: Final = 600
LIMITS: Final = {"lines": 60, "parameters": 6}
ALLOW_LIST: Final = Path(__file__).with_name("allow_list.txt")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below `tree`, methods and nested ones too, with its qualified name."""
    for child in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        yield from functions(child, inner)


def measure(function: Function) -> dict[str, int]:
    """Lines from `def` to the end, and parameters by name, the receiver aside."""
    arguments = function.args
    named = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    assert function.end_lineno is not None, "ast.parse always sets end_lineno"
    return {
        "lines": function.end_lineno - function.lineno + 1,
        "parameters": len([name for name in named if name not in ("self", "cls")]),
    }


def offences(tree: ast.Module, path: str) -> dict[str, int]:
    """`path::name kind` of every broken limit, with what was measured."""
    found = {}
    for name, function in functions(tree):
        for kind, value in measure(function).items():
            if value > LIMITS[kind]:
                found[f"{path}::{name} {kind}"] = value
    return found


def allowed() -> dict[str, int]:
    """The allow-list: the same keys, with the value each may have."""
    entries = {}
    for line in ALLOW_LIST.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            entries[key] = int(value)
    return entries


@pytest.mark.parametrize("path", code_files(), ids=shown)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())

    assert lines <= FILE_LINES, f"split {shown(path)} by theme"


def test_functions_are_short_and_take_few_parameters() -> None:
    found: dict[str, int] = {}
    for path in code_files():
        found |= offences(parsed(path), shown(path))

    assert found == allowed()


def test_a_long_function_and_a_wide_signature_are_found() -> None:
    body = "\n".join(["        pass"] * 60)
    tree = ast.parse(f"class A:\n    def long(self, a, b, *, c, d, e, f, g):\n{body}\n")

    assert offences(tree, "a.py") == {"a.py::A.long lines": 61, "a.py::A.long parameters": 7}
