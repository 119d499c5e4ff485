"""Numbers that torch's C interface has no form for: as tensors, to operators that take those.

It cannot pass a `Scalar` of a schema, nor a number where the schema has a tensor: Python makes one
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Final

import torch
from torch import fx

from stator.runtime.native.calls import has_nodes
from stator.runtime.native.dispatch import why_not_dispatched
from stator.runtime.native.shims import WITH_NUMBERS, symbol_of
from stator.runtime.plan import CPU, Call, Constant, Plan, Step
from stator.torch_api import (
    OpOverload,
    given_arguments,
    is_random_op,
    passed_types,
    result_types,
)

aten: Final = torch.ops.aten
_EXACT: Final = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
# Differences as sums, for which torch has a C function: of what, and of how many times what.
_SUMS: Final[Mapping[Any, Callable[..., list[Any]]]] = {
    aten.sub.Tensor: lambda x, y, factor: [x, y, -factor],
    aten.rsub.Scalar: lambda x, y, factor: [y, x, -factor],
}


def numbers_as_tensors(plan: Plan) -> Plan:
    """A plan whose calls a library can make, as far as constants and other overloads help.

    before: y = aten.special_zeta.other_scalar(x, 2.0)
    after:  y_number_1 = constant tensor(2.);  y = aten.special_zeta.default(x, y_number_1)
    """
    steps: list[Step] = []
    for step in plan.steps:
        is_operator = isinstance(step, Call) and isinstance(step.target, OpOverload)
        if isinstance(step, Call) and is_operator and why_not_dispatched(step) is not None:
            steps += _made_callable(step)
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps))


def _made_callable(call: Call) -> list[Step]:
    if _is_known(call):
        return _made_already(call)
    given = given_arguments(call.target, call.args, call.kwargs)
    device = _device(given)
    if call.symbol is None and call.target in WITH_NUMBERS and _has_fractions(given):
        call = replace(call, symbol=symbol_of(WITH_NUMBERS[call.target], device))
    if call.target in _SUMS and _has_fractions(given):
        symbol = symbol_of(WITH_NUMBERS[aten.add.Tensor], device)
        given = _SUMS[call.target](*given)
        call = replace(call, target=aten.add.Tensor, symbol=symbol)
    elif call.symbol is None:  # a C function takes numbers as they are
        call = replace(call, target=_overload_for_tensors(call.target) or call.target)
    constants: list[Step] = []
    for place, (kind, value) in enumerate(zip(passed_types(call.target), given, strict=True)):
        if kind in ("Tensor", "Optional[Tensor]") and type(value) in _EXACT:
            name = f"{call.name}_number_{place}"
            constants.append(Constant(name, _tensor(value, given)))
            given[place] = fx.Graph().placeholder(name)
    return [*constants, replace(call, args=tuple(given), kwargs={})]


def _is_known(call: Call) -> bool:
    """Whether it is a tensor that depends on nothing."""
    depends = has_nodes((call.args, call.kwargs)) or is_random_op(call.target)
    is_torchs = call.target.namespace == "aten" and result_types(call.target) == ["Tensor"]
    return is_torchs and not depends


def _made_already(call: Call) -> list[Step]:
    """What depends on no tensor is made when the library is; each run has a copy to write to."""
    name = f"{call.name}_made"
    made = call.target(*call.args, **call.kwargs)
    copied = replace(call, target=aten.clone.default, args=(fx.Graph().placeholder(name),))
    return [Constant(name, made), replace(copied, kwargs={})]


def _overload_for_tensors(target: OpOverload) -> OpOverload | None:
    """The overload that takes tensors for numbers, and else the same."""
    wanted = [kind.replace("number", "Tensor") for kind in passed_types(target)]
    packet = target.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    alike = (one for one in overloads if result_types(one) == result_types(target))
    return next((one for one in alike if passed_types(one) == wanted), None)


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    values = [value.meta.get("val") for value in given if isinstance(value, fx.Node)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _device(given: Sequence[Any]) -> torch.device:
    """Where a call computes: on a GPU, if some tensor is there."""
    devices = (value.device for value in _tensors(given))
    return next((device for device in devices if device.type != "cpu"), CPU)


def _has_fractions(given: Sequence[Any]) -> bool:
    """Whether some tensor is no integer: those take no factor from C, where it is a double."""
    return any(value.is_floating_point() or value.is_complex() for value in _tensors(given))


def _tensor(number: complex, given: Sequence[Any]) -> torch.Tensor:
    """A number of the type that eager would compute with: it gives way to the tensors'."""
    types = [torch.result_type(value, number) for value in _tensors(given)]
    exact = torch.tensor(number, dtype=_EXACT[type(number)])
    return exact.to(reduce(torch.promote_types, types)) if types else exact
