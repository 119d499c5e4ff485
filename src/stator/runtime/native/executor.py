"""The native executor: a plan as one function of machine code."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from stator.core.torch_types import Boxed
from stator.loops.ir import Kernel
from stator.runtime.memory import Memory
from stator.runtime.native.entry import load_host
from stator.runtime.native.host import HostProgram, write_host
from stator.runtime.plan import Call, Plan


@dataclass(frozen=True, slots=True)
class Annotate:
    """Writes on an exception which step of a plan raised it."""

    plan: Plan

    def __call__(self, error: BaseException, number: int) -> None:
        step = self.plan.steps[number]
        if isinstance(step, Call):
            where = f", {step.line}" if step.line else ""
            error.add_note(f"in {step.target}{where}")


def native_program(plan: Plan, memory: Memory) -> tuple[HostProgram, dict[str, int]]:
    """The host program of a plan, and the addresses of its kernels by their symbols."""
    symbols: dict[Kernel, str] = {}
    addresses: dict[str, int] = {}
    for number, (kernel, entry) in enumerate(plan.entries.items()):
        address = ctypes.cast(entry, ctypes.c_void_p).value
        assert address is not None, "a kernel has an address"
        symbols[kernel] = f"kernel_{number}"
        addresses[symbols[kernel]] = address
    return write_host(plan, memory, symbols, Annotate(plan)), addresses


def load_native(plan: Plan, memory: Memory, label: str) -> Boxed:
    """A function that runs `plan`."""
    program, kernels = native_program(plan, memory)
    return load_host(program, kernels, label)
