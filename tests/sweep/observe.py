"""Run one case once, on copies of its inputs, and keep all that a caller can see of it."""

from __future__ import annotations

import copy
import importlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from stator.core.events import last_compilation, start_compilation
from tests.sweep.cases import BACKWARD, Unit

# A failure inside the compiler must be seen here, not be covered by its fallback to eager; and
# random numbers have to be eager's own, to be compared.
_OURS: Final[dict[str, Any]] = {"strict": True, "fallback_random": True, "cache": False}
EAGER_BITS: Final = "stator+eager-bits"
BACKEND_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "stator": _OURS,
    "stator+kernels": _OURS | {"kernels": True},
    "stator+no-kernels": _OURS | {"kernels": False},
    EAGER_BITS: {"strict": True, "numerics": "eager", "cache": False},
    "stator+verified": _OURS | {"verify": "kernels"},
}
_WIDER: Final = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

# Dynamo times the guards of every graph, flushing the caches first: a quarter of all the sweep's
# time, for one line in a log.
guards.profile_guard_manager = lambda *arguments: 0.0


class OutOfTimeError(BaseException):
    """The case ran past its limit; no `except Exception` on the way may swallow it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One sample of a unit, its arguments laid flat."""

    unit: Unit
    index: int
    leaves: tuple[Any, ...]
    structure: Any
    to_differentiate: Callable[[Any], Any]  # the part of the result whose gradient is defined

    @classmethod
    def of(cls, unit: Unit, index: int, sample: Any) -> Case:
        leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        return cls(unit, index, tuple(leaves), structure, sample.output_process_fn_grad)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one run showed: an error, or results, gradients and the inputs it left behind."""

    error: BaseException | None = None
    outputs: tuple[Any, ...] = ()
    structure: Any = None
    sharing: tuple[int | None, ...] = ()  # per output: the first earlier tensor with its storage
    gradients: tuple[Any, ...] = ()
    cotangents: tuple[Any, ...] = ()
    inputs: tuple[Any, ...] = ()
    mutated: tuple[bool, ...] = ()
    random_state: bytes = field(default=b"", repr=False)
    graphs: int = 0  # how many the compiler was handed
    generated: int = 0  # operators that became kernels, in the last graph
    called: tuple[str, ...] = ()  # operators that torch ran in it


def run_eager(case: Case, limit: float) -> Observation:
    """The case as torch itself runs it."""
    return _observe(case, case.unit.function, case.leaves, None, limit)


def run_wide(case: Case, eager: Observation, limit: float) -> Observation:
    """The case in float64, gradients from the same cotangents: what exact results would be."""
    try:
        leaves = [_widened(leaf) for leaf in case.leaves]
    except RuntimeError as error:  # a layout that has no conversion
        return Observation(error=error)
    return _observe(case, case.unit.function, leaves, eager.cotangents, limit)


def run_compiled(case: Case, backend: str, eager: Observation, limit: float) -> Observation:
    """The case through torch.compile, gradients from the same cotangents."""
    function = case.unit.function

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs)

    def compile_and_call(*args: Any, **kwargs: Any) -> Any:
        compiled = torch.compile(
            call, backend=_backend(backend), dynamic=False, options=BACKEND_OPTIONS.get(backend)
        )
        return compiled(*args, **kwargs)

    torch._dynamo.reset()
    counters.clear()
    cotangents = None if eager.error else eager.cotangents
    start = start_compilation()
    observed = _observe(case, compile_and_call, case.leaves, cotangents, limit)
    record = last_compilation()
    if record is None or record is start:
        return observed
    return replace(observed, generated=record.generated, called=tuple(record.called))


def _backend(name: str) -> str | Callable[..., Any]:
    """A backend by its registered name or, written `module:function`, by where it is defined.

    What follows a `+` names its options.
    """
    if ":" not in name:
        return name.partition("+")[0]
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _observe(
    case: Case,
    function: Callable[..., Any],
    leaves: Sequence[Any],
    cotangents: tuple[Any, ...] | None,
    limit: float,
) -> Observation:
    arguments = _copies(leaves)
    sources = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    first, args, kwargs = pytree.tree_unflatten(arguments, case.structure)
    if case.unit.in_place and case.unit.direction == BACKWARD:
        first = first.clone()  # autograd lets no leaf be changed in place
    inputs = _tensors((first, args, kwargs))
    versions = [tensor._version for tensor in inputs]
    torch.manual_seed(case.unit.seed)
    try:
        with _deadline(limit):
            result = function(first, *args, **kwargs)
            gradients, cotangents = _differentiate(case, result, sources, cotangents)
    except (Exception, OutOfTimeError) as error:
        return Observation(error=error, graphs=_graphs())
    outputs, structure = pytree.tree_flatten(result)
    return Observation(
        outputs=tuple(outputs),
        structure=structure,
        sharing=_sharing(inputs, outputs),
        gradients=gradients,
        cotangents=cotangents,
        inputs=tuple(inputs),
        mutated=tuple(
            tensor._version != version for tensor, version in zip(inputs, versions, strict=True)
        ),
        random_state=_random_state(),
        graphs=_graphs(),
    )


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """New tensors with the same values, strides and shared storages; other leaves as they are."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    is_strided = {key: tensor.layout == torch.strided for key, tensor in tensors.items()}
    # One deepcopy for all of them: it keeps two views of one storage two views of one storage.
    new = copy.deepcopy({key: tensors[key].detach() for key in tensors if is_strided[key]})
    new |= {key: tensors[key].detach().clone() for key in tensors if not is_strided[key]}
    for key, tensor in tensors.items():
        new[key].requires_grad_(tensor.requires_grad)
    return [new.get(id(leaf), leaf) for leaf in leaves]


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDER:
        return leaf.detach().to(_WIDER[leaf.dtype]).requires_grad_(leaf.requires_grad)
    if isinstance(leaf, torch.dtype):  # an argument `dtype=` asks for the wider result too
        return _WIDER.get(leaf, leaf)
    return leaf


def _differentiate(
    case: Case, result: Any, sources: list[Any], cotangents: tuple[Any, ...] | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if case.unit.direction != BACKWARD:
        return (), ()
    roots = [
        root if root.layout == torch.strided else root.to_dense()
        for root in _tensors(case.to_differentiate(result))
        if root.requires_grad
    ]
    if cotangents is None:
        cotangents = _draw(roots, case.unit.seed)
    if len(roots) != len(cotangents):
        message = f"{len(roots)} outputs can be differentiated, in eager {len(cotangents)}"
        raise AssertionError(message)
    if not roots:
        return (), ()
    weights = [cotangent.to(root.dtype) for root, cotangent in zip(roots, cotangents, strict=True)]
    return torch.autograd.grad(roots, sources, weights, allow_unused=True), cotangents


def _draw(roots: Sequence[Any], seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(
            root.shape,
            dtype=torch.complex128 if root.is_complex() else torch.float64,
            generator=generator,
        ).to(root.device, root.dtype)
        for root in roots
    )


def _sharing(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int | None, ...]:
    """Per output, the first of the inputs and earlier outputs that lives in the same storage."""
    seen: list[int | None] = [_storage(tensor) for tensor in inputs]
    shared: list[int | None] = []
    for output in outputs:
        storage = _storage(output) if isinstance(output, torch.Tensor) else None
        shared.append(seen.index(storage) if storage is not None and storage in seen else None)
        seen.append(storage)
    return tuple(shared)


def _storage(tensor: Any) -> int | None:
    if tensor.layout != torch.strided:
        return None
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _random_state() -> bytes:
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block when it runs longer."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"still running after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, ring)
    # Again and again: where nobody catches it, in a destructor say, Python drops an exception.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
