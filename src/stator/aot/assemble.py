"""A compiled program as a function: around its graphs, whoever compiled them and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stator.aot.aliasing import overlapping_groups, writes_to_shared
from stator.aot.function import BackwardGraphs, Specializer, training_function
from stator.aot.metadata import Facts, Mutation, Program
from stator.aot.wrappers import inference_call
from stator.core.torch_types import Boxed, Flat


def assemble(
    function: Flat, facts: Facts, forward: Boxed, backward: BackwardGraphs, tools: Specializer
) -> Flat:
    """The program around its graphs; `function` is what it was compiled from."""
    if not facts.program.is_training:
        return inference_call(facts.program, forward)
    return training_function(function, facts, forward, backward, tools)


def with_alias_check(
    function: Flat, call: Flat, program: Program, inputs: Sequence[Any], tools: Specializer
) -> Flat:
    """`call`; where the program writes to inputs that share memory, one compiled for that."""
    if not _needs_alias_check(program):
        return call
    other = tools.specialize(function)
    if writes_to_shared(program, overlapping_groups(inputs)):
        return other

    def checked(*arguments: Any) -> Sequence[Any]:
        if writes_to_shared(program, overlapping_groups(arguments)):
            return other(*arguments)
        return call(*arguments)

    return checked


def _needs_alias_check(program: Program) -> bool:
    return len(program.inputs) > 1 and any(
        fact.mutation not in (Mutation.NONE, Mutation.METADATA) for fact in program.inputs
    )
