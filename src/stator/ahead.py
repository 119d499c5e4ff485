"""Compile ahead of time: `aot_compile(model, args, options={"output_path": "model.pt2"})`."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.export import ExportedProgram, export

from stator.core.events import start_compilation
from stator.core.undisturbed import undisturbed
from stator.errors import CompileError, OptionError, Unsupported
from stator.options import Options, read_options
from stator.package.archive import PackageWriter
from stator.package.blob import Blob
from stator.package.build import finish_archive, write_file, write_shared
from stator.package.card import capability_of, card_of
from stator.package.joint import compile_joint, finish_joint
from stator.package.library import Library, Targets, write_library
from stator.package.link import LINKERS, find_linker
from stator.package.planned import Planned
from stator.package.program import Exported, library_graph
from stator.package.spell import spell_factors
from stator.package.tables import LEVELS
from stator.pipeline import make_tools, plan_library, prepare
from stator.runtime.fused import begin_workers
from stator.torch_api import pytree

_OURS: Final = ("output_path", "levels", "linker", "gpu_arch")
# Whether these gain is measured, and would differ from build to build.
_PACKED: Final = ("pack_linear", "pack_lstm")
_ON_THE_CPU: Final = Targets(tuple(LEVELS))


@undisturbed  # until all is written: what the compiler leaves behind is much to walk
def aot_compile(
    model: torch.nn.Module | fx.GraphModule | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile a model ahead of time; the path of what was written.

    `output_path` ending in `.pt2` gives a package, `.so` a library alone.  Further options:
    `levels`, of x86-64, that it has kernels for (1, 3 with AVX2, 4 with AVX-512); `gpu_arch`, the
    compute capability of the card (90) where it is not the one here; `linker`, False for a package
    without a linked library; and those of `stator.Options`.  `dynamic_shapes` are those of
    torch.export.  A model whose tensors lie on a GPU gives a package for such GPUs.
    """
    given = dict(options or {})
    path, levels, linker = _own_options(given)
    chosen = read_options(None, {key: v for key, v in given.items() if key not in _OURS})
    if isinstance(model, ExportedProgram):
        program = model
        _refuse_merged(program)
    else:
        module = model if isinstance(model, torch.nn.Module) else _as_module(model)
        program = _exported(module, args, kwargs, dynamic_shapes)
    targets = _targets(program, levels, given.get("gpu_arch"))
    if path.suffix == ".so":
        return _write_library_alone(path, program, chosen, linker, targets)

    def write(part: Path) -> None:
        with PackageWriter(part) as package:
            library = compile_library(program, chosen, package.put, targets)
            finish_archive(package, library, linker, targets)

    return write_file(path, write)


def _write_library_alone(
    path: Path,
    program: ExportedProgram,
    options: Options,
    linker: str | None,
    targets: Targets,
) -> str:
    if linker is None:
        raise CompileError(
            "link",
            f"there is no linker on this machine ({', '.join(LINKERS)})",
            hint="give a path that ends in .pt2: a package needs none",
        )
    weights: list[Any] = []
    library = compile_library(program, options, weights.append, targets)
    return write_file(path, lambda part: write_shared(part, library, linker, weights))


def compile_fx_aot(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> str:
    """`aot_compile` for a graph that takes its inputs one by one."""
    return aot_compile(module, tuple(example_inputs), options=options)


@undisturbed
def aot_compile_joint(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile a training step ahead of time: forward and backward in one package, its path.

    `stator.load` makes a torch.nn.Module of it, with the model's parameters, whose outputs have
    the compiled backward behind them.  Options and `dynamic_shapes` are those of `aot_compile`.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"a {type(model).__name__} has no parameters to train",
            hint="give a torch.nn.Module, one around your function for instance",
        )
    given = dict(options or {})
    path, levels, linker = _own_options(given)
    if path.suffix != ".pt2":
        raise OptionError(
            f"output_path cannot be {str(path)!r}", hint="a package for training ends in .pt2"
        )
    chosen = _settled(read_options(None, {k: v for k, v in given.items() if k not in _OURS}))
    program = _exported(model, args, kwargs, dynamic_shapes)
    exported = Exported.of(program)
    if card_of(exported.fakes) is not None:
        raise Unsupported(
            "package",
            "packages for training are for the CPU",
            hint="train on a GPU with torch.compile(backend='stator'), and package what came of it",
        )
    targets = Targets(levels)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if torch.is_tensor(leaf)]
    pairs = zip(exported.names, leaves, strict=True)
    exported.asking |= {place for place, leaf in pairs if leaf.requires_grad}
    tools = make_tools(chosen, start_compilation())
    run = prepare(program.graph_module, [], tools)

    def plan(module: fx.GraphModule, name: str) -> Planned:
        spell_factors(module.graph)
        return plan_library(module, tools.ctx, name)

    def write(part: Path) -> None:
        with PackageWriter(part) as package:
            joint = compile_joint(exported, run, tools, plan, package.put, targets)
            joint.training = model.training
            finish_joint(package, joint, linker, targets)

    return write_file(path, write)


def compile_library(
    program: ExportedProgram,
    options: Options,
    put: Callable[[Any], object],
    targets: Targets = _ON_THE_CPU,
) -> Library:
    """All that a library of an exported program is linked of; `put` takes its weights."""
    options = _settled(options)
    exported = Exported.of(program)
    blob = Blob(put)
    if not options.freezing:  # the weights are what they are, so they go first
        blob.add(list(exported.constants.values()))
    weights = {place: one.value for place, one in exported.constants.items()}
    tools = make_tools(options, start_compilation(), (), weights)
    with torch.no_grad():  # attention goes to the kernel that eager takes without gradients
        run = prepare(program.graph_module, [], tools)
    graph = library_graph(exported, run, tools)
    spell_factors(graph.module.graph)
    return write_library(exported, graph, plan_library(graph.module, tools.ctx), blob, targets)


def _exported(
    module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """What torch.export captures; a tensor that is given twice, or is a weight too, is two."""
    seen = {id(one) for one in (*module.parameters(), *module.buffers())}

    def own(given: torch.Tensor) -> torch.Tensor:
        # It would be one input of the graph, whatever a caller gives in the other place.
        if id(given) in seen:
            return given.detach().requires_grad_(given.requires_grad)
        seen.add(id(given))
        return given

    args, given = pytree.tree_map_only(torch.Tensor, own, (tuple(args), dict(kwargs or {})))
    return export(module, args, given, dynamic_shapes=dynamic_shapes)


def _refuse_merged(program: ExportedProgram) -> None:
    """Refuse a program that took two inputs for one, since its example gave one tensor twice."""
    leaves = pytree.tree_leaves(program.example_inputs or ())
    places = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    held = [id(value) for value in program.state_dict.values()]
    if len({*places, *held}) < len(places) + len(set(held)):
        raise Unsupported(
            "package",
            "one tensor was given to torch.export in two places, which are one for its graph",
            hint="export it on a copy: `torch.export.export(model, (x, x.clone()))`",
        )


def _targets(program: ExportedProgram, levels: Sequence[int], asked: Any) -> Targets:
    """What a program is compiled for: the card that its tensors are on, if they are on one."""
    card = card_of(Exported.of(program).fakes)
    if card is None:
        return Targets(levels)
    begin_workers()
    return Targets(levels, capability_of(card, asked))


def _settled(options: Options) -> Options:
    """Options as far as they are for what lies in a file, and runs without us."""
    skip = (*options.skip, *_PACKED)
    return replace(options, skip=skip, pack_weights=False, strict=True)


def _own_options(given: Mapping[str, Any]) -> tuple[Path, tuple[int, ...], str | None]:
    where = given.get("output_path")
    if where is None:
        folder = tempfile.mkdtemp(prefix="stator-")
        where = os.path.join(folder, "model.pt2")
    path = Path(where)
    if path.suffix not in (".pt2", ".so"):
        raise OptionError(
            f"output_path cannot be {str(where)!r}",
            hint="it ends in .pt2 for a package, or in .so for a library alone",
        )
    levels = given.get("levels", tuple(LEVELS))
    rows = isinstance(levels, Collection) and len(levels) > 0
    if not rows or not all(type(level) is int and level in LEVELS for level in levels):
        raise OptionError(f"levels cannot be {levels!r}", hint=f"give some of {tuple(LEVELS)}")
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise CompileError(
            "package", f"packages are for Linux on x86-64, not {sys.platform}/{platform.machine()}"
        )
    return path, tuple(sorted(set(levels))), find_linker() if given.get("linker", True) else None


def _as_module(function: Any) -> torch.nn.Module:
    class Called(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """The function."""
            return function(*args, **kwargs)

    return Called()
