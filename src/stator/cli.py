"""The command line: options, packages, explain, bisect, memory, patterns, version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

app = typer.Typer(
    help="Stator, a compiler backend for PyTorch.", no_args_is_help=True, add_completion=False
)

RUNS_A_SCRIPT: Final = {  # settings of commands that do
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,  # what follows the script is the script's
}


@app.command()
def options() -> None:
    """List every option with its default and what it does."""
    from rich.console import Console
    from rich.table import Table

    from stator.options import list_options

    described = _descriptions()
    table = Table("option", "default", "what it does")
    for name, default in list_options().items():
        table.add_row(name, repr(default), described[name])
    Console().print(table)


patterns_app = typer.Typer(help="Stored patterns.", no_args_is_help=True)
app.add_typer(patterns_app, name="patterns")


@patterns_app.command()
def build(
    modules: Annotated[list[str], typer.Argument(help="Modules that register patterns.")],
    check: Annotated[bool, typer.Option(help="Write nothing; fail if one is stale.")] = False,
) -> None:
    """Trace the patterns that modules register by name, and store them beside the modules."""
    from importlib import import_module

    from stator.patterns import stale_patterns

    sys.path.insert(0, "")  # as `python -m` does
    for module in modules:
        import_module(module)
    stale = stale_patterns()
    for file, text in stale.items():
        typer.echo(f"{'stale' if check else 'written'}: {file.name}")
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    if check and stale:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bisect(
    ctx: typer.Context,
    script: str,
    timeout: Annotated[float, typer.Option(help="Seconds, after which it hangs.")] = 120.0,
) -> None:
    """Find the rewrite, pass or kernel with which a script fails (exits with an error) first."""
    from rich.progress import Progress

    from stator.debug.bisect import bisect as find
    from stator.errors import StatorError

    with Progress(transient=True) as progress:
        task = progress.add_task("running it with all rewrites, and without", total=None)
        try:
            guilty = find(
                [script, *ctx.args],
                lambda what, good, bad: progress.update(
                    task, description=f"{what} between {good} and {bad}"
                ),
                timeout=timeout,
            )
        except StatorError as error:
            raise typer.BadParameter(str(error), param_hint="script") from error
    typer.echo(f"found in {guilty.runs} runs: {guilty}")


@app.command(context_settings=RUNS_A_SCRIPT)
def minify(
    ctx: typer.Context,
    script: Annotated[str | None, typer.Argument(help="What to run; not with --resume.")] = None,
    output: Annotated[Path, typer.Option(help="A folder for what is left.")] = Path("minified"),
    timeout: Annotated[float, typer.Option(help="Seconds that the script may take.")] = 600.0,
    resume: Annotated[bool, typer.Option(help="Go on with a search in the folder.")] = False,
) -> None:
    """Run a script, and make the first graph that fails as small as it gets.

    A graph fails if compiling or running it raises, kills the process or does not end, or if
    results have another type, size, stride or value than eager's.
    """
    from rich.progress import Progress

    from stator.debug.minify.driver import minify_script, resumed
    from stator.errors import StatorError

    if (script is None) is not resume:
        raise typer.BadParameter("give a script, or --resume", param_hint="script")
    with Progress(transient=True) as progress:
        task = progress.add_task("running the script", total=None)

        def tell(what: str, left: int, begun: int) -> None:
            words = f"{left} nodes of {begun}: {what}"
            progress.update(task, description=words, total=begun, completed=begun - left)

        try:
            if script is None:
                found = resumed(output, tell)
            else:
                found = minify_script([script, *ctx.args], output, timeout, tell)
        except StatorError as error:
            raise typer.BadParameter(str(error), param_hint="script") from error
    typer.echo(f"{found.failure}")
    typer.echo(f"{found.begun} nodes became {found.left}, in {found.tries} tries")
    typer.echo(f"written: {found.script}")


@app.command(context_settings=RUNS_A_SCRIPT)
def memory(
    ctx: typer.Context,
    script: str,
    output: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("memory.html"),
) -> None:
    """Run a training script, and show what its backwards keep, what else there was, and why."""
    from rich.console import Console

    from stator.debug.choices import choices_of
    from stator.debug.memory_page import memory_html, memory_text

    ran = choices_of([script, *ctx.args])
    for number, one in enumerate(ran.choices, 1):
        typer.echo(f"program {number} of {len(ran.choices)}\n")
        typer.echo(f"{memory_text(one, Console().width)}\n")
    if ran.choices:
        output.write_text(memory_html(ran.choices), encoding="utf-8")
        typer.echo(f"written: {output}")
    elif ran.status == 0:
        typer.echo(
            "nothing with a backward was compiled: a script is explained that calls a program that"
            " Stator compiles, on something that needs gradients",
            err=True,
        )
    if ran.status:
        typer.echo(f"the script ended with status {ran.status}", err=True)
    if ran.status or not ran.choices:
        raise typer.Exit(1)


@app.command(context_settings=RUNS_A_SCRIPT)
def explain(
    ctx: typer.Context,
    script: str,
    json: Annotated[Path | None, typer.Option(help="Where to write all of it as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Where to write it as one page.")] = None,
) -> None:
    """Run a script, and tell what was compiled: stages, passes, kernels, calls, memory, and why."""
    from rich.console import Console

    from stator.debug.scripts import explain_script

    ran = explain_script([script, *ctx.args])
    found = ran.explanation
    if found is not None and found.graphs:
        typer.echo(found.text(Console().width))
        for path, write in ((json, found.json), (html, found.html)):
            if path is not None:
                path.write_text(write(), encoding="utf-8")
                typer.echo(f"written: {path}")
    elif ran.status == 0:
        typer.echo("the script compiled nothing with Stator", err=True)
    if ran.status:
        typer.echo(f"the script ended with status {ran.status}", err=True)
    if ran.status or found is None or not found.graphs:
        raise typer.Exit(1)


@app.command("build")
def build_package(
    factory: Annotated[str, typer.Argument(help="FILE.py:FUNCTION, or MODULE:FUNCTION.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Ends in .pt2, or .so.")],
    freezing: Annotated[bool, typer.Option(help="Fold the weights.")] = False,
    levels: Annotated[str, typer.Option(help="Levels of x86-64 to compile for.")] = "1,3,4",
) -> None:
    """Compile a model ahead of time.

    The function returns a torch.export.ExportedProgram, or a model and a tuple of arguments, or
    these and a dict of keywords.
    """
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from stator import aot_compile
    from stator.errors import StatorError

    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(f"making {factory}", total=None)
        chosen = _numbers(levels)
        model, *given = _made(factory)
        progress.update(task, description=f"compiling {factory}")
        wishes = {
            "output_path": str(output),
            "freezing": freezing,
            "levels": chosen,
        }
        try:
            path = aot_compile(model, *given, options=wishes)
        except StatorError as error:
            raise typer.BadParameter(str(error), param_hint="model") from error
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="output") from error
    typer.echo(f"written: {path} ({Path(path).stat().st_size / 2**20:.1f} MiB)")


def _numbers(levels: str) -> tuple[int, ...]:
    try:
        return tuple(int(level) for level in levels.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{levels!r} is no list of numbers, such as 1,3", param_hint="levels"
        ) from error


def _made(factory: str) -> tuple[Any, ...]:
    """An exported program, or a model and what it is called with."""
    from torch.export import ExportedProgram

    made = _called(factory)
    if isinstance(made, ExportedProgram):
        return (made,)
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        return made
    raise typer.BadParameter(
        f"{factory} returned {type(made).__name__}: return a torch.export.ExportedProgram, or a "
        "model, a tuple of arguments and, if it takes any, a dict of keywords",
        param_hint="factory",
    )


def _called(factory: str) -> Any:
    """What a function returns that is named by its file or module."""
    import importlib.util
    from importlib import import_module
    from importlib.util import find_spec

    where, _, name = factory.rpartition(":")
    if not where:
        raise typer.BadParameter("name a function: model.py:make", param_hint="factory")
    if where.endswith(".py"):
        # A file that is called as a module which is there stands beside it, not in its place.
        taken = {*sys.modules, *sys.stdlib_module_names}
        stem = Path(where).stem
        spec = importlib.util.spec_from_file_location(f"_{stem}" if stem in taken else stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise typer.BadParameter(f"there is no file {where}", param_hint="factory")
        sys.path.insert(0, str(Path(where).resolve().parent))  # as `python model.py` does
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # torch.export looks its classes up
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")  # as `python -m` does
        root = where.partition(".")[0]
        if not root or find_spec(root) is None:
            raise typer.BadParameter(f"there is no module {where}", param_hint="factory")
        module = import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise typer.BadParameter(f"{where} has no function {name}", param_hint="factory")
    return function()


@app.command()
def inspect(package: Path) -> None:
    """Show what a package holds, after it was found whole."""
    from rich.console import Console
    from rich.table import Table

    from stator.package.trial import sizes_shown

    read = _read_package(package)
    told, console = read.manifest, Console()
    console.print(
        f"{package.name}: stator {told['stator']}, torch {told['torch']}, {told['system']} on "
        f"{told['machine']}, levels {', '.join(map(str, told['levels']))}, {read.made_for}"
    )
    table = Table("", "name", "type", "size")
    for one in told["inputs"]:
        table.add_row("input", one["name"], one["dtype"], sizes_shown(one["size"]))
    for one in told["constants"]:
        kind = "folded" if one["folded"] else "constant"
        table.add_row(kind, one["name"], one["dtype"], sizes_shown(one["size"]))
    console.print(table)
    for name, data in sorted(read.files.items()):
        console.print(f"{len(data):>12,} bytes  {name}", highlight=False)
    console.print(f"{read.size:>12,} bytes  weights", highlight=False)


def _read_package(path: Path) -> Any:
    from stator.errors import PackageError
    from stator.package.archive import read_package

    try:
        return read_package(path)
    except PackageError as error:
        raise typer.BadParameter(str(error), param_hint="package") from error


def _load_package(path: Path) -> Any:
    from stator.errors import PackageError
    from stator.package.load import load

    try:
        return load(path)
    except PackageError as error:
        raise typer.BadParameter(str(error), param_hint="package") from error


@app.command("run")
def run_package(
    package: Path,
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", help="A tensor that torch.save wrote; again.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where torch.save writes the result.")] = None,
) -> None:
    """Run a package once: on tensors from files, or on some that are made up."""
    import torch

    from stator.package.trial import made_up_inputs
    from stator.torch_api import pytree

    model = _load_package(package)
    given = [_tensor_in(path) for path in inputs or ()]
    try:
        args, kwargs = made_up_inputs(model, given)
        result = model(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint="input") from error
    for number, value in enumerate(pytree.tree_leaves(result)):
        shown = f"{value.dtype} {list(value.size())}" if torch.is_tensor(value) else repr(value)
        typer.echo(f"output {number}: {shown}")
    if output is not None:
        try:
            torch.save(result, output)
        except (OSError, RuntimeError) as error:  # torch's, where the file cannot be opened
            raise typer.BadParameter(f"{output}: {error}", param_hint="output") from error
        typer.echo(f"written: {output}")


def _tensor_in(path: Path) -> Any:
    """The tensor that a file holds."""
    import torch

    try:
        found = torch.load(path, weights_only=True)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="input") from error
    except Exception as error:  # a text that is read as a pickle may come to anything
        told = f"{path} is no file of torch.save's: {error}"
        raise typer.BadParameter(told, param_hint="input") from error
    if not isinstance(found, torch.Tensor):
        told = f"{path} holds a {type(found).__name__}, and a tensor is wanted"
        raise typer.BadParameter(told, param_hint="input")
    return found


@app.command("bench")
def bench_package(
    package: Path,
    seconds: Annotated[float, typer.Option(help="How long to call it.", min=0.0)] = 3.0,
) -> None:
    """Time a package on made-up inputs: loading it, the first call, and calls after that."""
    import time

    import torch
    from rich.progress import Progress

    from stator.package.trial import made_up_inputs, timed

    start = time.perf_counter()
    model = _load_package(package)
    loaded = time.perf_counter() - start
    args, kwargs = made_up_inputs(model)

    def call() -> None:
        model(*args, **kwargs)
        if model.manifest["device"] == "cuda":
            torch.cuda.synchronize()  # a call only asks for the work

    with Progress(transient=True) as progress:
        task = progress.add_task("calling it", total=1.0)
        took = timed(
            call,
            seconds,
            lambda share: progress.update(task, completed=share),
        )
    low, high = took.quartiles
    typer.echo(f"load        {loaded * 1e3:10.3f} ms")
    typer.echo(f"first call  {took.first * 1e3:10.3f} ms")
    typer.echo(
        f"median      {took.median * 1e3:10.3f} ms  ({low * 1e3:.3f} to {high * 1e3:.3f}, "
        f"{len(took.calls)} calls)"
    )


@app.command()
def version() -> None:
    """Print the versions of Stator, torch and Python."""
    import platform
    from importlib.metadata import version as installed

    from stator import __version__

    # torch's from its metadata: importing torch takes seconds.
    python = platform.python_version()
    typer.echo(f"stator {__version__}, torch {installed('torch')}, Python {python}")


def _descriptions() -> dict[str, str]:
    """The comment beside each field of Options, which is where an option is described."""
    import ast
    import inspect
    import io
    import tokenize

    from stator.options import Options

    source = inspect.getsource(Options)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        field.target.id: comments.get(field.end_lineno or 0, "")
        for field in ast.walk(ast.parse(source))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def main() -> None:
    """Run the command line."""
    app()
