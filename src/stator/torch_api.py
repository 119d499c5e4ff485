"""The only module that uses private torch names.

Every name is listed under the versions that have it; the rest of the package imports it from here,
so that a new torch release is one file to read.  All of them are present in torch 2.11 to 2.13.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.utils._pytree as pytree
from torch._decomp import _should_decompose_because_unsafe_op
from torch._functorch import config as functorch_config
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_v2,
    auto_functionalized_v2_dense,
)
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, rebind_unbacked
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    autograd_would_have_decomposed,
    is_traceable_wrapper_subclass,
    transform_subclass,
)

__all__ = ["BELOW_AUTOGRAD", "FakeTensor", "FakeTensorMode", "FunctionalTensor"]
__all__ += ["FunctionalTensorMode", "HigherOrderOperator", "LazyGraphModule", "OpOverload"]
__all__ += ["OpOverloadPacket", "ShapeEnv", "StorageWeakRef", "TorchDispatchMode", "TracingContext"]
__all__ += ["auto_functionalized_v2", "autograd_function_apply", "below_autograd", "with_effects"]
__all__ += ["detect_fake_mode", "disable_functional_mode", "disable_proxy_modes_tracing", "pytree"]
__all__ += ["functorch_config", "get_proxy_mode", "is_traceable_wrapper_subclass", "make_fx"]
__all__ += ["rebind_unbacked", "track_tensor_tree", "transform_subclass", "unset_fake_temporarily"]

_F = TypeVar("_F", bound=Any)
_Key, _KeySet = torch._C.DispatchKey, torch._C.DispatchKeySet
SIZE_RULES: Final[Any] = _Key.Meta  # under which operators have rules for the sizes of results

# A compiled graph has autograd, version counters, view tracking and autocast behind it already: its
# operators start at the device's kernels.
BELOW_AUTOGRAD: Final[Any] = (
    _KeySet(_Key.AutogradCPU)  # stands for autograd of every backend
    | _KeySet(_Key.AutogradOther)
    | _KeySet(_Key.AutogradNestedTensor)
    | _KeySet(_Key.ADInplaceOrView)
    | _KeySet(_Key.AutocastCPU)
    | _KeySet(_Key.AutocastCUDA)
)
below_autograd: Final[Any] = torch._C._ExcludeDispatchKeyGuard

# The program looks at values, which a trace has none of.  Dynamo answers with a graph break.
NEEDS_VALUES: Final[tuple[type[Exception], ...]] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

SYMBOLIC_TYPES: Final[tuple[type, ...]] = (torch.SymInt, torch.SymFloat, torch.SymBool)


def size_expression(size: torch.SymInt) -> Any:
    """The sympy expression that a symbolic size stands for; None for the length of a jagged one.

    What is known of sizes settles Max.
    """
    if size.node.is_nested_int():
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else size.node.shape_env.simplify(expression)


def size_hint(size: torch.SymInt) -> int | None:
    """What a symbolic size was when it was captured; None if that depends on data."""
    return size.node.hint if size.node.has_hint() else None


def is_natural(size: torch.SymInt, symbol: Any) -> bool:
    """Whether a symbol of `size` is known to be at least 0: sizes are, other integers may not."""
    known = size.node.shape_env.bound_sympy(symbol)
    return bool(symbol.is_nonnegative or known.lower >= 0)


def is_positive(number: torch.SymInt | torch.SymFloat) -> bool:
    """Whether what is known of its symbols keeps a number above 0."""
    return bool(number.node.shape_env.bound_sympy(number.node.expr).lower > 0)


def keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to keep its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_sole(values: list[Any], place: int) -> bool:
    """Whether nobody but the list has the tensor at a place, or looks at its memory."""
    holders = storage_holders(values[place].untyped_storage())
    return sys.getrefcount(values[place]) <= 2 and holders <= 2  # each counts who asks


def storage_holders(storage: Any) -> int:
    """How many look at some memory: tensors, and whoever asks."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def end_allocation(device: torch.device, pool: Any) -> None:
    """Let torch give no more memory to a recording of a GPU that was broken off."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with suppress(RuntimeError):  # it had ended by itself
        None if end is None else end(device.index, pool)


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Keep autocast from remembering casts of fake tensors."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


autocast_off: Final[Any] = torch._C._DisableAutocast  # a context, as is this: versions do not move
preserve_version: Final[Any] = torch.autograd._unsafe_preserve_version_counter

# From begin to end, torch notes what its CPU allocator gives to this thread, and gets back.
begin_watch: Final[Any] = torch.autograd._enable_profiler_legacy
end_watch: Final[Any] = torch.autograd._disable_profiler_legacy
_with = (torch.autograd.ProfilerState.CPU, False, True, False, False, False)
MEMORY_WATCH: Any = torch.autograd.ProfilerConfig(*_with, torch._C._profiler._ExperimentalConfig())


def to_functional(value: Any) -> Any:
    """Wrap a tensor so that functionalization sees its mutations; subclasses from the inside."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return transform_subclass(value, lambda _, inner: to_functional(inner))
    return FunctionalTensor.to_functional(value)


def from_functional(value: Any) -> Any:
    """The plain tensor that holds the present value of a functional one."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return transform_subclass(value, lambda _, inner: from_functional(inner))
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def _inner(value: torch.Tensor) -> list[Any]:
    if is_traceable_wrapper_subclass(value):
        attributes, _ = value.__tensor_flatten__()
        return [leaf for name in attributes for leaf in _inner(getattr(value, name))]
    return [value.elem] if isinstance(value, FunctionalTensor) else []


def has_data_mutation(value: torch.Tensor) -> bool:
    """Whether some in-place operator wrote to the data."""
    return any(torch._functionalize_has_data_mutation(t) for t in _inner(value))


def has_metadata_mutation(value: torch.Tensor) -> bool:
    """Whether some in-place view changed size, stride or offset (it may have been undone)."""
    return any(torch._functionalize_has_metadata_mutation(t) for t in _inner(value))


def was_storage_changed(value: torch.Tensor) -> bool:
    """Whether `set_` gave the tensor another storage."""
    return any(torch._functionalize_was_storage_changed(t) for t in _inner(value))


def was_storage_resized(value: torch.Tensor) -> bool:
    """Whether `untyped_storage().resize_()` was called on it."""
    return any(torch._functionalize_was_inductor_storage_resized(t) for t in _inner(value))


def storage_of(value: Any) -> Any:
    """An identity for the memory behind a tensor, or None where there is none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def view_base(value: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd takes `value` for a view of."""
    return value._base


def version_of(value: torch.Tensor) -> int:
    """How often the tensor was written in place.  Inference tensors do not count."""
    return 0 if value.is_inference() else int(value._version)


def is_view_op(target: Any) -> bool:
    """Whether `target` is an operator whose result shares memory with its first argument."""
    return isinstance(target, OpOverload) and bool(target.is_view)


def is_taken_apart(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether functionalization calls other operators in the place of one: `target.decompose`."""
    if not target._can_decompose() or not torch._C._dispatch_has_kernel(target.name()):
        return False
    aliases = target._schema.is_mutable or any(a.alias_info for a in target._schema.arguments)
    unsafe = aliases or _should_decompose_because_unsafe_op(target)
    return unsafe or autograd_would_have_decomposed(target, pytree.tree_leaves((args, kwargs)))


def returns_alias(target: Any) -> bool:
    """Whether an operator's result may lie in the memory of an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def is_mutable_op(target: Any) -> bool:
    """Whether `target` is an operator that writes to an argument."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


# Their results lie in the memory of an argument, though their schemas do not say so.
_SECRET_KEEPERS: Final = frozenset(
    {
        "aten::_lazy_clone",  # until somebody writes
        "aten::_sparse_coo_tensor_with_dims_and_tensors",
        "aten::_unsafe_view",
        *("aten::dequantize.self", "aten::dequantize.tensors"),  # of what is not quantized
        "aten::lift",
        *(f"aten::set.source_{of}" for of in ("Storage", "Storage_storage_offset", "Tensor")),
        *(f"aten::sparse_compressed_tensor.comp_plain_value{end}" for end in ("", "_size")),
        *("aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"),
    }
)


def is_composite(target: OpOverload) -> bool:
    """Whether an operator only calls others, which autograd sees in its place."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key))


def keeps_nothing(target: Any) -> bool:
    """Whether an operator of torch's own neither returns its arguments' memory nor keeps it."""
    libraries = ("aten", "mkldnn", "mkl", "onednn")
    if not isinstance(target, OpOverload) or target.namespace not in libraries:
        return False
    if target.name() in _SECRET_KEEPERS or is_composite(target):
        return False
    aliases = any(value.alias_info is not None for value in target._schema.returns)
    return not (aliases or target._schema.is_mutable)


def is_random_op(target: Any) -> bool:
    """Whether `target` draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def run_on_copies(
    operator: Any, copied: tuple[int, ...], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Run an operator that writes; of the tensors it writes to, those at `copied` are copied."""
    return tuple(auto_functionalized_v2_dense(operator, copied, **arguments))


def returns_of(target: Any) -> int:
    """How many values the operator returns."""
    return len(target._schema.returns) if isinstance(target, OpOverload) else 1


def python_dispatcher(wanted: bool) -> Any:
    """A context in which symbolic sizes reach Python implementations of operators."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher() if wanted else nullcontext()


def entry_of(target: Any) -> Any:
    """The function behind an operator, without the Python layer of its overload object."""
    return target._op if isinstance(target, OpOverload) else target


def autocast_state() -> tuple[Any, ...]:
    """Which autocast applies here, for each device."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def compile_state() -> str:
    """The switches of torch's that decide what a program is traced to, in words."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    rounding = [one.fp32_precision for one in (cuda.matmul, cudnn.conv, mkldnn.matmul)]
    kinds = ("flash", "math", "mem_efficient", "cudnn")
    switches = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": autocast_state(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "float32": ["ieee" if one == "none" else one for one in rounding],
        "libraries": (cudnn.enabled, mkldnn.enabled, mkldnn.deterministic),
        "attention": [getattr(cuda, f"{kind}_sdp_enabled")() for kind in kinds],
        "backward mode": torch._C._functorch.maybe_current_level(),
    }
    return ", ".join(f"{name}={value}" for name, value in switches.items())


def size_range(size: Any) -> str:
    """What is known of a symbolic number."""
    ranges, symbols = size.node.shape_env.var_to_range, size.node.expr.free_symbols
    return str([f"{symbol}: {ranges.get(symbol)}" for symbol in sorted(symbols, key=str)])


def size_bounds(size: int | torch.SymInt) -> tuple[int, int]:
    """The least and the largest that a size may be."""
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    most = 2**62
    low = int(bounds.lower) if bounds.lower.is_Integer else 0
    return low, min(int(bounds.upper), most) if bounds.upper.is_Integer else most


def guard_count(mode: FakeTensorMode) -> int:
    """How many conditions on symbolic sizes were met so far; a new one is a promise to Dynamo."""
    env = mode.shape_env
    return 0 if env is None else len(env.guards) + len(env.replacements)


def size_conditions(mode: FakeTensorMode, program: Any) -> list[Any]:
    """What an exported program's sizes must obey, as sympy says it, or as text if none is left."""
    env = mode.shape_env
    found = [] if env is None else [guard.expr.xreplace(env.replacements) for guard in env.guards]
    return found or list(program._guards_code)


def fake_inputs(inputs: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    """Fake twins of a captured graph's inputs, with the sizes that Dynamo chose to be symbolic."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    mode = mode or detect_fake_mode(inputs) or FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for value in inputs:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            fakes.append(value)
            continue
        symbolic = _symbolic_sizes(value)
        source = None if symbolic is None else symbolic.tensor_source
        fakes.append(
            mode.from_tensor(
                value, static_shapes=symbolic is None, symbolic_context=symbolic, source=source
            )
        )
    return fakes, mode


def has_static_sizes(value: torch.Tensor) -> bool:
    """Whether Dynamo made no symbol of an input's sizes."""
    known = _symbolic_sizes(value)
    return known is None or all(size is DimDynamic.STATIC for size in known.dynamic_sizes)


def _symbolic_sizes(value: torch.Tensor) -> Any:
    context = TracingContext.try_get()
    return None if context is None else context.tensor_to_context.get(value)


def detached(value: Any) -> Any:
    """A fake tensor without autograd history; numbers that Dynamo took out of it stay known."""
    if not isinstance(value, torch.Tensor):
        return value
    twin = value.detach()
    remember_numbers(twin, value)
    return twin


def remember_numbers(twin: torch.Tensor, value: torch.Tensor) -> None:
    """Symbols that stand for numbers inside of `value` stand for those inside of `twin`."""
    for memo in ("item_memo", "nested_int_memo"):
        known = getattr(value, memo, None)
        if known is not None:
            setattr(twin, memo, known)


@contextmanager
def saved_tensor_hooks_off() -> Iterator[None]:
    """Keep hooks of the user's (or of checkpointing) away from fake tensors."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each in a place of its own."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


# Called with None, Dynamo looks at no frame until it is called with what it returned.
set_eval_frame: Final[Any] = torch._C._dynamo.eval_frame.set_eval_frame


def hidden_from_dynamo(function: _F) -> _F:
    """Decorator: Dynamo runs the function's own frame as it is; not so what it calls."""
    frames: Any = torch._C._dynamo.eval_frame  # which needs no Dynamo: servers train without it
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skipped)
    return function


def sets_grad_mode(target: Any) -> bool:
    """Whether a node of Dynamo's switches grad mode."""
    return target is torch._C._set_grad_enabled


def functionalization() -> FunctionalTensorMode:
    """The mode that removes mutations; effects get their tokens as they are met."""
    return FunctionalTensorMode(_allow_token_discovery=True)


class CountListWrites(TorchFunctionMode):
    """Moves version counters for `_foreach_…_` and `_fused_…_`: they do it where no trace sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The function's result; lists it wrote to have counted the write."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name.endswith("_") and name.startswith(("_foreach_", "_fused_")):
            lists = args if name.startswith("_fused_") else args[:1]
            for written in lists:
                if isinstance(written, list | tuple):
                    torch.autograd.graph.increment_version(written)
        return result


def is_missing_derivative(error: RuntimeError) -> bool:
    """Whether autograd found an operator that nobody can differentiate."""
    return "derivative for" in str(error) and "is not implemented" in str(error)


def is_fake(value: torch.Tensor) -> bool:
    """Whether it is a plain fake tensor, not a subclass around one."""
    return type(value) is FakeTensor or type(value) is torch.nn.Parameter


without_overrides = torch._C.DisableTorchFunctionSubclass  # a subclass is a plain tensor inside
copy_all: Final[Any] = torch._foreach_copy_  # tensors of a second list into those of a first
unregister: Final[Any] = torch.library.Library._destroy  # takes back what a library registered
remove_script_mutation: Final[Any] = torch._C._jit_pass_remove_mutation  # from a graph


def is_held(value: Any) -> bool:
    """Whether Dynamo found a tensor on a module."""
    return isinstance(value, torch.nn.Parameter) or hasattr(value, "_dynamo_static_input_type")


def is_weight(value: Any, *, held: bool = False) -> bool:
    """Whether a tensor is on a module, as far as is seen or told, and counts its writes."""
    held = held or is_held(value)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_inference()
    return held and plain and value.layout is torch.strided and value.device.type in ("cpu", "cuda")


# --- the C++ side ---

# A tensor's Python object holds the C++ tensor right behind its head; the address of that is what
# torch's C functions call a handle.
TENSOR_IN_OBJECT: Final = object.__basicsize__
# The Python object of a C++ tensor: THPVariable_Wrap(const at::TensorBase&).
WRAP_TENSOR: Final = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
DEFAULT_TYPE: Final = "_ZN3c1031get_default_dtype_as_scalartypeEv"
# Whether boxed calls take numbers for tensors: the constructor and destructor of a guard.
BEGIN_NUMBERS: Final = "_ZN5torch3jit29ToIValueAllowNumbersAsTensorsC1Eb"
END_NUMBERS: Final = "_ZN5torch3jit29ToIValueAllowNumbersAsTensorsD1Ev"


def tensor_is_in_object() -> bool:
    """Whether tensors lie in their Python objects where we expect them."""
    tensor = torch.empty(1)
    found = ctypes.c_uint64.from_address(id(tensor) + TENSOR_IN_OBJECT).value
    return bool(found == tensor._cdata)


@cache
def torch_symbol(name: str) -> int | None:
    """Where a function is that torch's libraries export; None if they do not."""
    for library in _torch_libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


@cache
def _torch_libraries() -> tuple[Any, ...]:
    folder = Path(torch.__file__).parent / "lib"
    paths = [folder / f"lib{name}.so" for name in ("torch_cpu", "torch_cuda", "torch_python")]
    return tuple(ctypes.CDLL(str(path)) for path in paths if path.exists())


def argument_types(target: Any) -> list[str]:
    """The schema's types of an operator's arguments."""
    return [str(argument.type) for argument in target._schema.arguments]


def passed_types(target: Any) -> list[str]:
    """The types of an operator's arguments as its code takes them: a dtype is no int there."""
    return [str(argument.real_type) for argument in target._schema.arguments]


def result_types(target: Any) -> list[str]:
    """The types of an operator's results."""
    return [str(result.real_type) for result in target._schema.returns]


def given_arguments(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """A value for every argument of an operator, defaults filled in."""
    left = target._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in left)]


def out_variant(target: Any) -> Any:
    """An operator's variant that is given memory for its result."""
    return target.overloadpacket.out


def operator_named(name: str) -> Any:
    """The operator called `aten::add.Tensor`."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def decomposed_quantization() -> Any:
    """Operators on integers that stand for floats, which torch declares when it is asked to."""
    import torch.ao.quantization.fx._decomposed

    return torch.ops.quantized_decomposed


def sequence_number(history: Any) -> int:
    """When autograd noted an operator: nodes recorded for it have the same number."""
    return int(history._sequence_nr())


def compiled_frames() -> list[Any]:
    """What Dynamo notes of each frame that it compiled, of many the newest."""
    return list(torch._dynamo.utils.get_compilation_metrics())


def dispatch_keys(value: torch.Tensor) -> str:
    """The keys by which torch's dispatcher finds operators for a tensor."""
    return str(torch._C._dispatch_keys(value))


def script_autocast(wanted: bool) -> bool:
    """Whether TorchScript adds casts of autocast from now on; returns whether it did."""
    return bool(torch._C._jit_set_autocast_mode(wanted))
