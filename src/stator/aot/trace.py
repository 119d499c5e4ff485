"""One trace: the forward, what it mutates and aliases, and its backward, as one functional graph.

The program runs once, on fake tensors, under three layers: autograd on top, functionalization below
it, the recorder at the bottom.  When the forward is through, the functional tensors tell what was
mutated and what aliases what; from that follows which values get a tangent; the tangents enter as
further placeholders, and autograd writes the backward into the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta

from stator.aot.backward import (
    Enter,
    carry_lines,
    history,
    is_custom,
    placeholders_first,
    plan_tangent,
    tangent_like,
    tangent_name,
)
from stator.aot.metadata import (
    InputFact,
    Mutation,
    OutputFact,
    Program,
    Source,
    TangentPlan,
    ValueFact,
)
from stator.aot.norms import RESPELLED
from stator.aot.observe import Before, Observed, observe
from stator.aot.quick import Recorded, record, why_not_quick
from stator.aot.statistics import settle_statistics
from stator.aot.subclasses import (
    Layout,
    Plain,
    Wrapped,
    layout_of,
    put_together,
    take_apart,
    width,
)
from stator.aot.tokens import strip_tokens
from stator.aot.views import View, geometry_between, steps_between
from stator.core.torch_types import Flat
from stator.errors import Unsupported
from stator.graph.edit import draws_numbers
from stator.graph.generators import gpus_of
from stator.graph.verify import note_line
from stator.torch_api import (
    SIZE_RULES,
    CountListWrites,
    FakeTensorMode,
    LazyGraphModule,
    autocast_cache_off,
    autocast_off,
    detached,
    disable_functional_mode,
    disable_proxy_modes_tracing,
    from_functional,
    functionalization,
    get_proxy_mode,
    is_missing_derivative,
    make_fx,
    python_dispatcher,
    saved_tensor_hooks_off,
    to_functional,
    track_tensor_tree,
)


@dataclass(slots=True)
class Traced:
    """A joint graph: placeholders are primals, then tangents; it returns values, then gradients."""

    module: fx.GraphModule
    program: Program
    primals: list[fx.Node]
    tangents: list[fx.Node]
    updated: list[int]  # positions of primals that the graph itself writes to
    backward_error: RuntimeError | None  # what eager raises when it is asked for gradients
    custom_backward: bool  # some operator's derivative is the user's: it may not be linear
    why_full: str | None = None  # why a quick trace, which is tried first, did not do

    # Passes may replace what the graph returns: it is read from there.

    @property
    def values(self) -> list[Any]:
        """Nodes of the program's values, taken apart; constants stand as they are."""
        return list(self._returned[0])

    @property
    def updates(self) -> list[tuple[fx.Node, Any]]:
        """Placeholders that the graph writes to, each with its new value."""
        return [(self.primals[index], self._returned[1][index]) for index in self.updated]

    @property
    def grads(self) -> list[Any]:
        """Nodes or None; behind them, new values of inputs that the backward writes to."""
        return list(self._returned[3])

    @property
    def _returned(self) -> Any:
        (output,) = self.module.graph.find_nodes(op="output")
        return output.args[0]


def trace(
    function: Flat,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    *,
    as_eager: bool = False,
    may_run_again: bool = False,
) -> Traced:
    """Trace `function` on fake `inputs`, with its backward where grad mode is on and it matters.

    `as_eager`: operators are taken apart as eager does it, wherever sizes are plain numbers.  Where
    they are symbols, some have Python implementations with other formulas.  `may_run_again`: it is
    a captured graph, so that a quick trace may be tried first.
    """
    with ExitStack() as stack:
        for context in (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(
                torch.is_grad_enabled()
            ),  # restored even if the program changes it
            torch.autograd.set_multithreading_enabled(False),
            torch.autograd.set_detect_anomaly(False),  # it would look at values
            autocast_cache_off(),
            saved_tensor_hooks_off(),
            preserve_node_meta(),
            python_dispatcher(mode.shape_env is not None and not (as_eager and _is_static(inputs))),
            mode,  # the program's own new tensors are fake too
        ):
            stack.enter_context(context)
        reason = why_not_quick(inputs) if may_run_again else None
        if may_run_again and reason is None:
            quick = record(function, inputs)
            if not isinstance(quick, str):
                return _traced_quickly(quick)
            reason = quick
        tracer = _Tracer(function, inputs, mode)
        module = make_fx(tracer.joint, RESPELLED)(*tracer.plain)
    refuse_guessed_sizes(module.graph)
    traced = tracer.finish(module)
    traced.why_full = reason
    return traced


aten = torch.ops.aten
UNTAGGED: Final = aten._unique.default  # of which torch 2.11 does not say so


def refuse_guessed_sizes(graph: fx.Graph) -> None:
    """Raise where a size that depends on values is a plain number.

    Where torch has no rule for an operator's result, it runs the operator on zeros and takes the
    sizes that come out for the true ones: torch 2.11 does so with aten._unique.
    """
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.dynamic_output_shape not in tags and node.target is not UNTAGGED:
            continue
        if node.target.has_kernel_for_dispatch_key(SIZE_RULES):
            continue  # plain sizes are found where values do not matter
        value = node.meta["val"]
        tensors = [value] if isinstance(value, torch.Tensor) else value
        if not any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.size()):
            raise Unsupported(
                "trace",
                f"{node.target} gives tensors whose sizes depend on values, and this torch has no "
                "rule for them",
                where=node.stack_trace,
                hint="a newer torch may have one; the graph runs in eager mode",
            )


def _traced_quickly(found: Recorded) -> Traced:
    """What the full trace would give."""
    refuse_guessed_sizes(found.graph)
    settle_statistics(found.graph)
    module = LazyGraphModule(torch.nn.Module(), found.graph, "Traced")
    return Traced(
        module,
        found.program,
        found.primals,
        found.tangents,
        found.updated,
        backward_error=None,
        custom_backward=False,
    )


def _is_static(inputs: Sequence[Any]) -> bool:
    """Whether all sizes are plain numbers."""
    sizes = [
        number
        for value in inputs
        if isinstance(value, torch.Tensor)
        for number in (*value.size(), value.storage_offset())
    ]
    return not any(isinstance(one, torch.SymInt) for one in (*inputs, *sizes))


@dataclass(slots=True)
class _Tracer:
    function: Flat
    inputs: Sequence[Any]
    mode: FakeTensorMode
    layouts: list[Layout] = field(init=False)
    plain: list[Any] = field(init=False)
    roots: list[Any] = field(init=False, default_factory=list)
    seen: Observed = field(init=False, default_factory=Observed)
    tangent_plans: list[TangentPlan] = field(init=False, default_factory=list)
    grad_layouts: list[Layout | None] = field(init=False, default_factory=list)
    grad_mode_after: bool | None = field(init=False, default=None)
    view_outputs: list[int] = field(init=False, default_factory=list)
    backward_error: RuntimeError | None = field(init=False, default=None)
    custom_backward: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.layouts = [layout_of(value) for value in self.inputs]
        self.plain = []
        with torch.no_grad():
            for value, layout in zip(self.inputs, self.layouts, strict=True):
                self.plain += [detached(part) for part in take_apart(value, layout)]

    # --- runs under make_fx ---

    def joint(self, *plain: Any) -> tuple[list[Any], ...]:
        """Forward and backward on functional tensors; returns plain ones for the recorder."""
        with functionalization():
            entered = self._enter(plain)
            outer = self._outer(plain)
            before = [Before.of(*pair) for pair in zip(entered, outer, strict=True)]
            grad_mode = torch.is_grad_enabled()
            with CountListWrites():
                outputs = list(self.function(*entered))
            if torch.is_grad_enabled() != grad_mode:
                self.grad_mode_after = torch.is_grad_enabled()
                torch.set_grad_enabled(grad_mode)
            self.seen = observe(entered, before, outputs)
            for node in _recorder().graph.nodes:
                node.meta["in_forward"] = True
            values = [
                part
                for value in self.seen.values
                for part in take_apart(*_plain_with_layout(value.tensor))
            ]
            now = [part for value in entered for part in take_apart(*_plain_with_layout(value))]
            views = self._views(outputs)
            grads = self._backward(values)
            late = [part for value in entered for part in take_apart(*_plain_with_layout(value))]
        return values, now, views, grads, late

    def _outer(self, plain: Sequence[Any]) -> list[Any]:
        stream = iter(plain)
        return [put_together(layout, stream) for layout in self.layouts]

    def _enter(self, plain: Sequence[Any]) -> list[Any]:
        """Inputs as the program sees them: functional, and leaves where the user's are."""
        stream = iter(plain)
        entered = []
        for value, layout in zip(self.inputs, self.layouts, strict=True):
            parts = [next(stream) for _ in range(width(layout))]

            def make(parts: list[Any] = parts, layout: Layout = layout) -> Any:
                return put_together(layout, iter([to_functional(part) for part in parts]))

            root = make()
            if isinstance(value, torch.Tensor) and value.requires_grad:
                root.requires_grad_()
            self.roots.append(root)
            if isinstance(root, torch.Tensor) and root.requires_grad and not value.is_leaf:
                with torch.enable_grad():
                    entered.append(Enter.apply(root, make))
            else:
                entered.append(root)
        return entered

    def _views(self, outputs: Sequence[Any]) -> list[Any]:
        """Present values of all outputs that are views, so that their nodes can be found."""
        self.view_outputs = [
            index
            for index, fact in enumerate(self.seen.outputs)
            if fact.source in (Source.VIEW_OF_INPUT, Source.VIEW_OF_VALUE)
        ]
        return [from_functional(outputs[index]) for index in self.view_outputs]

    def _backward(self, values: Sequence[Any]) -> list[Any]:
        stream = iter(values)
        outputs, tangents = [], []
        for value in self.seen.values:
            layout = layout_of(value.tensor)
            parts = [next(stream) for _ in range(width(layout))]
            if not value.differentiable:
                continue
            outputs.append(value.tensor)
            if isinstance(layout, Wrapped):
                parts, layout = self._expected(put_together(layout, iter(parts)))
            self.tangent_plans.append(plan_tangent(value.tensor, layout))
            fresh = [self._tangent(p) if isinstance(p, torch.Tensor) else p for p in parts]
            tangents.append(put_together(layout, iter([to_functional(part) for part in fresh])))
        needs = [isinstance(root, torch.Tensor) and root.requires_grad for root in self.roots]
        if not outputs or not any(needs):
            self.tangent_plans.clear()
            self.grad_layouts = [None] * len(self.roots)
            return []
        wanted = [root for root, need in zip(self.roots, needs, strict=True) if need]
        behind = list(history(outputs))
        self.custom_backward = any(map(is_custom, behind))
        carry_lines(behind, _recorder().graph)
        try:
            with autocast_off():  # eager differentiates outside of the autocast region
                found = iter(torch.autograd.grad(outputs, wanted, tangents, allow_unused=True))
        except RuntimeError as error:
            if not is_missing_derivative(error):
                _note_guilty(error, _recorder().graph)
                raise
            self.backward_error = error
            self.grad_layouts = [None] * len(self.roots)
            return []
        grads: list[Any] = []
        for need in needs:
            grad = next(found) if need else None
            if grad is None:
                self.grad_layouts.append(None)
                continue
            plain, layout = _plain_with_layout(grad)
            self.grad_layouts.append(layout)
            grads += take_apart(plain, layout)
        return grads

    def _expected(self, value: torch.Tensor) -> tuple[list[Any], Layout]:
        """The parts and layout that a subclass wants the tangent of `value` to have."""
        coerce = getattr(value, "__coerce_tangent_metadata__", None)
        if coerce is not None:
            with disable_functional_mode(), disable_proxy_modes_tracing(), self.mode:
                value = coerce()
        layout = layout_of(value)
        return take_apart(value, layout), layout

    def _tangent(self, like: Any) -> Any:
        """A new placeholder with the geometry of `like`."""
        with disable_functional_mode(), disable_proxy_modes_tracing(), self.mode:
            tangent = tangent_like(like)
        recorder = _recorder()
        name = tangent_name(recorder.graph)
        proxy = recorder.create_proxy("placeholder", name, (), {}, name=name)
        track_tensor_tree(tangent, proxy, constant=None, tracer=recorder)
        return tangent

    # --- after the trace ---

    def finish(self, module: fx.GraphModule) -> Traced:
        """Tidy the graph up and say what it does."""
        graph = module.graph
        strip_tokens(graph)
        settle_statistics(graph)
        placeholders_first(graph)
        placeholders = graph.find_nodes(op="placeholder")
        primals, tangents = placeholders[: len(self.plain)], placeholders[len(self.plain) :]
        (output,) = graph.find_nodes(op="output")
        values, now, views, grads, late = (list(group) for group in output.args[0])
        program = self._program(graph, now, views, values)  # which may add to the values
        written = self._written_late(now, late)
        program = replace(program, written_late=tuple(written))
        grads += written.values()
        output.args = ((values, now, views, grads),)
        return Traced(
            module,
            program,
            primals,
            tangents,
            self._updated(primals, now, program),
            self.backward_error,
            self.custom_backward,
        )

    def _updated(self, primals: list[fx.Node], now: list[Any], program: Program) -> list[int]:
        updated = []
        position = 0
        for fact in program.inputs:
            for index in range(position, position + width(fact.layout)):
                if fact.mutation.name == "IN_GRAPH" and now[index] is not primals[index]:
                    updated.append(index)
            position += width(fact.layout)
        return updated

    def _written_late(self, now: list[Any], late: list[Any]) -> dict[int, fx.Node]:
        """Inputs that the backward writes to, each with its new value."""
        written: dict[int, fx.Node] = {}
        if not self.tangent_plans or self.backward_error is not None:
            return written
        pairs = iter(zip(now, late, strict=True))
        for index, layout in enumerate(self.layouts):
            for before, after in (next(pairs) for _ in range(width(layout))):
                if before is after or not isinstance(_value(after), torch.Tensor):
                    continue
                if why := self._why_not_late(index, before, after):
                    raise Unsupported("trace", f"a backward writes to an input {why}")
                written[index] = after
        return written

    def _why_not_late(self, index: int, before: fx.Node, after: fx.Node) -> str | None:
        """None if a backward may write to an input; otherwise what that input is."""
        if not isinstance(self.layouts[index], Plain):
            return "that is a subclass"
        if self.seen.mutations[index] is not Mutation.NONE:  # which of many values would it read?
            return "that the forward writes to"
        return "and changes its size" if _value(before).size() != _value(after).size() else None

    def _program(
        self, graph: fx.Graph, now: list[Any], views: list[Any], values: list[Any]
    ) -> Program:
        inputs = tuple(
            InputFact(
                layout,
                requires_grad=isinstance(value, torch.Tensor) and value.requires_grad,
                is_leaf=not isinstance(value, torch.Tensor) or value.is_leaf,
                mutation=mutation,
                bumps=bumps,
            )
            for value, layout, mutation, bumps in zip(
                self.inputs, self.layouts, self.seen.mutations, self.seen.bumps, strict=True
            )
        )
        trains = bool(self.tangent_plans)
        facts = [
            ValueFact(
                layout_of(value.tensor),
                value.differentiable and trains,
                value.of_input,
                value.of_output,
                value.is_base,
            )
            for value in self.seen.values
        ]
        outputs = list(self.seen.outputs)
        resolver = _ViewResolver(inputs, facts, now, values)
        for index, node in zip(self.view_outputs, views, strict=True):
            fact = resolver.resolve(outputs[index], node)
            assert fact.view is not None, "resolving gives a view"
            if fact.requires_grad and index in self.seen.without_history:
                fact = replace(fact, view=replace(fact.view, no_grad=True))
            outputs[index] = fact
        drawing = [node for node in graph.nodes if draws_numbers(node)]
        return Program(
            inputs,
            tuple(outputs),
            tuple(facts),
            tuple(self.tangent_plans),
            tuple(self.grad_layouts),
            self.grad_mode_after,
            bool(drawing),
            gpus_of(drawing),
        )


def _note_guilty(error: RuntimeError, graph: fx.Graph) -> None:
    """An error of the backward that names an operator: its line is that of the forward's."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in str(error):
            note_line(error, node)


def _recorder() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "traced code runs under make_fx"
    return mode.tracer


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _plain_with_layout(value: Any) -> tuple[Any, Layout]:
    plain = from_functional(value)
    return plain, layout_of(plain)


@dataclass(slots=True)
class _ViewResolver:
    """Finds how each aliasing output is made from its base."""

    inputs: tuple[InputFact, ...]
    facts: list[ValueFact]
    now: list[Any]
    values: list[Any]

    def resolve(self, fact: OutputFact, view: fx.Node) -> OutputFact:
        """`fact` with its view; the graph returns the view too where nothing else describes it."""
        if fact.source is Source.VIEW_OF_INPUT:
            info = self.inputs[fact.index]
            base = self.now[self._position([f.layout for f in self.inputs], fact.index)]
            base_grad = info.requires_grad
        else:
            base = self.values[self._position([f.layout for f in self.facts], fact.index)]
            base_grad = self.facts[fact.index].differentiable
        detach = base_grad and not fact.requires_grad
        steps = steps_between(base, view)
        if steps is not None:
            return replace(fact, view=View(steps=steps, detach=detach))
        geometry = geometry_between(base.meta["val"], view.meta["val"])
        if geometry is not None:
            return replace(fact, view=View(geometry=geometry, detach=detach))
        self.values.append(view)
        self.facts.append(ValueFact(layout_of(view.meta["val"]), differentiable=False))
        return replace(fact, view=View(template=len(self.facts) - 1, detach=detach))

    @staticmethod
    def _position(layouts: Sequence[Layout], index: int) -> int:
        return sum(width(layout) for layout in layouts[:index])
