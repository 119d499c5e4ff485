"""A whole kernel in LLVM: the loops, and what is called of them.

NAME_rows(buffers…, sizes…, begin, end)  the loops, over a stretch of the outer iterations
NAME_thread(task)                        what one thread of a parallel region runs
NAME(buffers…, sizes…, threads)          entry: alone, or in torch's own OpenMP pool

A kernel over a list has another entry: list_entry.py.
"""

from __future__ import annotations

from stator.codegen.llvm.columns import Columns
from stator.codegen.llvm.emitter import Emitter
from stator.codegen.llvm.flat import Flat
from stator.codegen.llvm.list_entry import call_rows, emit_list, parameters_of
from stator.codegen.llvm.rows import Rows
from stator.codegen.llvm.scans import Scans, is_scan
from stator.codegen.llvm.shape import arguments_of, outer_count, symbols_of, transposed
from stator.codegen.llvm.short import with_last_written_out
from stator.codegen.llvm.tiles import Tiles
from stator.codegen.llvm.writer import Writer
from stator.loops.ir import Kernel
from stator.schedule.columns import is_columnar


def emit_kernel(kernel: Kernel) -> str:
    """LLVM text of the three functions, without the math that they call."""
    kernel = with_last_written_out(kernel)
    if kernel.is_list:
        return "\n".join((_rows(kernel), emit_list(kernel)))
    return "\n".join((_rows(kernel), _thread(kernel), _entry(kernel)))


def _rows(kernel: Kernel) -> str:
    """The loops over one stretch of outer iterations."""
    parameters = [f"ptr noalias %{b.name}" for b in arguments_of(kernel)]
    parameters += [f"i64 %{s.name}" for s in symbols_of(kernel)]
    parameters += ["i64 %begin", "i64 %end"]
    emitter = _shape_of(kernel)(kernel=kernel)
    for buffer in kernel.scratch:
        emitter.open_scratch(buffer)
    emitter.emit()
    for buffer in kernel.scratch:
        emitter.close_scratch(buffer)
    emitter.w.line("ret void")
    # Two functions call it.  Inlined into both, it would be optimized three times.
    head = (
        f"define internal void @{kernel.name}_rows({', '.join(parameters)}) noinline #0 {{\nentry:"
    )
    return "\n".join((head, *emitter.w.lines, "}"))


def _shape_of(kernel: Kernel) -> type[Columns] | type[Rows] | type[Flat]:
    if is_columnar(kernel):
        return Columns
    if any(stage.inner for stage in kernel.stages):
        return Scans if any(map(is_scan, kernel.stages)) else Rows
    return Flat if transposed(kernel) is None else Tiles


def _thread(kernel: Kernel) -> str:
    """One thread's share: an equal stretch of the outer iterations."""
    w = Writer()
    parameters = [*parameters_of(kernel), ("i64", "count")]
    for position, (kind, name) in enumerate(parameters):
        place = w.let(f"getelementptr i64, ptr %task, i64 {position}")
        w.line(f"%{name} = load {kind}, ptr {place}")
    number = w.let("call i32 @omp_get_thread_num()")
    threads = w.let("call i32 @omp_get_num_threads()")
    mine, all_ = w.let(f"sext i32 {number} to i64"), w.let(f"sext i32 {threads} to i64")
    low = w.let(f"mul i64 %count, {mine}")
    begin = w.let(f"udiv i64 {low}, {all_}")
    high = w.let(f"add i64 {low}, %count")
    end = w.let(f"udiv i64 {high}, {all_}")
    call_rows(kernel, w, begin, end)
    w.line("ret void")
    head = f"define internal void @{kernel.name}_thread(ptr %task) #0 {{\nentry:"
    return "\n".join((head, *w.lines, "}"))


def _entry(kernel: Kernel) -> str:
    rows = Emitter(kernel=kernel)  # for its way with indices
    w = rows.w
    count = rows.index(outer_count(kernel))
    alone = w.let("icmp sle i32 %threads, 1")
    w.line(f"br i1 {alone}, label %serial, label %parallel")
    w.open_block("serial")
    call_rows(kernel, w, "0", count)
    w.line("ret void")
    w.open_block("parallel")
    parameters = parameters_of(kernel)
    task = w.let(f"alloca [{len(parameters) + 1} x i64], align 8")
    for position, (kind, value) in enumerate(
        [*((kind, f"%{name}") for kind, name in parameters), ("i64", count)]
    ):
        place = w.let(f"getelementptr i64, ptr {task}, i64 {position}")
        w.line(f"store {kind} {value}, ptr {place}")
    w.line(f"call void @GOMP_parallel(ptr @{kernel.name}_thread, ptr {task}, i32 %threads, i32 0)")
    w.line("ret void")
    taken = [f"{kind} %{name}" for kind, name in parameters] + ["i32 %threads"]
    return "\n".join(
        (f"define void @{kernel.name}({', '.join(taken)}) #0 {{\nentry:", *w.lines, "}")
    )
