"""Launches made by hand."""

from __future__ import annotations

import torch

from stator.codegen.llvm.backend import load_kernels
from stator.loops.index import Index
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.values import product
from stator.lower.sizes import Shown
from stator.lower.tensors import contiguous
from stator.runtime.plan import Allocation, Launch, Plan, Step, Together
from stator.schedule.canonical import canonical

ADD = """
kernel add
  buffer x: f32[n]
  buffer y: f32[n]
  buffer out: f32[n]
  outer i: n
  stage
    out[i] = add(x[i], y[i])
"""
NEGATE = """
kernel negate
  buffer x: f32[n]
  buffer out: f32[n]
  outer i: n
  stage
    out[i] = neg(x[i])
"""


def nameless(text: str) -> Kernel:
    return canonical(parse(text)).kernel


def launch(
    made: str,
    *read: str,
    size: tuple[int | Index, ...] = (100,),
    writes: tuple[str, ...] = (),
) -> Launch:
    """out = add(x, y) or out = negate(x), for one or two names read.

    Names in `writes` are inputs that take the result; then nothing is made.
    """
    text = ADD if len(read) == 2 else NEGATE
    dims = tuple(Index.of(n) for n in size)
    total = product(dims)
    made_here = Allocation(made, dims, contiguous(dims), torch.float32)
    return Launch(
        parse(text),
        nameless(text),
        (*(writes or (made,)), *read),
        (total,),
        () if writes else (made_here,),
        total,
        writes,
    )


def plan(
    inputs: str,
    *steps: Step,
    outputs: tuple[object, ...] = (),
    sizes: dict[str, Shown] | None = None,
) -> Plan:
    """A plan whose launches have machine code."""
    kernels = [step.nameless for step in steps if isinstance(step, Launch | Together)]
    entries = dict(zip(kernels, load_kernels(kernels), strict=True))
    return Plan(tuple(inputs.split()), steps, outputs, sizes=sizes or {}, entries=entries)
