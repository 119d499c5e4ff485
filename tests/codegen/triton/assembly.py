"""The machine code of kernels as text, by the disassembler that Triton brings along."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest
import triton

_TOOL: Final = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
needs_disassembler = pytest.mark.skipif(
    not _TOOL.exists(), reason="this Triton has no disassembler"
)


def operations(code: bytes) -> list[str]:
    """The name of each instruction of a cubin, with what qualifies it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_TOOL), "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return _INSTRUCTION.findall(text)
