"""Run the same thing by both executors, and require the same bits, strides and sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import stator
from stator.core.torch_types import Boxed
from stator.runtime.memory import plan_memory
from stator.runtime.native.executor import compile_native, load_native
from stator.runtime.plan import Plan
from stator.runtime.python import load_plan
from tests.copies import Copier
from tests.parity import compare_metadata, cotangent_of

EXECUTORS: Final = ("python", "native")

Function = Callable[..., Any]


@dataclass
class Seen:
    """What one run left behind."""

    outputs: list[Any]
    structure: Any
    inputs: list[Any]  # after the call
    gradients: list[Any] = field(default_factory=list)

    @property
    def sharing(self) -> list[int]:
        """For every tensor of inputs and outputs, the first one that has its storage."""
        tensors = [t for t in (*self.inputs, *self.outputs) if is_strided(t)]
        places = [tensor.untyped_storage()._cdata for tensor in tensors]
        return [places.index(place) for place in places]

    @property
    def identity(self) -> list[int]:
        """For every input and output, the first that is the same object."""
        names = [id(value) for value in (*self.inputs, *self.outputs)]
        return [names.index(name) for name in names]


def is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def agree(fn: Function, *inputs: Any, grad: bool = False, eager: bool = True) -> None:
    """Require that both executors do the same to copies of `inputs`, and what eager does."""
    agree_over(fn, [inputs], grad=grad, eager=eager)


def agree_over(
    fn: Function,
    sets: Sequence[tuple[Any, ...]],
    *,
    dynamic: bool | None = None,
    grad: bool = False,
    eager: bool = True,
) -> None:
    """The same for several sets of inputs, one after another, through one compiled function.

    With `dynamic` set, Dynamo captures; else the function is traced for each set of sizes.
    """
    by_python, by_machine = (compiled(fn, name, dynamic) for name in EXECUTORS)
    for inputs in sets:
        ours, theirs = (seen(call, inputs, grad) for call in (by_machine, by_python))
        require_same(ours, theirs)
        if eager:
            require_close(ours, seen(fn, inputs, grad))


def compiled(
    fn: Function, executor: str, dynamic: bool | None = None, skip: tuple[str, ...] = ()
) -> Function:
    """`fn` for one executor; where it cannot be compiled, an error."""
    options: dict[str, Any] = {"executor": executor, "strict": True, "fallback_random": True}
    options["skip"] = skip
    if dynamic is None:
        return stator.aot_function(fn, **options)
    torch._dynamo.reset()
    found: Function = stator.compile(fn, dynamic=dynamic, **options)
    return found


def seen(call: Function, inputs: tuple[Any, ...], grad: bool) -> Seen:
    """Call on copies of the inputs, and send cotangents back if `grad`."""
    copier = Copier()
    arguments, _ = copier.copy_tree(inputs)
    torch.manual_seed(0)
    outputs, structure = tree_flatten(call(*arguments))
    result = Seen(outputs, structure, copier.given)
    if grad:
        wanted = [(i, t) for i, t in enumerate(outputs) if is_strided(t) and t.requires_grad]
        torch.autograd.backward([t for _, t in wanted], [cotangent_of(t, i) for i, t in wanted])
        result.gradients = [leaf.grad for leaf in copier.leaves]
    return result


def require_same(ours: Seen, theirs: Seen) -> None:
    """Nobody could tell the two runs apart."""
    assert ours.structure == theirs.structure, "the outputs are of another structure"
    for name in ("outputs", "inputs", "gradients"):
        pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
        for index, (mine, other) in enumerate(pairs):
            assert_same(mine, other, f"{name} {index}")
    assert ours.sharing == theirs.sharing, "other tensors share their storage"
    assert ours.identity == theirs.identity, "other results are the same object"


def assert_same(mine: Any, other: Any, what: str) -> None:
    """The same value: of tensors the same bits, laid in the same way."""
    if not isinstance(other, torch.Tensor):
        assert type(mine) is type(other), f"{what} is {mine!r}, not {other!r}"
        assert mine == other or (mine != mine and other != other), f"{what}: {mine}, not {other}"
        return
    assert isinstance(mine, torch.Tensor), f"{what} is {mine!r}, not a tensor"
    compare_metadata(mine, other, what)
    assert torch.equal(bits(mine), bits(other)), f"{what}:\n{mine}\nnot\n{other}"


def bits(tensor: Tensor) -> Tensor:
    """Its elements as bytes, so that NaN and the sign of zero count."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def require_close(ours: Seen, eager: Seen) -> None:
    """Equal but for rounding."""
    for name in ("outputs", "inputs", "gradients"):
        pairs = zip(getattr(ours, name), getattr(eager, name), strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            if not isinstance(theirs, torch.Tensor):
                assert_same(mine, theirs, f"{name} {index}")
                continue
            if name != "gradients":
                compare_metadata(mine, theirs, f"{name} {index}")
            torch.testing.assert_close(mine.detach(), theirs.detach(), equal_nan=True)
    assert ours.sharing == eager.sharing, "eager shares other storages"


def by_machine(plan: Plan) -> Boxed:
    """A plan as machine code."""
    return load_native(plan, compile_native(plan, plan_memory(plan)), "test")


def both(plan: Plan) -> tuple[Boxed, Boxed]:
    """A plan as Python, and as machine code."""
    return load_plan(plan, "test"), by_machine(plan)
