"""The command line says what the package says."""

from typer.testing import CliRunner

import stator
from stator.cli import app


def output_of(*arguments: str) -> str:
    # Wide enough that no cell of a table is folded.
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_options_lists_each_with_its_default_and_a_description() -> None:
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output_of("options").splitlines()
        if line.startswith("│")
    ]

    assert {name: default for name, default, _ in cells} == {
        name: repr(default) for name, default in stator.list_options().items()
    }
    assert all(description for _, _, description in cells)


def test_version_is_the_package_s() -> None:
    assert output_of("version").startswith(f"stator {stator.__version__}, torch ")


def test_no_command_shows_the_help() -> None:
    result = CliRunner().invoke(app, [])

    assert "options" in result.output
    assert "version" in result.output
