"""The command line: options, bisect, memory, patterns, version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Stator, a compiler backend for PyTorch.", no_args_is_help=True, add_completion=False
)


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
def bisect(ctx: typer.Context, script: str) -> None:
    """Find the rewrite with which a script fails (exits with an error) first."""
    from rich.progress import Progress

    from stator.debug.bisect import bisect as find
    from stator.errors import StatorError

    with Progress(transient=True) as progress:
        task = progress.add_task("running it with all rewrites, and without", total=None)
        try:
            guilty = find(
                [script, *ctx.args],
                lambda good, bad: progress.update(task, description=f"between {good} and {bad}"),
            )
        except StatorError as error:
            raise typer.BadParameter(str(error), param_hint="script") from error
    typer.echo(f"rewrite {guilty.number}, found in {guilty.runs} runs:")
    for rewrite in guilty.rewrites:
        typer.echo(f"  {rewrite}")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # what follows the script is the script's
    }
)
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
