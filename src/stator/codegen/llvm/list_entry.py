"""A kernel over a list of arguments: threads share all iterations of all of them.

NAME_thread(task)                what one thread runs: its stretch of the iterations of the list
NAME(table, length, threads)     entry; the table has a line for each: buffers, then sizes
"""

from __future__ import annotations

from stator.codegen.llvm.emitter import Emitter
from stator.codegen.llvm.shape import arguments_of, outer_count, symbols_of
from stator.codegen.llvm.writer import Writer
from stator.loops.ir import Kernel


def parameters_of(kernel: Kernel) -> list[tuple[str, str]]:
    """Type and name of what the loops take before the stretch."""
    buffers = [("ptr", buffer.name) for buffer in arguments_of(kernel)]
    return buffers + [("i64", symbol.name) for symbol in symbols_of(kernel)]


def call_rows(kernel: Kernel, w: Writer, begin: str, end: str) -> None:
    """Run the loops over a stretch."""
    given = [f"{kind} %{name}" for kind, name in parameters_of(kernel)]
    w.line(f"call void @{kernel.name}_rows({', '.join([*given, f'i64 {begin}', f'i64 {end}'])})")


def emit_list(kernel: Kernel) -> str:
    """LLVM text of the two functions."""
    return "\n".join((_thread(kernel), _entry(kernel)))


def _count(kernel: Kernel, emitter: Emitter, number: str) -> str:
    """Load one line of the table; its number of outer iterations."""
    w = emitter.w
    parameters = parameters_of(kernel)
    line = w.let(f"mul i64 {number}, {len(parameters)}")
    for position, (kind, name) in enumerate(parameters):
        cell = w.let(f"add i64 {line}, {position}")
        place = w.let(f"getelementptr i64, ptr %table, i64 {cell}")
        w.line(f"%{name} = load {kind}, ptr {place}")
    return emitter.index(outer_count(kernel))


def _thread(kernel: Kernel) -> str:
    """One thread's share: an equal stretch of the iterations of the whole list."""
    emitter = Emitter(kernel=kernel)
    w = emitter.w
    for position, (kind, name) in enumerate((("ptr", "table"), ("i64", "length"), ("i64", "all"))):
        place = w.let(f"getelementptr i64, ptr %task, i64 {position}")
        w.line(f"%{name} = load {kind}, ptr {place}")
    number = w.let("call i32 @omp_get_thread_num()")
    threads = w.let("call i32 @omp_get_num_threads()")
    mine, team = w.let(f"sext i32 {number} to i64"), w.let(f"sext i32 {threads} to i64")
    low = w.let(f"mul i64 %all, {mine}")
    begin = w.let(f"udiv i64 {low}, {team}")
    high = w.let(f"add i64 {low}, %all")
    end = w.let(f"udiv i64 {high}, {team}")
    with w.loop("0", "%length", [("i64", "0")], "item") as loop:
        start = loop.carried[0]
        count = _count(kernel, emitter, loop.counter)
        first = _clipped(w, w.let(f"sub i64 {begin}, {start}"), "0", "sgt")
        last = _clipped(w, w.let(f"sub i64 {end}, {start}"), count, "slt")
        call_rows(kernel, w, first, last)  # nothing where first >= last
        loop.carried = [w.let(f"add i64 {start}, {count}")]
    w.line("ret void")
    head = f"define internal void @{kernel.name}_thread(ptr %task) #0 {{\nentry:"
    return "\n".join((head, *w.lines, "}"))


def _clipped(w: Writer, value: str, bound: str, keep: str) -> str:
    kept = w.let(f"icmp {keep} i64 {value}, {bound}")
    return w.let(f"select i1 {kept}, i64 {value}, i64 {bound}")


def _entry(kernel: Kernel) -> str:
    emitter = Emitter(kernel=kernel)
    w = emitter.w
    with w.loop("0", "%length", [("i64", "0")], "item") as loop:
        count = _count(kernel, emitter, loop.counter)
        loop.carried = [w.let(f"add i64 {loop.carried[0]}, {count}")]
    task = w.let("alloca [3 x i64], align 8")
    cells = (("ptr", "%table"), ("i64", "%length"), ("i64", loop.results[0]))
    for position, (kind, value) in enumerate(cells):
        place = w.let(f"getelementptr i64, ptr {task}, i64 {position}")
        w.line(f"store {kind} {value}, ptr {place}")
    w.line(f"call void @GOMP_parallel(ptr @{kernel.name}_thread, ptr {task}, i32 %threads, i32 0)")
    w.line("ret void")
    head = f"define void @{kernel.name}(ptr %table, i64 %length, i32 %threads) #0 {{\nentry:"
    return "\n".join((head, *w.lines, "}"))
