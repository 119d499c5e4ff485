"""The most memory that calls hold: what the system says of this process.

All that was kept is given back, the system forgets the process's peak, and the highest mark of a
few calls, less what the process held before them, is what they needed beyond inputs and code.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

CALLS: Final = 3  # whose peak is taken
MEBIBYTE: Final = 1 << 20
FORGET_PEAK: Final = "5"  # what the system is told, in its own words
STATUS: Final = Path("/proc/self/status")
FORGETS: Final = Path("/proc/self/clear_refs")


def kibibytes(status: str, name: str) -> int | None:
    """One line of /proc/self/status."""
    found = [line.split() for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(found[0][1]) if found else None


def held(name: str) -> int | None:
    """Bytes of this process: "VmRSS", or "VmHWM" for the most there were."""
    if not STATUS.exists():
        return None
    found = kibibytes(STATUS.read_text(encoding="ascii"), name)
    return None if found is None else 1024 * found


def give_back() -> None:
    """Let go of all memory that waits to be used again: Stator's, then the C library's."""
    gc.collect()
    if "stator" in sys.modules:
        sys.modules["stator"].trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def peak(call: Callable[[], Any]) -> int | None:
    """Bytes that some calls needed beyond those held before; None where the system hides it."""
    call()  # once before: libraries that it brings in are not its tensors
    give_back()
    before = held("VmRSS")
    try:
        FORGETS.write_text(FORGET_PEAK, encoding="ascii")
    except OSError:
        return None
    for _ in range(CALLS):
        call()
    most = held("VmHWM")
    return None if before is None or most is None else max(0, most - before)
