"""Frozen programs from outside: new weights for them, and freezing a graph by hand."""

from __future__ import annotations

import difflib
import reprlib
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx, nn

from stator.aot.aliasing import overlapping_groups
from stator.aot.subclasses import layout_of
from stator.core.events import Compilation, start_compilation
from stator.core.fuel import Fuel
from stator.core.torch_types import Boxed
from stator.errors import OptionError, StatorWarning
from stator.graph.edit import VALUE, WEIGHT
from stator.graph.run import Ctx, run_passes
from stator.options import Options, read_options
from stator.passes.freezing.pack_convolution import pack_convolution
from stator.passes.freezing.pack_linear import pack_linear
from stator.passes.freezing.pack_lstm import pack_lstm
from stator.passes.freezing.take_constants import take_constants
from stator.pipeline import FREEZING, compile_half
from stator.runtime.constants import Set, remake, sets_of
from stator.runtime.discarded import is_discarded
from stator.runtime.making import making
from stator.torch_api import (
    TracingContext,
    is_traceable_wrapper_subclass,
    is_weight,
    unset_fake_temporarily,
)

__all__ = ["freeze", "fw_compiler_freezing", "update_weights"]

# Arguments of PyTorch's function of the same name, for its own compiler.
TORCHS: Final = frozenset(
    {"num_example_inputs", "inner_compile", "cudagraphs", "graph_id", "forward_device"}
)
UNKNOWN: Final = (
    "stator.freeze leaves {} weights as inputs: their values are not known here. Set "
    "torch._dynamo.config.prepare_freezing = True, which lets Dynamo hand them over"
)


def update_weights(compiled: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Give a compiled module other weights: folded and packed anew, nothing is compiled.

    `state_dict` may name some of them only.  Frozen programs change from the old weights to the new
    ones between two calls: one that is under way ends with those it began with.  The module's own
    parameters become the new values as well, unless they were discarded.  On an error nothing has
    changed.
    """
    module = getattr(compiled, "_orig_mod", compiled)
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"a {type(compiled).__name__} has no weights",
            hint="give the module that stator.compile or torch.compile returned",
        )
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    with making, torch.inference_mode(False), torch.no_grad():
        held = {key: part for name, one in named.items() for key, part in _parts(name, one)}
        given = _with_ties(_pairs(named, state_dict), held)
        affected = sets_of(weight for weight, _ in given.values())
        _check_partners(affected, given, held)
        before = [(weight, weight.data) for weight, _ in given.values() if not is_discarded(weight)]
        copies = _copies(given)
        try:
            for weight, _ in before:
                weight.data = copies[id(weight)]
            kept = {id(weight): weight for weight, _ in before}
            remake(affected, {**copies, **kept})
        except BaseException:
            for weight, data in before:
                weight.data = data
            raise


Given: TypeAlias = dict[int, tuple[Tensor, Tensor]]  # weights with their new values, by id


def _with_ties(pairs: Sequence[tuple[Tensor, Tensor]], held: Mapping[str, Tensor]) -> Given:
    """Other parameters in a weight's memory become what it becomes; the last value given counts."""
    alive = [one for one in {id(w): w for w in held.values()}.values() if not is_discarded(one)]
    groups = [[alive[index] for index in group] for group in overlapping_groups(alive)]
    members = {id(one): group for group in groups for one in group}
    given: Given = {}
    for weight, value in pairs:
        for one in members.get(id(weight), [weight]):
            if one is weight or _lie(one) == _lie(weight):
                given[id(one)] = (one, value)
            elif overlapping_groups([one, weight]):
                name, other = _names([weight, one], held)
                raise OptionError(
                    f"weight {name} lies in the memory of {other}, which is laid otherwise",
                    hint="write to it in place, then give all of the weights",
                )
    return given


def _lie(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.size(), weight.stride(), weight.dtype


def _names(weights: Sequence[Tensor], held: Mapping[str, Tensor]) -> list[str]:
    names = {id(weight): name for name, weight in held.items()}
    return [repr(names.get(id(weight), "of another module")) for weight in weights]


def _check_partners(sets: Sequence[Set], given: Given, held: Mapping[str, Tensor]) -> None:
    """What was joined or folded with weights that were discarded is made of all of them."""
    missing = {id(weight): weight for one in sets for weight in one.missing(given)}
    if missing:
        names = ", ".join(_names(list(missing.values()), held))
        raise OptionError(
            f"what is made of these weights is made of {names} too, which were discarded",
            hint="give those as well, or leave discard_parameters off",
        )


def _copies(given: Given) -> dict[int, Tensor]:
    """The new values, of nobody else's; laid as the weights are, one for all in one memory."""
    found: dict[Any, Tensor] = {}
    copies = {}
    for key, (weight, value) in given.items():
        if is_discarded(weight):
            copies[key] = value.detach().to(weight.device, copy=True)
            continue
        if (place := (*_lie(weight), id(value))) not in found:
            with torch.inference_mode(weight.is_inference()):  # with other data it would be neither
                found[place] = _laid_as(weight).copy_(value.detach())
        copies[key] = found[place]
    return copies


def _laid_as(weight: Tensor) -> Tensor:
    """Memory for another weight in the place of this one."""
    shape = weight.size(), weight.stride()
    return torch.empty_strided(*shape, dtype=weight.dtype, device=weight.device)


def _pairs(
    named: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Weights with their new values, all of them checked; parts, where a program takes them."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise OptionError(
            "weights are given by their names",
            hint="give a state_dict(), or a dictionary of some of its entries",
        )
    found = []
    for name, value in state_dict.items():
        own = named.get(name.removeprefix("_orig_mod."))
        if own is None:
            close = difflib.get_close_matches(name, named, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {len(named)} others"
            raise OptionError(f"the module has no weight {name!r}", hint=hint)
        if not isinstance(value, Tensor) or _is_meta(value) or _kind(value) != _kind(own):
            raise OptionError(
                f"weight {name!r} cannot become {_told(value)}",
                hint=f"it is {_told(own)}, which programs were compiled for",
            )
        parts = zip(_parts(name, own), _parts(name, value), strict=True)
        found += [(part, new) for (_, part), (_, new) in parts]
    return found


def _parts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """A weight by its name; of a tensor of a subclass, as quantised weights are, what is inside."""
    if not is_traceable_wrapper_subclass(weight):
        return [(name, weight)]
    keys, _ = weight.__tensor_flatten__()
    inner = [(f"{name}.{key}", getattr(weight, key)) for key in keys]
    return [pair for key, part in inner if isinstance(part, Tensor) for pair in _parts(key, part)]


def _kind(weight: Tensor) -> tuple[Any, ...]:
    parts = [(key, part.size(), part.dtype, part.layout) for key, part in _parts("", weight)]
    return parts, layout_of(weight)


def _is_meta(value: Tensor) -> bool:
    return bool(value.device.type == "meta")


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    cls = f" of {type(value).__name__}" if is_traceable_wrapper_subclass(value) else ""
    laid = "" if value.layout is torch.strided else f", {value.layout}"
    return f"{value.dtype}{list(value.size())}{cls}{laid}{' on meta' if _is_meta(value) else ''}"


def freeze(
    dynamo_gm: fx.GraphModule, aot_gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, list[int]]:
    """A functional inference graph with its weights as attributes, folded and packed.

    Returns the module, which takes fewer inputs, and the positions of those that it still takes.
    Within `aot_autograd`, weights are parameters and buffers that the program neither writes to nor
    returns.  Otherwise they are the example inputs that lie on a module and that no call of the
    graph writes to.  `dynamo_gm`, the graph that Dynamo captured, is left as it is.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(aot_gm.graph, {}))
    frozen = fx.GraphModule(aot_gm, graph, "Frozen")
    ctx = Ctx(Options(freezing=True), Fuel(None), start_compilation())
    weights = _weights(graph, example_inputs, ctx.record)
    values = {number: value for number, value in weights.items() if value is not None}
    if len(values) < len(weights):
        warnings.warn(UNKNOWN.format(len(weights) - len(values)), StatorWarning, stacklevel=2)
    _mark(graph, values)
    run_passes((*FREEZING, pack_linear, pack_convolution, pack_lstm), graph, ctx, "frozen")
    constants = take_constants(graph, frozen=True)
    placeholders = graph.find_nodes(op="placeholder")[len(constants.arguments) :]
    for number, (node, recipe) in enumerate(zip(placeholders, constants.recipes, strict=True)):
        name = f"_frozen_{number}"
        with unset_fake_temporarily():
            made = recipe.make([values[index] for index in recipe.weights])
        frozen.register_buffer(name, made, persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    frozen.recompile()
    return frozen, list(constants.arguments)


def fw_compiler_freezing(
    aot_autograd_model: fx.GraphModule,
    aot_example_inputs: Sequence[Any],
    dynamo_model: fx.GraphModule | None = None,
    **options: Any,
) -> Boxed:
    """A functional inference graph, frozen and compiled: a compiler for `aot_autograd`.

    The function takes all inputs in a list, weights among them, and reads those at its first call.
    Weights are those that `freeze` would take; their values need not be known.  What PyTorch's own
    function is given beside, such as `inner_compile`, is taken and is of no effect.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(aot_autograd_model.graph, {}))
    own = {name: given for name, given in options.items() if name not in TORCHS}
    chosen = read_options(None, {**own, "freezing": True})
    ctx = Ctx(chosen, Fuel(chosen.fuel), start_compilation())
    _mark(graph, _weights(graph, aot_example_inputs, ctx.record))
    module = fx.GraphModule(aot_autograd_model, graph, "Forward")
    run = compile_half(module, "forward", ctx).run

    def boxed(inputs: list[Any]) -> Sequence[Any]:
        return run(inputs)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # how torch knows such functions
    return boxed


def _weights(
    graph: fx.Graph, example_inputs: Sequence[Any], record: Compilation
) -> dict[int, Tensor | None]:
    """Which inputs are weights, by position: their values, or None where these are not known."""
    facts = _inputs_of_trace()
    if facts is None:
        return {n: value for n, value in enumerate(example_inputs) if is_weight(value)}
    params, steady, trains = facts
    values = dict(enumerate(params))
    found = {
        number: values.get(number)
        for number in sorted(steady)
        if number not in values or is_weight(values[number], held=True)
    }
    reason = None
    if trains:
        reason = "gradients are wanted, so that weights will change"
    elif not _are_the_programs_own(graph.find_nodes(op="placeholder"), len(params)):
        reason = "its inputs are not the program's own, one to one"
    elif not found:
        reason = "it has no parameter or buffer that nobody writes to or returns"
    if reason is not None:
        record.notes.append(f"nothing is frozen: {reason}")
        return {}
    return found


def _inputs_of_trace() -> tuple[list[Any], set[int], bool] | None:
    """What PyTorch's own autograd knows of the program that it compiles; None if it does not.

    Parameters and buffers, the first inputs; which inputs stay the same from call to call, nobody
    writing to or returning them; whether gradients are wanted.
    """
    context = TracingContext.try_get()
    if context is None or (facts := context.fw_metadata) is None:
        return None
    params = list(context.params_flat_unwrap_subclasses or ())
    returned = {one.base_idx for one in facts.output_info if "input" in one.output_type.name}
    kinds = enumerate(one.mutation_type.name for one in facts.input_info)
    kept = {n for n, kind in kinds if kind == "NOT_MUTATED"} - returned
    steady = kept & {*range(len(params)), *facts.static_input_indices}
    return params, steady, bool(facts.traced_tangents)


def _are_the_programs_own(inputs: Sequence[fx.Node], params: int) -> bool:
    """Whether the inputs are those of the captured program: parameters, then others, in order.

    Torch's autograd drops some, or merges those that share memory, where one is written to.
    """
    origins = [node.meta.get("desc") for node in inputs]  # what torch says that they are
    firsts, others = origins[:params], origins[params:]
    return all(hasattr(one, "target") for one in firsts) and all(
        getattr(one, "idx", None) == number for number, one in enumerate(others)
    )


def _mark(graph: fx.Graph, weights: Mapping[int, Tensor | None]) -> None:
    """Note on inputs that they are weights, and which, as far as that is known."""
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        if number in weights:
            node.meta[WEIGHT] = True
            if (value := weights[number]) is not None:
                node.meta[VALUE] = weakref.ref(value)
