"""The whole compiler on one page: stages and pass lists, in order.

0 PRE_GRAD     passes/        rewrites of the torch-level graph that Dynamo captured
1 trace        aot/trace      one functional graph: forward, then backward if something needs it
2 JOINT        passes/        rewrites of that graph
3 partition    aot/partition  cut it in two; the backward starts from what the forward saved
4 POST_GRAD    passes/        rewrites of each half; the backward's when it is first needed
5 plan         runtime/plan   straight line of calls, every value freed behind its last reader
6 executor     runtime/native one function of machine code; runtime/python, one of Python
7 wrappers     aot/wrappers   mutations written back, views made again, gradients connected
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from stator.aot.compile import Tools
from stator.aot.graphs import CompiledGraph
from stator.aot.partition.choose import Wish, choose
from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.report import Choices
from stator.aot.partition.split import Split
from stator.aot.partition.weigh import bytes_of
from stator.cache.verdicts import verdicts_of
from stator.core.events import Compilation
from stator.core.fallback import note_fallback
from stator.core.fuel import Fuel
from stator.core.logs import logger
from stator.core.progress import progress_shown
from stator.core.torch_types import Flat
from stator.core.undisturbed import undisturbed
from stator.graph.capture import GraphRunner, take_callers_line
from stator.graph.edit import CALLERS, DONATED, EXTRAS, PART, mark_donated, spread_lines
from stator.graph.registry import with_registered
from stator.graph.rules import apply_rules
from stator.graph.run import CAPTURED, Ctx, GraphPass, dump_graph, run_passes
from stator.lower.lower import Lowering
from stator.lower.target import target_of
from stator.options import FUELS, Options
from stator.package.planned import Planned
from stator.passes.freezing.drop_casts import drop_casts
from stator.passes.freezing.fold_batch_norm import fold_batch_norm
from stator.passes.freezing.fold_binary import fold_binary
from stator.passes.freezing.int8_convolution import int8_convolution
from stator.passes.freezing.int8_linear import int8_linear
from stator.passes.freezing.int8_weight_only import int8_weight_only
from stator.passes.freezing.join_linears import join_linears
from stator.passes.freezing.note_unkept import note_unkept
from stator.passes.freezing.pack_convolution import pack_convolution
from stator.passes.freezing.pack_linear import pack_linear
from stator.passes.freezing.pack_lstm import pack_lstm
from stator.passes.freezing.take_constants import take_constants
from stator.passes.joint.channels_last import channels_last
from stator.passes.joint.drop_noops import drop_noops
from stator.passes.joint.fold_uniform import fold_uniform
from stator.passes.joint.narrow_indices import narrow_indices
from stator.passes.joint.pad_mm import pad_mm
from stator.passes.joint.seed_random import seed_random
from stator.passes.joint.share_forward import share_forward
from stator.passes.joint.spell_softmax import spell_softmax
from stator.passes.post_grad.add_into_convolution import add_into_convolution
from stator.passes.post_grad.cancel_cat_split import cancel_cat_split
from stator.passes.post_grad.drop_vectors import drop_vectors
from stator.passes.post_grad.fold_cumsum import fold_cumsum
from stator.passes.post_grad.fuse_conv_activation import fuse_conv_activation
from stator.passes.post_grad.hold_to_promise import hold_to_promise
from stator.passes.post_grad.linear_to_onednn import linear_to_onednn
from stator.passes.post_grad.reorder_for_memory import reorder_for_memory
from stator.passes.post_grad.share_subexpressions import share_subexpressions
from stator.passes.post_grad.unroll_foreach import unroll_foreach
from stator.passes.post_grad.write_in_place import write_in_place
from stator.passes.pre_grad.fuse_attention import fuse_attention
from stator.passes.pre_grad.normalize_keywords import normalize_keywords
from stator.passes.pre_grad.settle_dropout import settle_dropout
from stator.passes.pre_grad.spell_dropout import spell_dropout
from stator.rules.algebra import ALGEBRA
from stator.rules.views import VIEWS
from stator.runtime.constants import Furnished, with_constants
from stator.runtime.cuda_graphs import Recordable
from stator.runtime.dump import program_text
from stator.runtime.fused import begin_workers, plan_kernels
from stator.runtime.loading import Awaited, Loading
from stator.runtime.memory import (
    Memory,
    Own,
    home_of_one,
    homes,
    memory_text,
    plan_memory,
    predicted,
)
from stator.runtime.native.executor import compile_native, load_native, native_program
from stator.runtime.native.image import why_not_native
from stator.runtime.native.prelude import hold_no_spare
from stator.runtime.plan import Plan, make_plan
from stator.runtime.python import load_plan
from stator.runtime.recordable import recordable
from stator.runtime.recorded import Recorded, Recordings
from stator.runtime.verified import Watch
from stator.runtime.watching import note_plan, ranges_of, watch_of
from stator.torch_api import LazyGraphModule

log: Final = logger("memory")

PRE_GRAD: Final[tuple[GraphPass, ...]] = (
    normalize_keywords,  # first: the others ask for arguments by torch's names
    settle_dropout,  # the one place where its torch function is still whole
    spell_dropout,  # of what draws numbers
    fuse_attention,  # before differentiation: torch's attention has a backward of its own
)

JOINT: Final[tuple[GraphPass, ...]] = (
    drop_noops,  # first: rules see what stands behind views that change nothing
    spell_softmax,  # before the cut: the steps that a backward had best compute again
    fold_uniform,  # before the cut: the backward reads less of the forward
    apply_rules("simplify_views", VIEWS),
    apply_rules("simplify_algebra", ALGEBRA),  # views that stood between two steps are gone
    narrow_indices,  # before the cut: a quarter of the bytes or less is kept of them
    pad_mm,  # both directions, whose products have the same odd sizes
    channels_last,  # before the cut: what the backward reads lies the same way
    seed_random,  # random operators become pure: kernels take them in, the backward draws again
    share_forward,  # last: the others make more calls equal
)

FREEZING: Final[tuple[GraphPass, ...]] = (
    int8_linear,  # first: what folds into floats, or joins them, would hide the integers
    int8_convolution,
    int8_weight_only,  # the cast of the weight is its sign
    drop_casts,  # a cast between a product and its constant hides the one from the other
    drop_noops,  # the copies that casts leave
    fold_batch_norm,
    fold_binary,  # and batch norms behind what it folds
    share_subexpressions,  # autocast casts one input for each product that reads it
    join_linears,  # last: what was folded into one of several products is in its weight
)

POST_GRAD: Final[tuple[GraphPass, ...]] = (
    unroll_foreach,  # first: the others, and the fuser, see single tensors
    drop_noops,  # again: copies of what the caller holds can go now that nothing is saved
    share_subexpressions,  # of single tensors that differ in no view: more calls are equal
    drop_vectors,  # before anything looks at how large results are
    cancel_cat_split,  # equal parts are one by now, and so are seen to be all of one tensor
    fold_cumsum,  # before the plan: a product joins the kernels around, a running sum does not
    write_in_place,  # behind all that makes values have fewer readers
    pack_linear,  # what has no weight, or gains nothing, is left to the next one
    linear_to_onednn,
    fuse_conv_activation,
    pack_convolution,  # with the activation inside
    add_into_convolution,  # of those that oneDNN computes
    pack_lstm,
    hold_to_promise,  # late: what others might move or merge stands between
    reorder_for_memory,  # last: it counts what is left
)


# After these a graph gives the same bits.  A pass that does not stand here is left out where
# `Options.numerics` asks for eager's.
KEEPS_BITS: Final = frozenset(
    {
        *("normalize_keywords", "settle_dropout", "spell_dropout", "drop_noops"),
        *("simplify_views", "unroll_foreach", "share_subexpressions", "drop_vectors"),
        *("narrow_indices", "share_forward"),
        *("cancel_cat_split", "write_in_place", "hold_to_promise", "reorder_for_memory"),
    }
)


def bits_changed_by() -> tuple[str, ...]:
    """The names of our passes after which results may differ in their last bits."""
    names = (pass_.__name__ for pass_ in (*PRE_GRAD, *JOINT, *FREEZING, *POST_GRAD))
    return tuple(dict.fromkeys(name for name in names if name not in KEEPS_BITS))


def prepare(module: fx.GraphModule, lifted: list[str], tools: Tools) -> Flat:
    """A captured graph as a program to trace: rewritten, its tensors being further arguments."""
    own = LazyGraphModule(module, copy.deepcopy(module.graph), "Captured")  # Dynamo keeps its own
    take_callers_line(own.graph)
    run_passes(with_registered("pre_grad", PRE_GRAD), own.graph, tools.ctx, CAPTURED)
    return GraphRunner(own, lifted)


def expected_stages(options: Options) -> int:
    """How many stages a program without a backward goes through, about."""
    frozen = len(FREEZING) if options.freezing else 0
    return len(PRE_GRAD) + len(JOINT) + len(POST_GRAD) + frozen + 4


def make_tools(
    options: Options,
    record: Compilation,
    examples: Sequence[Any] = (),
    weights: Mapping[int, Any] | None = None,
    recordings: Recordings | None = None,
) -> Tools:
    """The compiler, set up for one compilation.

    `examples` are inputs to check passes with; `weights` are those inputs that stay the same from
    call to call, by position.  `recordings` are those of programs that this one belongs to.
    """
    if options.has_eager_bits:
        options = replace(options, skip=(*options.skip, *bits_changed_by()))
    on_gpu = any(isinstance(given, torch.Tensor) and given.is_cuda for given in examples)
    if on_gpu and options.kernels:
        begin_workers()
    kept = tuple(examples) if options.verify_passes == "values" else ()
    log, label = options.fuel_log, f"compilation {record.number}"
    fuel = Fuel(options.fuel, log=log, label=label)
    pass_fuel = Fuel(options.pass_fuel, log=log, label=f"{label}, passes")
    kernel_fuel = Fuel(options.kernel_fuel, log=log, label=f"{label}, operators")
    ctx = Ctx(options, fuel, record, kept, pass_fuel, kernel_fuel)

    recordings = (recordings or Recordings(record.notes)) if options.cuda_graphs else None

    def compile_graph(module: fx.GraphModule, name: str) -> CompiledGraph:
        with progress_shown(record, len(POST_GRAD) + 2, wanted=options.progress):
            return compile_half(module, name, ctx, recordings)

    def pick(joint: Joint, classes: Classes, build: Callable[[Cut], Split]) -> Cut:
        bounded = options.memory_limit is not None or options.memory_budget < 1
        foresee = (lambda cut: foreseen_peak(build(cut), ctx)) if bounded else None
        return choose(joint, classes, _wish(options, record), foresee)

    joint = with_registered("joint", JOINT if options.kernels else ())
    # Only what freezes looks at weights; torch swaps no tensor that somebody refers to weakly.
    refer = weakref.ref if options.freezing else lambda _: None
    held = {number: refer(weight) for number, weight in (weights or {}).items()}
    return Tools(ctx, compile_graph, pick, joint, held)


def _wish(options: Options, record: Compilation) -> Wish:
    """What the options say of memory."""
    assert not isinstance(options.memory_limit, str), "options are read"

    def report(choices: Choices) -> None:
        record.choices = choices

    return Wish(
        kernels=options.kernels,
        budget=options.memory_budget,
        limit=options.memory_limit,
        aggressive=options.aggressive_recomputation,
        policy=options.save_policy,
        profile=options.recompute_costs == "profile",
        knapsack=options.knapsack,
        report=report if options.explain_memory else None,
    )


def foreseen_peak(halves: Split, ctx: Ctx) -> int:
    """Bytes that a step under a cut would hold at most, from finished plans."""
    record = Compilation(inputs=halves.inputs, outputs=halves.outputs)
    free: dict[str, Any] = {name: Fuel(None) for name in FUELS}
    trial = replace(ctx, record=record, options=replace(ctx.options, dump_dir=None), **free)
    for module, name in ((halves.forward, "forward"), (halves.backward, "backward")):
        if module is not None:
            graph = fx.Graph()
            output = graph.output(graph.graph_copy(module.graph, {}))
            output.meta = dict(module.graph.output_node().meta)
            if name == "backward":
                mark_donated(graph, len(halves.saved))
            copied = LazyGraphModule(module, graph, name)
            run_passes(with_registered("post_grad", POST_GRAD), copied.graph, trial, name)
            _planned(copied, name, trial, loads=False)
    peak = record.step_peak
    return halves.inputs + record.peaks["forward"] if peak is None else peak


@undisturbed
def compile_half(
    module: fx.GraphModule, name: str, ctx: Ctx, recordings: Recordings | None = None
) -> CompiledGraph:
    """From a forward or backward graph to a function that runs it; by `recordings`, if any."""
    if ctx.options.freezing:
        run_passes(FREEZING, module.graph, ctx, name)
    run_passes(with_registered("post_grad", POST_GRAD), module.graph, ctx, name)
    freezing, discards = ctx.options.freezing, ctx.options.discard_parameters
    if freezing:
        note_unkept(module.graph, ctx)
    constants = take_constants(module.graph, frozen=freezing, discards=discards)
    plan, compiled = _built(module, name, ctx)
    if recordings is not None and plan.on_gpu and ctx.options.verify != "kernels":
        compiled = _recorded(compiled, recordable(module.graph, plan), recordings, name)
    else:
        over = tuple(place for place, given in enumerate(plan.inputs) if given in plan.donated)
        compiled = replace(compiled, overwrites=over)
    if not constants.are_needed:
        return compiled
    image = None if compiled.image is None else Furnished(compiled.image, constants)
    return replace(compiled, run=with_constants(compiled.run, constants), image=image)


def _built(module: fx.GraphModule, name: str, ctx: Ctx) -> tuple[Plan, CompiledGraph]:
    """A rewritten graph planned, and a function; if kernels cannot be built, torch runs all."""
    plan, memory, label = _planned(module, name, ctx)
    try:
        return plan, _executor(module, plan, memory, (name, label), ctx)
    except Exception as error:
        if not isinstance(plan.entries, Awaited):  # kernels were built before
            raise
        note_fallback(error, ctx.record, ctx.options.strict)
    return _built(module, name, replace(ctx, options=replace(ctx.options, kernels=False)))


def _recorded(
    compiled: CompiledGraph, facts: Recordable, recordings: Recordings, name: str
) -> CompiledGraph:
    """The graph with its calls recorded; what it stores over, recordings copy."""
    image = None if compiled.image is None else Recorded(compiled.image, facts)
    return CompiledGraph(recordings.of(compiled.run, facts, name), image)


def plan_library(module: fx.GraphModule, ctx: Ctx, name: str = "forward") -> Planned:
    """The graph of a library, rewritten and planned; its kernels are not compiled."""
    ctx = replace(ctx, has_python=False)
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta.pop(DONATED, None)  # whoever calls a library may keep what he gives
    if ctx.options.freezing:
        run_passes(FREEZING, module.graph, ctx, name)
    run_passes(with_registered("post_grad", POST_GRAD), module.graph, ctx, name)
    constants = take_constants(module.graph, frozen=ctx.options.freezing)
    plan, memory, _ = _planned(module, name, ctx, loads=False)
    return Planned(plan, memory, constants)


def _planned(
    module: fx.GraphModule, name: str, ctx: Ctx, *, loads: bool = True
) -> tuple[Plan, Memory, str]:
    """A rewritten graph, planned; the record knows what it will hold."""
    label = dump_graph(module.graph, ctx, name)
    spread_lines(module.graph)
    with ctx.record.stage(f"{name}/plan", len(module.graph.nodes)) as progress:
        plan = _plan(module, label, ctx, loads)
        progress.nodes = len(plan.steps)
    memory = plan_memory(plan)
    ctx.dump.write(f"{label}_plan.txt", lambda: f"{plan}\n\n{memory_text(plan, memory)}\n")
    own = _dying_inputs(module.graph, ctx.record)
    held = ctx.record.held[name] = predicted(plan, memory, own)
    extras = module.graph.output_node().meta.get(EXTRAS, ())
    ctx.record.homes |= homes(plan, memory, extras)
    ctx.record.peaks[name] = held.all
    log.debug("%s: %d bytes in an arena, %d at the peak", label, held.arena, held.all)
    return plan, memory, label


def _dying_inputs(graph: fx.Graph, record: Compilation) -> list[Own]:
    """Inputs of a backward that nobody but the call holds, those in one memory together."""
    own: dict[str, Own] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get(CALLERS) is False:
            size = bytes_of(node.meta.get("val"))
            home = record.homes.get(node.name) or home_of_one(node.name, size, node.meta[PART])
            names = own[home.owner].names if home.owner in own else ()
            own[home.owner] = Own((*names, node.name), home.bytes, home.by_torch)
    return list(own.values())


def _executor(
    module: fx.GraphModule, plan: Plan, memory: Memory, names: tuple[str, str], ctx: Ctx
) -> CompiledGraph:
    """A function that runs the plan: native where the options and the machine allow."""
    with ctx.record.stage(f"{names[0]}/executor", len(plan.steps)):
        return _running(module, plan, memory, names, ctx)


def _running(
    module: fx.GraphModule, plan: Plan, memory: Memory, names: tuple[str, str], ctx: Ctx
) -> CompiledGraph:
    name, label = names
    if ctx.options.verify == "kernels":
        ctx.record.notes.append(f"{name}: runs from Python, each kernel beside eager")
        return CompiledGraph(load_plan(plan, name, Watch(module, plan, name)))
    ctx.dump.write(f"{label}_program.py", lambda: program_text(plan, load_plan(plan, name)))
    times = note_plan(plan, memory, label, ctx.record)
    ranges = ranges_of(plan, ctx.options, ctx.record)
    reason = _why_python(plan, ctx.options) or why_not_native(plan.device.type)
    if reason is None:
        ctx.dump.write(f"{label}_host.ll", lambda: native_program(plan, memory).text)
        watch = watch_of(plan, ranges, times)
        image = compile_native(plan, memory, watch, ctx.record.held[name])
        if ctx.options.saves_memory:
            hold_no_spare()
        return CompiledGraph(load_native(plan, image, name), image)
    ctx.record.notes.append(f"{name}: runs from Python: {reason}")
    return CompiledGraph(load_plan(plan, name, ranges=ranges))


def _why_python(plan: Plan, options: Options) -> str | None:
    if options.codegen == "triton" and plan.device.type == "cpu":
        return "Triton's interpreter is Python"
    return "Options.executor" if options.executor == "python" else None


def _plan(module: fx.GraphModule, name: str, ctx: Ctx, loads: bool) -> Plan:
    """With native kernels where the options allow; if they cannot be built, torch runs all."""
    if ctx.options.kernels:
        try:
            as_eager = ctx.options.has_eager_bits
            target = target_of(module.graph, ctx.options.codegen)
            lowering = Lowering(module, fuel=ctx.kernel_fuel, as_eager=as_eager, target=target)
            verdicts = verdicts_of(ctx.options) if ctx.options.tune and target.on_gpu else None
            loading = Loading(loads, verdicts)
            return plan_kernels(
                module, ctx.record, name, ctx.dump, loading=loading, lowering=lowering
            )
        except Exception as error:
            note_fallback(error, ctx.record, ctx.options.strict)
    return make_plan(module)
