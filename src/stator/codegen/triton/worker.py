"""A process that compiles kernels: requests come in at its standard input, answers go out.

It is run as a script, and imports what compiles and nothing else of the package: torch alone would
take seconds.  Where nobody asks for long, it ends: a program that trains for days needs it no more.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from pathlib import Path
from types import ModuleType


def main(patience: float) -> None:
    """Answer until the input ends, or nothing has come for so many seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted lives on, and asks again
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints shall not stand among them
    root = Path(__file__).resolve().parents[2]
    for name in ("stator", "stator.codegen", "stator.codegen.triton"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    from triton import knobs

    from stator.codegen.triton.translate import FIRST, translate

    # Lines of a source that is no file are of use to nobody, and half of a kernel's bytes or more.
    knobs.compilation.disable_line_info = True
    translate(FIRST)  # while nobody waits: what comes next is compiled in a third of the time
    while select.select([sys.stdin], [], [], patience)[0]:  # one request at a time: none waits
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = translate(request)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
