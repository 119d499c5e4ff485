"""From a plan to a host program: written, compiled, loaded."""

from __future__ import annotations

from functools import cache

from stator.codegen.llvm.backend import Entry
from stator.codegen.llvm.jit import compile_text
from stator.core.events import Held
from stator.core.torch_types import Boxed
from stator.loops.ir import Kernel
from stator.runtime.memory import Memory, predicted
from stator.runtime.native.host import HostProgram, write_host
from stator.runtime.native.image import Image, bind_host
from stator.runtime.native.prelude import load_prelude, prelude_text
from stator.runtime.native.watch import Watch
from stator.runtime.plan import Call, Plan
from stator.runtime.rare import Annotate, Note


def native_program(plan: Plan, memory: Memory, watch: Watch | None = None) -> HostProgram:
    """The host program of a plan, in LLVM."""
    notes = tuple(
        (number, Note(step.called, step.line))
        for number, step in enumerate(plan.steps)
        if isinstance(step, Call)
    )
    return write_host(plan, memory, kernel_symbols(plan), Annotate(notes), watch)


def kernel_symbols(plan: Plan) -> dict[Kernel, str]:
    """What a host program calls its kernels."""
    return {kernel: f"kernel_{number}" for number, kernel in enumerate(plan.entries)}


def compile_native(
    plan: Plan, memory: Memory, watch: Watch | None = None, held: Held | None = None
) -> Image:
    """All that runs a plan, as data; `held` is what it is foreseen to hold, if that is known."""
    program = native_program(plan, memory, watch)
    host, prelude = compile_text(program.text), _prelude_object()
    # Only now: others compile the kernels of a GPU meanwhile.
    entries: list[Entry] = list(plan.entries.values())
    modules = {id(entry.module): entry.module for entry in entries}
    places = {key: number for number, key in enumerate(modules)}
    return Image(
        host,
        tuple(module.data for module in modules.values()),
        tuple((places[id(entry.module)], entry.name) for entry in entries),
        program.table,
        prelude,
        predicted(plan, memory) if held is None else held,
    )


def load_native(plan: Plan, image: Image, label: str) -> Boxed:
    """A function that runs `plan`, on the kernels that are in memory already."""
    known = load_prelude(image.prelude)
    symbols = kernel_symbols(plan)
    kernels = {symbols[kernel]: entry.address for kernel, entry in plan.entries.items()}
    kept = tuple(entry.module for entry in plan.entries.values())
    return bind_host(image, {**known, **kernels}, label, kept)


@cache
def _prelude_object() -> bytes:
    return compile_text(prelude_text())
