"""Object files to a shared library, by the system's linker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from stator.errors import CompileError

LINKERS: Final = ("ld", "ld.lld", "ld.gold", "mold")
# What others may call; kernels and all else stay inside.
_EXPORTS: Final = "{ global: AOTInductor*; stator_open; stator_run; stator_level; local: *; };\n"


def find_linker() -> str | None:
    """A linker of this machine."""
    return next((found for name in LINKERS if (found := shutil.which(name))), None)


def link(linker: str, objects: Sequence[bytes]) -> bytes:
    """A library that finds torch in the process, or beside itself."""
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, data in enumerate(objects):
            names.append(f"{number}.o")
            (Path(folder) / names[-1]).write_bytes(data)
        (Path(folder) / "exports").write_text(_EXPORTS)
        command = [
            linker,
            "-shared",
            "-soname=stator_model.so",
            "-znodelete",  # tensors on its memory may be the last that a process lets go of
            "-znow",
            "--version-script=exports",
            "-L",
            str(Path(torch.__file__).parent / "lib"),
            *names,
            "-ltorch_cpu",
            "-o",
            "model.so",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError("link", f"{linker} failed: {done.stderr.strip()}")
        return (Path(folder) / "model.so").read_bytes()
