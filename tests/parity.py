"""Run a function eagerly and compiled, and require that nobody could tell the two apart.

`check(fn, *inputs)` runs `fn` three times, each on its own copy of the inputs: eagerly, compiled,
and eagerly in float64.  The last says how far eager itself is from the truth; the compiled run may
be twice as far, plus one unit in the last place of the largest value.  Everything else has to
equal eager's: structure, dtype, shape, strides, `requires_grad`, which tensors share storage, which
inputs were written, the type of what was raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

from tests.copies import Copier, inner_values, own_copy, plain_tensors, rebuilt, wide_copy, widened

Backend = str | Callable[..., Any]

# `pytest --backend NAME` sets it, so that the suite can be tried on a backend other than ours.
BACKEND: Final[ContextVar[Backend]] = ContextVar("backend", default="stator")
# Native kernels are on, as they are for users; `--no-kernels` lets torch run every operator.
KERNELS: Final[ContextVar[bool]] = ContextVar("kernels", default=True)


class Settings(TypedDict, total=False):
    """Keyword arguments of `check`; the defaults stand in `Plan`."""

    backend: Backend | None
    options: Mapping[str, Any] | None
    dynamic: bool | None
    calls: int
    grad: bool
    fullgraph: bool
    tolerance_scale: float
    precision: torch.dtype | None
    seed: int | None
    expect_graph: bool
    use: Callable[..., Any]
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None


def call(fn: Callable[..., Any], *inputs: Any) -> Any:
    """The plain use of a function."""
    return fn(*inputs)


@dataclass(frozen=True)
class Tolerance:
    """How far from the reference a result may be."""

    scale: float = 2.0  # times eager's own error
    precision: torch.dtype | None = None  # whose ulp is allowed on top; None: the result's

    def allowed(
        self, eager_error: float, magnitude: float, dtype: torch.dtype, known: bool
    ) -> float:
        """The largest error; without a reference, a few roundings done otherwise than eager's."""
        ulp = ulp_scale(self.precision or dtype)
        if not known:
            return UNKNOWN_ULPS * ulp * max(magnitude, 1)  # near zero, rounding is all there is
        return self.scale * eager_error + ulp * magnitude


UNKNOWN_ULPS = 8
EAGERS = Tolerance()


@dataclass(frozen=True)
class Plan:
    """How one check runs."""

    backend: Backend | None = None  # the one `pytest --backend` names
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    calls: int = 1  # each on fresh copies of the inputs, by one compiled function
    grad: bool = True  # run backward, where an output requires grad
    fullgraph: bool = False
    tolerance_scale: float = 2.0
    precision: torch.dtype | None = None  # the coarsest type it computes in; None: its results'
    seed: int | None = None  # for functions that draw random numbers; then float64 says nothing
    expect_graph: bool = True  # fail if Dynamo found nothing to compile: the check would be empty
    use: Callable[..., Any] = call  # `use(fn, *inputs)`, run eagerly around the compiled `fn`
    compiler: Callable[..., Any] | None = None  # instead of torch.compile

    @property
    def tolerance(self) -> Tolerance:
        """How far off results may be."""
        return Tolerance(self.tolerance_scale, self.precision)


@dataclass
class Run:
    """One run of the function on its own copy of the inputs, and what was seen."""

    inputs: list[Any] = field(default_factory=list)  # tensors
    leaves: list[Any] = field(default_factory=list)  # tensors whose .grad counts
    modules: list[Any] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None
    structure: Any = None
    outputs: list[Any] = field(default_factory=list)  # flat, tensors and others
    # whether, not how often: a graph may write once where eager writes in several steps
    bumped: list[bool | None] = field(default_factory=list)
    rng_moved: bool = False
    modes: tuple[bool, ...] = ()

    def state(self) -> dict[str, Any]:
        """Parameters and buffers of every module that took part."""
        return {
            f"{'parameter' if isinstance(tensor, torch.nn.Parameter) else 'buffer'} {name}": tensor
            for module in self.modules
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }


# ---------------------------------------------------------------------------------------------
# The check


def check(fn: Callable[..., Any], *inputs: Any, **settings: Unpack[Settings]) -> None:
    """Assert that `torch.compile(fn)` behaves as `fn`: results, effects, gradients, exceptions.

    `inputs` are pytrees of tensors, modules and other values.  Every run gets copies in which what
    shared storage still does, and views are still views of the same base.  A module, as `fn` or as
    an input, is deep-copied; tensors that `fn` closes over are not.
    """
    plan = Plan(**settings)
    mine, theirs, wide_fn = own_copy(fn), own_copy(fn), _wide_or_none(fn, plan)
    compiled = compile_for(mine, plan)
    for _ in range(plan.calls):
        eager = _run(theirs, theirs, Copier(), inputs, plan)
        ours = _run(compiled, mine, Copier(), inputs, plan)
        if _same_error("the call", ours.error, eager.error):
            continue
        _require_a_graph(plan)
        wide = _reference(wide_fn, inputs, eager, plan)
        compare_forward(ours, eager, wide, plan)
        if plan.grad:
            _compare_backward(ours, eager, wide, plan)


def compiled(fn: Callable[..., Any], **settings: Unpack[Settings]) -> Callable[..., Any]:
    """`fn` compiled as `check` would, for tests that look at something else."""
    return compile_for(fn, Plan(**settings))


def compile_for(fn: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Compile with the chosen backend; ours must raise rather than quietly run eager."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if plan.compiler is not None:
        custom: Callable[..., Any] = plan.compiler(fn)
        return custom
    backend = BACKEND.get() if plan.backend is None else plan.backend
    options = dict(plan.options or {})
    if backend == "stator":
        # Compared with eager, random numbers have to be eager's own.
        ours = {"strict": True, "kernels": KERNELS.get(), "fallback_random": True}
        options = {**ours, **options}
    elif plan.backend is None:
        options = {}  # they are stator's; another backend would refuse them
    result: Callable[..., Any] = torch.compile(
        fn,
        backend=backend,
        options=options or None,
        dynamic=plan.dynamic,
        fullgraph=plan.fullgraph,
    )
    return result


def compare_forward(ours: Run, eager: Run, wide: Run | None, plan: Plan) -> None:
    """Assert that outputs, mutated inputs, module state and side effects equal eager's."""
    assert ours.structure == eager.structure, (
        f"outputs have another structure: {ours.structure}, eager {eager.structure}"
    )
    for index, (mine, theirs) in enumerate(zip(ours.outputs, eager.outputs, strict=True)):
        what = f"output {index}"
        if not isinstance(theirs, torch.Tensor):
            _compare_plain(mine, theirs, what)
            continue
        assert isinstance(mine, torch.Tensor), f"{what} is {type(mine)}, eager gives a tensor"
        compare_metadata(mine, theirs, what)
        compare_values(mine, theirs, wide and wide.outputs[index], what, plan.tolerance)
    for index, (mine, theirs) in enumerate(zip(ours.inputs, eager.inputs, strict=True)):
        what = f"input {index} after the call"
        compare_metadata(mine, theirs, what)
        compare_values(mine, theirs, wide and wide.inputs[index], what, plan.tolerance)
    _compare_state(ours, eager, wide, plan)
    _compare_sharing(ours, eager)
    for index, (bumped, expected) in enumerate(zip(ours.bumped, eager.bumped, strict=True)):
        assert bumped == expected, f"version of input {index} bumped: {bumped}, eager {expected}"
    if not eager.rng_moved:
        assert not ours.rng_moved, "the call moved the random number generator, eager did not"
    assert ours.modes == eager.modes, (
        f"(grad, inference) mode after the call: {ours.modes}, eager {eager.modes}"
    )


def _compare_backward(ours: Run, eager: Run, wide: Run | None, plan: Plan) -> None:
    """Send the same cotangents back through every run and compare the gradients."""
    seeds = [
        (index, cotangent_of(tensor, index))
        for index, tensor in enumerate(_results(eager))
        if _wants_cotangent(eager, index, tensor)
    ]
    if seeds:
        theirs_failed = _backward(eager, seeds, plan)
        if _same_error("backward", _backward(ours, seeds, plan), theirs_failed):
            return
        if not eager.rng_moved:
            assert not ours.rng_moved, "backward moved the random number generator, eager did not"
        if wide is not None and _backward(wide, seeds, plan) is not None:
            wide = None
    # without seeds too: `use` may have run backward itself
    wide_leaves = _named_leaves(wide) if wide else {}
    mine = _named_leaves(ours)
    for name, theirs in _named_leaves(eager).items():
        reference = wide_leaves[name].grad if name in wide_leaves else None
        compare_gradient(mine[name].grad, theirs.grad, reference, name, plan.tolerance)


def compare_gradient(
    ours: Tensor, eager: Tensor, wide: Tensor, name: str, tolerance: Tolerance = EAGERS
) -> None:
    """Assert that a gradient is absent where eager's is, and near the reference where not."""
    what = f"gradient of {name}"
    if eager is None:
        assert ours is None, f"{what} is a tensor, eager gives None"
        return
    assert ours is not None, f"{what} is None, eager gives a tensor"
    assert type(ours) is type(eager), f"{what} is {type(ours)}, eager {type(eager)}"
    assert ours.dtype == eager.dtype, f"{what} has dtype {ours.dtype}, eager {eager.dtype}"
    assert ours.shape == eager.shape, f"{what} has shape {ours.shape}, eager {eager.shape}"
    assert ours.requires_grad == eager.requires_grad, f"{what} differs in requires_grad"
    compare_values(ours, eager, wide, what, tolerance)


# ---------------------------------------------------------------------------------------------
# Values


def assert_close_to_reference(
    ours: Tensor, eager: Tensor, reference: Tensor, what: str, tolerance: Tolerance = EAGERS
) -> None:
    """Assert error(ours) <= scale * error(eager) + eps(dtype) * magnitude, elementwise maxima.

    Without a reference (None, or one of another shape) eager's own values stand in for it, and a
    few roundings may differ.
    """
    mine, theirs = ours.detach().resolve_conj(), eager.detach().resolve_conj()
    if not (theirs.is_floating_point() or theirs.is_complex()):
        assert torch.equal(mine, theirs), f"{what} differs:\n{mine}\neager:\n{theirs}"
        return
    mine, theirs = widened(mine), widened(theirs)
    truth = theirs if reference is None else widened(reference.detach().resolve_conj())
    if truth.shape != theirs.shape or truth.dtype != theirs.dtype:
        truth = theirs
    known = truth is not theirs and eager.dtype not in (torch.float64, torch.complex128)
    finite = torch.isfinite(theirs)
    odd = torch.isclose(mine, theirs, equal_nan=True) | finite
    assert odd.all(), f"{what} has other NaN or infinity:\n{mine}\neager:\n{theirs}"
    truth = torch.where(torch.isfinite(truth), truth, theirs)[finite]
    mine, theirs = mine[finite], theirs[finite]
    if not theirs.numel():
        return
    magnitude = truth.abs().max().item()
    eager_error = (theirs - truth).abs().max().item()
    allowed = tolerance.allowed(eager_error, magnitude, eager.dtype, known)
    error = (mine - truth).abs().max().item()
    assert error <= allowed, (  # false for NaN too
        f"{what}: error {error:.3e}, allowed {allowed:.3e} "
        f"(eager's {eager_error:.3e}, magnitude {magnitude:.3e})"
    )


def compare_values(
    ours: Tensor, eager: Tensor, wide: Tensor, what: str, tolerance: Tolerance = EAGERS
) -> None:
    """`assert_close_to_reference` for tensors of any layout and for wrapper subclasses."""
    parts = list(plain_tensors(eager))
    mine = list(plain_tensors(ours))
    truths: list[Any] = [None] * len(parts)
    if isinstance(wide, torch.Tensor):
        with suppress(NotImplementedError, RuntimeError):
            truths = list(plain_tensors(wide))
    if len(truths) != len(parts):
        truths = [None] * len(parts)
    assert len(mine) == len(parts), f"{what} has {len(mine)} inner tensors, eager {len(parts)}"
    for own, theirs, truth in zip(mine, parts, truths, strict=True):
        assert_close_to_reference(own, theirs, truth, what, tolerance)


def ulp_scale(dtype: torch.dtype) -> float:
    """Distance from one to the next number."""
    return float(torch.finfo(dtype).eps)


def _compare_plain(ours: object, eager: object, what: str) -> None:
    same = type(ours) is type(eager)
    assert same, f"{what} has type {type(ours)}, eager {type(eager)}"
    if eager != eager:  # NaN
        assert ours != ours, f"{what} is {ours}, eager {eager}"
    elif "__eq__" in vars(type(eager)):  # else objects of two runs are never equal
        assert ours == eager, f"{what} is {ours}, eager {eager}"


# ---------------------------------------------------------------------------------------------
# Metadata, sharing, effects


def compare_metadata(ours: Tensor, eager: Tensor, what: str) -> None:
    """Assert that everything about a tensor but its values equals eager's."""
    mine, theirs = metadata(ours), metadata(eager)
    for name, expected in theirs.items():
        assert mine.get(name) == expected, f"{what}: {name} is {mine.get(name)}, eager {expected}"


def metadata(tensor: Tensor) -> dict[str, Any]:
    """What a user can see of a tensor without reading its elements."""
    seen = {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "shape": tuple(tensor.shape),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
        "is_inference": tensor.is_inference(),
    }
    if tensor.layout is torch.strided:
        seen["stride"] = tuple(tensor.stride())
        if not is_traceable_wrapper_subclass(tensor):
            seen["storage_offset"] = tensor.storage_offset()
    return seen


def _compare_state(ours: Run, eager: Run, wide: Run | None, plan: Plan) -> None:
    mine, theirs = ours.state(), eager.state()
    assert mine.keys() == theirs.keys(), f"module state {mine.keys()}, eager {theirs.keys()}"
    truths = wide.state() if wide else {}
    for name, tensor in theirs.items():
        compare_metadata(mine[name], tensor, f"{name} after the call")
        compare_values(
            mine[name], tensor, truths.get(name), f"{name} after the call", plan.tolerance
        )


def _compare_sharing(ours: Run, eager: Run) -> None:
    mine, theirs = _identities(ours), _identities(eager)
    assert mine == theirs, f"objects that are the same object: {mine}, eager {theirs}"
    mine, theirs = _storages(ours), _storages(eager)
    assert mine == theirs, f"tensors that share storage: {mine}, eager {theirs}"


def _identities(run: Run) -> dict[str, str]:
    """For every tensor that is an earlier one, that earlier one."""
    return _first_with_same_key((name, id(tensor)) for name, tensor in _named_tensors(run))


def _storages(run: Run) -> dict[str, str]:
    """For every tensor that shares storage with an earlier one, that earlier one."""
    return _first_with_same_key(
        (f"{name}[{part}]", inner.untyped_storage()._cdata)
        for name, tensor in _named_tensors(run)
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is torch.strided
        for part, inner in enumerate(plain_tensors(tensor))
    )


def _first_with_same_key(named: Iterator[tuple[str, int]]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first[key] for name, key in named if first.setdefault(key, name) != name}


def _named_tensors(run: Run) -> Iterator[tuple[str, Any]]:
    yield from ((f"input {i}", t) for i, t in enumerate(run.inputs))
    yield from run.state().items()
    for index, output in enumerate(run.outputs):
        if isinstance(output, torch.Tensor):
            yield f"output {index}", output


def _same_error(what: str, ours: Exception | None, eager: Exception | None) -> bool:
    """True if both raised the same type, False if neither raised; anything else fails."""
    if eager is None:
        if ours is not None:
            raise AssertionError(f"{what} raised {ours!r}, eager raised nothing") from ours
        return False
    assert not isinstance(eager, Warning), f"eager warned, so nothing was compared: {eager!r}"
    if ours is None:
        raise AssertionError(f"{what} raised nothing, eager raised {eager!r}") from eager
    # Dynamo rewraps what fake tensors raise while it traces: no backend has a say in that
    from_dynamo = isinstance(ours, torch._dynamo.exc.TorchRuntimeError)
    same = type(ours) is type(eager) or (from_dynamo and isinstance(ours, type(eager)))
    if not same:
        raise AssertionError(f"{what} raised {ours!r}, eager raised {eager!r}") from ours
    return True


def _require_a_graph(plan: Plan) -> None:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs or plan.compiler or not plan.expect_graph, (
        "Dynamo found no graph: nothing was compiled"
    )


# ---------------------------------------------------------------------------------------------
# Runs


def _run(
    call: Callable[..., Any], owner: object, copier: Copier, inputs: Sequence[Any], plan: Plan
) -> Run:
    """Use the function on copies of the inputs and record what happened."""
    arguments, modules = copier.copy_tree(inputs)
    if isinstance(owner, torch.nn.Module):
        owner.zero_grad(set_to_none=True)
        modules = [owner, *modules]
    run = Run(inputs=copier.given, leaves=copier.leaves, modules=modules)
    before = [_version(tensor) for tensor in run.inputs]
    modes = _modes()
    with _seeded(plan.seed):
        state = torch.get_rng_state()
        try:
            run.result = plan.use(call, *arguments)
        except Exception as error:
            run.error = error
        run.rng_moved = not torch.equal(state, torch.get_rng_state())
    run.modes = _modes()
    torch.set_grad_enabled(modes[0])
    run.outputs, run.structure = tree_flatten(run.result)
    run.bumped = [
        None if old is None else _version(tensor) != old
        for tensor, old in zip(run.inputs, before, strict=True)
    ]
    return run


def _wide_or_none(fn: Callable[..., Any], plan: Plan) -> Callable[..., Any] | None:
    """The function in float64; None where that says nothing about the narrower one."""
    if plan.seed is not None:
        return None
    try:
        return wide_copy(fn)
    except NotImplementedError:
        return None


def _reference(
    fn: Callable[..., Any] | None, inputs: Sequence[Any], eager: Run, plan: Plan
) -> Run | None:
    """The run in float64, if it could be done and gave results of the same shapes."""
    if fn is None:
        return None
    try:
        wide = _run(fn, fn, Copier(widen=True), inputs, plan)
    except NotImplementedError:
        return None
    shapes = [getattr(value, "shape", None) for value in eager.outputs]
    if wide.error or [getattr(value, "shape", None) for value in wide.outputs] != shapes:
        return None
    return wide


def _backward(run: Run, seeds: list[tuple[int, Any]], plan: Plan) -> Exception | None:
    results = _results(run)
    tensors = [results[index] for index, _ in seeds]
    cotangents = [
        cotangent.to(tensor.dtype) for tensor, (_, cotangent) in zip(tensors, seeds, strict=True)
    ]
    with _seeded(plan.seed), torch.enable_grad():
        state = torch.get_rng_state()
        try:
            torch.autograd.backward(tensors, cotangents)
        except Exception as error:
            return error
        run.rng_moved = not torch.equal(state, torch.get_rng_state())
    return None


def _results(run: Run) -> list[Any]:
    return [*run.outputs, *run.inputs]


def _wants_cotangent(run: Run, index: int, tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
        return False
    if index < len(run.outputs):
        return True
    # an input matters once the call has written to it and so given it a history
    return tensor.grad_fn is not None and bool(run.bumped[index - len(run.outputs)])


def cotangent_of(tensor: Tensor, seed: int) -> Tensor:
    """Random values laid out as the tensor, the same for the same seed."""
    if is_traceable_wrapper_subclass(tensor):
        inner = {
            name: cotangent_of(value, seed) if isinstance(value, torch.Tensor) else value
            for name, value in inner_values(tensor).items()
        }
        return rebuilt(tensor, inner)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    values = torch.randn(tensor.shape, generator=generator, dtype=wide)
    if tensor.layout is not torch.strided:
        return values.to(tensor.dtype)
    return torch.empty_like(tensor.detach()).copy_(values)


def _named_leaves(run: Run) -> dict[str, Any]:
    inputs = {f"input leaf {index}": leaf for index, leaf in enumerate(run.leaves)}
    return inputs | {name: t for name, t in run.state().items() if t.is_leaf}


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Leave the generator as it was; inside, start it from `seed` if there is one."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()
