"""The machine code of a GPU's kernels, by the disassembler that Triton brings along."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_USAGE: Final = re.compile(r"REG:(\d+) ")


def disassembler() -> Path:
    """Where it is, if this Triton has one."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def operations(code: bytes) -> tuple[list[str], int]:
    """Each instruction of a cubin, with what qualifies it, and how many registers a thread has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(disassembler()), "--dump-sass", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    registers = _USAGE.search(text)
    return _INSTRUCTION.findall(text), int(registers[1]) if registers else 0
