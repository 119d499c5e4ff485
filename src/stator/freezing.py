"""Frozen programs from outside: new weights for them, and freezing a graph by hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from stator.aot.aliasing import overlapping_groups
from stator.core.events import start_compilation
from stator.core.fuel import Fuel
from stator.core.torch_types import Boxed
from stator.errors import OptionError
from stator.graph.edit import WEIGHT
from stator.graph.run import Ctx, run_passes
from stator.options import Options, read_options
from stator.passes.freezing.pack_convolution import pack_convolution
from stator.passes.freezing.pack_linear import pack_linear
from stator.passes.freezing.pack_lstm import pack_lstm
from stator.passes.freezing.take_constants import take_constants
from stator.pipeline import FREEZING, compile_half
from stator.runtime.constants import Set, making, remake, sets_of
from stator.runtime.discarded import is_discarded
from stator.torch_api import is_weight, parameters_of_trace

__all__ = ["freeze", "fw_compiler_freezing", "update_weights"]


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
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    with making, torch.inference_mode(False), torch.no_grad():
        given = _with_ties(_pairs(held, state_dict), held)
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
            found[place] = _laid_as(weight).copy_(value.detach())
        copies[key] = found[place]
    return copies


def _laid_as(weight: Tensor) -> Tensor:
    """Memory for another weight in the place of this one."""
    shape = weight.size(), weight.stride()
    return torch.empty_strided(*shape, dtype=weight.dtype, device=weight.device)


def _pairs(
    held: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Weights with their new values, all of them checked."""
    found = []
    for name, value in state_dict.items():
        own = held.get(name.removeprefix("_orig_mod."))
        if own is None:
            close = difflib.get_close_matches(name, held, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {len(held)} others"
            raise OptionError(f"the module has no weight {name!r}", hint=hint)
        if not isinstance(value, Tensor) or value.size() != own.size() or value.dtype != own.dtype:
            given = f"{value.dtype}{list(value.size())}" if isinstance(value, Tensor) else value
            raise OptionError(
                f"weight {name!r} cannot become {given}",
                hint=f"it is {own.dtype}{list(own.size())}, which programs were compiled for",
            )
        found.append((own, value))
    return found


def freeze(
    dynamo_gm: fx.GraphModule, aot_gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, list[int]]:
    """A functional inference graph with its weights as attributes, folded and packed.

    Returns the module, which takes fewer inputs, and the positions of those that it still takes.
    Weights are the inputs that lie on a module: those which nobody writes to become constants.
    `dynamo_gm`, the graph that Dynamo captured, is left as it is.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(aot_gm.graph, {}))
    frozen = fx.GraphModule(aot_gm, graph, "Frozen")
    weights = _mark_weights(graph, example_inputs)
    ctx = Ctx(Options(freezing=True), Fuel(None), start_compilation())
    run_passes((*FREEZING, pack_linear, pack_convolution, pack_lstm), graph, ctx, "frozen")
    constants = take_constants(graph, frozen=True)
    placeholders = graph.find_nodes(op="placeholder")[len(constants.arguments) :]
    for number, (node, recipe) in enumerate(zip(placeholders, constants.recipes, strict=True)):
        name = f"_frozen_{number}"
        made = recipe.make([weights[index] for index in recipe.weights])
        frozen.register_buffer(name, made, persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    frozen.recompile()
    return frozen, list(constants.arguments)


def fw_compiler_freezing(
    aot_model: fx.GraphModule,
    aot_example_inputs: Sequence[Any],
    dynamo_model: fx.GraphModule | None = None,
    **options: Any,
) -> Boxed:
    """A functional inference graph, frozen and compiled: a compiler for `aot_autograd`.

    The function takes all inputs in a list, weights among them, and reads those at its first call.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(aot_model.graph, {}))
    _mark_weights(graph, aot_example_inputs)
    chosen = read_options(None, {**options, "freezing": True})
    ctx = Ctx(chosen, Fuel(chosen.fuel), start_compilation())
    return compile_half(fx.GraphModule(aot_model, graph, "Forward"), "forward", ctx).run


def _mark_weights(graph: fx.Graph, example_inputs: Sequence[Any]) -> dict[int, Tensor]:
    """Note which inputs are weights; their tensors by position."""
    real = dict(enumerate(example_inputs)) | dict(enumerate(parameters_of_trace()))
    found = {}
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        if is_weight(value := real.get(number)):
            node.meta[WEIGHT] = True
            found[number] = value
    return found
