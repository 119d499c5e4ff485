"""Object files to a shared library, by the system's linker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stator.codegen.llvm.jit import compile_text
from stator.errors import CompileError
from stator.package.archive import NEEDED

LINKERS: Final = ("ld", "ld.lld", "ld.gold", "mold")
# What others may call; kernels and all else stay inside.
_EXPORTS: Final = "{ global: AOTInductor*; stator_open; stator_run; stator_level; local: *; };\n"


def find_linker() -> str | None:
    """A linker of this machine."""
    return next((found for name in LINKERS if (found := shutil.which(name))), None)


def link(linker: str, objects: Sequence[bytes], needed: Sequence[str] = NEEDED["cpu"]) -> bytes:
    """A library that finds torch, and what else it needs, in the process or beside itself."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"{number}.o" for number in range(len(objects))]
        for file, data in zip(names, objects, strict=True):
            (folder / file).write_bytes(data)
        (folder / "exports").write_text(_EXPORTS)
        # In the place of torch's library, which takes a tenth of a second to read, and of those
        # that are not here: of what it needs, a linker writes down no more than the name.
        (folder / "nothing.o").write_bytes(compile_text(""))
        for library in needed:
            _run(linker, folder, f"-soname={library}", "nothing.o", "-o", library)
        _run(
            linker,
            folder,
            "-soname=stator_model.so",
            "-znodelete",  # tensors on its memory may be the last that a process lets go of
            "-znow",
            "--version-script=exports",
            *names,
            "--no-as-needed",
            *needed,
            *("-o", "model.so"),
        )
        return (folder / "model.so").read_bytes()


def _run(linker: str, folder: Path, *options: str) -> None:
    command = [linker, "-shared", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError("link", f"{linker} failed: {done.stderr.strip()}")
