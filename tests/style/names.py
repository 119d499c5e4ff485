"""Which module or attribute each piece of a Python file refers to, as far as its imports tell."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.style.tree import PACKAGE


@dataclass(frozen=True, slots=True)
class Reference:
    """One dotted name that a file reaches, and the line where it does."""

    name: str
    line: int


def module_name(path: Path) -> str:
    """The dotted name of a file of the package; a folder's `__init__` keeps that last part."""
    return ".".join(("stator", *path.relative_to(PACKAGE).with_suffix("").parts))


def imported(tree: ast.Module, module: str) -> Iterator[tuple[str, Reference]]:
    """What each import binds, wherever it stands: the local name, and what it refers to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds `a`, yet reaches `a.b`.
                yield alias.asname or "", Reference(alias.name, node.lineno)
                if alias.asname is None:
                    root = alias.name.partition(".")[0]
                    yield root, Reference(root, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield alias.asname or alias.name, Reference(name, node.lineno)


def absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that `from … import` names, with leading dots resolved against `module`."""
    if node.level == 0:
        return node.module or ""
    parents = module.split(".")[: -node.level]
    return ".".join([*parents, node.module] if node.module else parents)


@cache
def references(tree: ast.Module, module: str) -> tuple[Reference, ...]:
    """Every dotted name the file reaches; found once, since several tests look at them."""
    return tuple(_references(tree, module))


def _references(tree: ast.Module, module: str) -> Iterator[Reference]:
    """By import, by attribute, or by a constant getattr."""
    bound: dict[str, str] = {}
    for local, reference in imported(tree, module):
        yield reference
        bound[local] = reference.name
    for node in ast.walk(tree):
        name = dotted(node)
        root, _, rest = name.partition(".")
        if rest and root in bound:
            yield Reference(f"{bound[root]}.{rest}", getattr(node, "lineno", 0))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes or constant getattrs that begins at a name, else ``."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = dotted(value)
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr"),
            args=[value, ast.Constant(value=str(attribute)), *_],
        ):
            owner = dotted(value)
        case _:
            return ""
    return f"{owner}.{attribute}" if owner else ""


@cache
def strings(tree: ast.Module) -> tuple[Reference, ...]:
    """Every string constant that is not a docstring; found once, as references are."""
    return tuple(_strings(tree))


def _strings(tree: ast.Module) -> Iterator[Reference]:
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield Reference(text, node.lineno)
