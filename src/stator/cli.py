"""The command line: `stator options`, `stator version`."""

from __future__ import annotations

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
