"""A random kernel with its arguments: made from decisions, run both ways, compared.

`python -m tests.fuzz.cases 17` shows case 17 and what is wrong with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from stator.codegen.llvm import jit
from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.errors import VerifyError
from stator.loops import interp
from stator.loops.ir import Kernel
from stator.loops.text import to_text
from stator.loops.verify import verify
from tests.fuzz.arguments import Array, inputs, overrun, share_memory, with_margins
from tests.fuzz.choices import Recorded
from tests.fuzz.compare import difference
from tests.fuzz.kernels import make_kernel
from tests.fuzz.shrink import shrunk, trimmed


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, where its arguments come from, and on how many threads it runs."""

    kernel: Kernel
    seeds: tuple[int, ...]  # several for a kernel over a list
    threads: int

    def __str__(self) -> str:
        given = [f"seed {seed}: {inputs(self.kernel, seed)[1]}" for seed in self.seeds]
        return f"threads {self.threads}, {', '.join(given)}\n{to_text(self.kernel)}"


def decisions_of(number: int) -> list[int]:
    """The decisions that make one case."""
    choices = Recorded(random=Random(number))
    _make(choices)
    return choices.made


def case_of(decisions: Sequence[int]) -> Case:
    """The case that decisions make."""
    return _make(Recorded(decisions))


def _make(choices: Recorded) -> Case:
    seeds, threads = [choices.below(1 << 20)], 2 if choices.chance(8) else 1
    kernel = make_kernel(choices)
    if kernel.is_list:
        seeds += [choices.below(1 << 20) for _ in range(choices.below(3))]
    return Case(kernel, tuple(seeds), threads)


def failure(case: Case) -> str | None:
    """What is wrong with LLVM's results, or None."""
    kernel = case.kernel
    verify(kernel)
    runs = [Run.of(kernel, seed) for seed in case.seeds]
    module = jit.load([kernel])  # kept: the code goes with it
    entry = module.entries[kernel.name]
    if kernel.is_list:
        table = np.array([run.line(kernel) for run in runs], np.int64)
        entry(table.ctypes.data, len(runs), case.threads)
    else:
        entry(*runs[0].line(kernel), case.threads)
    return next((wrong for run in runs if (wrong := run.failure(kernel))), None)


@dataclass(frozen=True, slots=True)
class Run:
    """Arguments of a kernel, and what the interpreter makes of them."""

    sizes: dict[str, int]
    expected: dict[str, Array]
    actual: dict[str, Array]
    memory: dict[str, Array]

    @staticmethod
    def of(kernel: Kernel, seed: int) -> Run:
        expected, sizes = inputs(kernel, seed)
        actual, memory = with_margins(expected)
        share_memory(kernel, actual)
        interp.run(kernel, expected, sizes)
        return Run(sizes, expected, actual, memory)

    def line(self, kernel: Kernel) -> list[int]:
        """Addresses and sizes, as the kernel's entry takes them."""
        addresses = [self.actual[buffer.name].ctypes.data for buffer in arguments_of(kernel)]
        return addresses + [self.sizes[symbol.name] for symbol in symbols_of(kernel)]

    def failure(self, kernel: Kernel) -> str | None:
        """What is wrong with the results."""
        return overrun(self.memory) or difference(kernel, self.actual, self.expected)


def explained(number: int) -> str:
    """What is wrong with a case that fails, in its simplest form."""
    simplest = case_of(shrunk(decisions_of(number), lambda made: _fails(case_of(made))))
    kernel = trimmed(simplest.kernel, lambda kernel: _fails(replace(simplest, kernel=kernel)))
    simplest = replace(simplest, kernel=kernel)
    return f"case {number}: {_outcome(simplest)}\n{simplest}"


def _fails(case: Case) -> bool:
    return _outcome(case) is not None


def _outcome(case: Case) -> str | None:
    """What is wrong, a refusal of LLVM's included; None too for a kernel that has no meaning."""
    try:
        verify(case.kernel)
    except VerifyError:
        return None
    try:
        return failure(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    chosen = int(sys.argv[1])
    shown = case_of(decisions_of(chosen))
    print(shown, flush=True)  # before it runs: it may end the process
    print(explained(chosen) if _fails(shown) else "nothing is wrong")
