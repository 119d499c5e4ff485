"""A script, run with a watch on every graph that it compiles: the first that fails is kept.

`python -m stator.debug.minify.watch FOLDER SCRIPT ARGUMENTS` is the process in which it runs.  Each
graph is written down before it is judged, so that it is known if the process dies or hangs.  The
script itself goes on with eager's results.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from stator.backend import watched
from stator.debug.minify.case import Case, case_of
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How, class_of
from stator.debug.minify.script import Scripted, read_script, write_script
from stator.errors import StatorError
from stator.options import Options, environment_for

FOUND: Final = 75  # exit status of a script in which a graph failed
_STORED: Final = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Watched:
    """The graph that failed, with how; None where it took the process with it."""

    scripted: Scripted
    failure: Failure | None


def watch(command: Sequence[str], folder: Path, timeout: float) -> Watched:
    """Run a script until one of its graphs fails."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_for(None, folder / "rewrites.txt")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stator.debug.minify.watch", str(folder), *command],
            env=environment,
            check=False,
            timeout=timeout,
        )
        status: int | None = done.returncode
    except subprocess.TimeoutExpired:
        status = None
    judged = folder / "judged.json"
    told: dict[str, Any] = {"done": True}
    if judged.exists():
        told = json.loads(judged.read_text(encoding="utf-8"))
    if status == FOUND:
        return Watched(read_script(folder / "repro.py"), Failure.read(told["failure"]))
    if not told["done"] and (status is None or status < 0):  # it hung or died within a graph
        return Watched(read_script(folder / "repro.py"), None)
    raise StatorError(
        f"no graph of the script failed; it ended with status {status}",
        hint="it must call what Stator compiles, with the arguments that show the failure",
    )


@dataclass(slots=True)
class Watcher:
    """Stands for the compiler: judges each graph at its first call with inputs of new sizes."""

    folder: Path
    seen: set[Any] = field(default_factory=set)

    def __call__(
        self, module: fx.GraphModule, examples: Sequence[Any], options: Options
    ) -> Callable[..., Any]:
        """What runs in the graph's place."""
        how = How(_told(options), dynamic=any(map(_is_symbolic, examples)))
        eager: Callable[..., Any] = module.forward

        def call(*arguments: Any) -> Any:
            key = (id(module), *(_kind(value) for value in arguments))
            if key not in self.seen:
                self.seen.add(key)
                self.judge(case_of(module, arguments), how)
            return eager(*arguments)

        return call

    def judge(self, case: Case, how: How) -> None:
        """End the script if the graph fails."""
        write_script(self.folder, case, Failure("crash", detail="the process ended"), how)
        self._tell({"done": False})
        failure = class_of(case, how)
        if failure is not None:
            self._tell({"done": True, "failure": failure.stored()})
            raise SystemExit(FOUND)
        self._tell({"done": True})

    def _tell(self, what: dict[str, Any]) -> None:
        (self.folder / "judged.json").write_text(json.dumps(what), encoding="utf-8")


def _told(options: Options) -> dict[str, Any]:
    """Options that are not as usual and can be written down."""
    usual = Options()
    left_out = ("strict", "cache", "fuel_log")
    values = {
        one.name: getattr(options, one.name) for one in fields(Options) if one.name not in left_out
    }
    return {
        name: value
        for name, value in values.items()
        if value != getattr(usual, name) and isinstance(value, _STORED)
    }


def _is_symbolic(value: Any) -> bool:
    sizes = value.size() if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float) else type(value)
    return value.dtype, tuple(value.size()), value.requires_grad


def main() -> None:
    """Run the script as Python would, with the watch on."""
    folder, script, *arguments = sys.argv[1:]
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with watched(Watcher(Path(folder).resolve())):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
