"""Bugs to put into the compiler, by its fault hooks: 60, of all kinds, at all places.

Each triggers on operators that a graph may hold, like a bug would.  `plant` is what `STATOR_FAULT`
names in processes that are started: `benchmarks.bugs:plant:NUMBER`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.core import faults
from stator.core.dtypes import DType
from stator.core.fuel import Fuel
from stator.graph.build import Builder
from stator.loops.access import nodes
from stator.loops.build import Body
from stator.loops.index import Index
from stator.loops.ir import Apply, Kernel
from stator.loops.prims import Prim
from stator.loops.values import Value

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug: where it strikes, what it does, and who is to blame for it."""

    name: str
    kind: str  # as `Failure.kind`
    place: str  # of the hook
    fault: Callable[..., Any]
    blame: str  # what bisection must say: the pass or rule, or the operator
    dynamic: bool = False  # with symbolic sizes alone

    @property
    def takes_process(self) -> bool:
        """Whether whoever compiles or runs a graph with it hangs or dies."""
        return self.kind == "hang" or self.name.endswith(into_nowhere.__name__)

    @property
    def stage(self) -> str:
        """What bisection must call the guilty step."""
        return "rewrite" if self.place in ("pass", "rule") else "kernel"


# --- what goes wrong ---


def forever() -> None:
    """Never end."""
    while True:
        time.sleep(0.05)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node's value has a size that is a symbol."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def chain(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    """Whether a node and its first arguments, going back, are calls of `targets`."""
    for target in reversed(targets):
        if not isinstance(node, fx.Node) or node.target is not target:
            return False
        node = node.args[0] if node.args else None
    return True


def bad_pass(
    name: str, targets: tuple[Any, ...], harm: Callable[[fx.Graph, fx.Node], None], dynamic: bool
) -> Callable[..., Any]:
    """A pass that does harm wherever it finds a chain of calls; it spends fuel, as passes do."""

    def fault(changed: int, running: str, graph: fx.Graph, fuel: Fuel) -> int:
        if running != name:
            return changed
        for node in list(graph.nodes):
            fits = chain(node, targets) and (is_symbolic(node) or not dynamic)
            if fits and not node.meta.get("harmed") and fuel.spend(f"{name}: {node.name}"):
                node.meta["harmed"] = True
                harm(graph, node)
                changed += 1
        return changed

    return fault


def put_instead(function: Callable[..., Any]) -> Callable[[fx.Graph, fx.Node], None]:
    """Let `function` of the same arguments stand for a node."""

    def harm(graph: fx.Graph, node: fx.Node) -> None:
        builder = Builder(graph, node)
        made = builder.run(function, *node.args, **node.kwargs)
        for one in builder.added:
            one.meta["harmed"] = True
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    return harm


def put_behind(function: Callable[..., Any]) -> Callable[[fx.Graph, fx.Node], None]:
    """Let readers of a node read `function` of it."""

    def harm(graph: fx.Graph, node: fx.Node) -> None:
        readers = list(node.users)
        builder = Builder(graph, node.next)
        made = builder.run(function, node)
        for one in builder.added:
            one.meta["harmed"] = True
        for reader in readers:
            reader.replace_input_with(node, made)

    return harm


def raises(error: type[Exception], words: str) -> Callable[[fx.Graph, fx.Node], None]:
    """A pass that gives up."""

    def harm(graph: fx.Graph, node: fx.Node) -> None:
        raise error(f"{words} {node.name}")

    return harm


def hangs(graph: fx.Graph, node: fx.Node) -> None:
    """A pass that never ends."""
    forever()


def misplaced(graph: fx.Graph, node: fx.Node) -> None:
    """A pass that moves a node in front of what it reads."""
    source = node.all_input_nodes[0]
    first = next(one for one in graph.nodes if one.op != "placeholder")
    if source.op == "placeholder":
        first = next(iter(graph.nodes))
    (source if source.op == "placeholder" else first).prepend(node)


def other_layout(x: Any) -> Any:
    """The same numbers, columns first."""
    turned = aten.clone.default(
        aten.permute.default(x, [1, 0]), memory_format=torch.contiguous_format
    )
    return aten.permute.default(turned, [1, 0])


def bad_rule(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule whose right side is another."""

    def fault(after: Any, rule: str, builder: Builder, bound: list[Any]) -> Any:
        return builder.run(function, *bound) if rule == name else after

    return fault


def bad_lowering(
    target: Any, harm: Callable[[Value, fx.Node], Value], dynamic: bool = False
) -> Callable[..., Any]:
    """An operator whose loops are wrong."""

    def fault(value: Any, node: fx.Node) -> Any:
        fits = node.target is target and isinstance(value, Value)
        return harm(value, node) if fits and (is_symbolic(node) or not dynamic) else value

    return fault


def scaled(value: Value, node: fx.Node) -> Value:
    """A wrong constant."""
    body = Body()
    return Value(value.size, value.dtype, lambda point: body.mul(value.load(point), 1.03))


def first_column(value: Value, node: fx.Node) -> Value:
    """A wrong index: one that does not move along the last dimension."""
    return Value(value.size, value.dtype, lambda point: value.load((*point[:-1], Index.of(0))))


def gives_up(error: type[Exception], words: str) -> Callable[[Value, fx.Node], Value]:
    """A rule of lowering that raises."""

    def harm(value: Value, node: fx.Node) -> Value:
        raise error(f"{words} {node.name} of {list(node.meta['val'].shape)}")

    return harm


def never_ends(value: Value, node: fx.Node) -> Value:
    """A rule of lowering that never ends."""
    forever()
    return value


def bad_layout(
    target: Any, harm: Callable[[Any, DType], tuple[Any, DType]], dynamic: bool = False
) -> Callable[..., Any]:
    """A tensor that kernels write in another way than was said."""

    def fault(given: tuple[Any, DType], node: fx.Node) -> tuple[Any, DType]:
        fits = node.target is target and (is_symbolic(node) or not dynamic)
        return harm(*given) if fits else given

    return fault


def with_gaps(stride: tuple[Any, ...], dtype: DType) -> tuple[Any, DType]:
    """Strides as if there were something between any two elements."""
    return tuple(step * 2 for step in stride), dtype


def twice_as_wide(stride: tuple[Any, ...], dtype: DType) -> tuple[Any, DType]:
    """Another type than the graph says."""
    return stride, DType.F64 if dtype is DType.F32 else dtype


def bad_kernel(
    prim: Prim, harm: Callable[[str, str], str], dynamic: bool = False
) -> Callable[..., Any]:
    """Code of kernels that compute something, changed as text."""

    def fault(text: str, kernel: Kernel) -> str:
        found = any(
            isinstance(one, Apply) and one.prim is prim
            for statement in kernel.statements
            for one in nodes(statement)
        )
        inner = [axis for stage in kernel.stages for axis in stage.inner]
        # Of loops within rows alone: the length of a flat one is never a constant of its code.
        symbolic = inner and any(axis.size.constant is None for axis in (*kernel.outer, *inner))
        return harm(text, prim.name.lower()) if found and (symbolic or not dynamic) else text

    return fault


def doubled(text: str, prim: str) -> str:
    """Twice the argument, in place of a function of it."""
    call = rf"call (float|double) @stator_{prim}_f(?:32|64)\(\1 (%\w+)\)"
    return re.sub(call, r"fadd \1 \2, \2", text)


def nonsense(text: str, prim: str) -> str:
    """An instruction that does not exist."""
    return text.replace("store float", "stow float")


def unknown(text: str, prim: str) -> str:
    """A value that nothing defines."""
    return re.sub(r"store float %\w+", "store float %nobody", text)


def spins(text: str, prim: str) -> str:
    """A kernel that never returns."""
    return text.replace("  ret void", "  br label %spin\nspin:\n  br label %spin", 1)


def into_nowhere(text: str, prim: str) -> str:
    """A store to memory that is not the process's."""
    return re.sub(r"(store float %\w+), ptr %\w+", r"\1, ptr inttoptr (i64 4096 to ptr)", text)


def too_busy(text: str, prim: str) -> str:
    """A generator that refuses."""
    raise NotImplementedError(f"no code for {prim} here")


# --- the list ---


@dataclass(frozen=True, slots=True)
class Bad:
    """A line of the list of bad passes."""

    kind: str
    name: str
    targets: tuple[Any, ...]
    harm: Callable[[fx.Graph, fx.Node], None]
    dynamic: bool = False

    def bug(self) -> Bug:
        """The bug."""
        words = " of ".join(_word(target) for target in reversed(self.targets))
        fault = bad_pass(self.name, self.targets, self.harm, self.dynamic)
        name = f"{self.name}, {words}"
        return Bug(name, self.kind, "pass", fault, self.name, self.dynamic)


def swapped(x: Any, y: Any) -> Any:
    """A difference the wrong way round."""
    return aten.sub.Tensor(y, x)


def widened(x: Any) -> Any:
    """The same numbers in another type."""
    return aten._to_copy.default(x, dtype=torch.float64)


def passes() -> Iterator[Bug]:
    """Bugs of passes: wrong rewrites, ends, layouts, types, and none at all."""
    sin, cos, tanh, relu = aten.sin.default, aten.cos.default, aten.tanh.default, aten.relu.default
    sigmoid, exp, neg, mm = (
        aten.sigmoid.default,
        aten.exp.default,
        aten.neg.default,
        aten.mm.default,
    )
    add, sub, mul, largest = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default
    turned = put_behind(other_layout)
    bad = (
        Bad("accuracy", "drop_noops", (tanh,), put_instead(sin)),
        Bad("accuracy", "fold_uniform", (mul,), put_instead(add)),
        Bad("accuracy", "simplify_views", (neg, sin), put_instead(cos)),
        Bad("accuracy", "pad_mm", (mm,), put_behind(lambda x: mul(x, 1.05))),
        Bad("accuracy", "share_subexpressions", (sigmoid, sub), put_instead(swapped)),
        Bad("accuracy", "cancel_cat_split", (aten.cat.default,), put_behind(neg)),
        Bad("crash", "drop_noops", (aten.abs.default,), raises(KeyError, "no layout of")),
        Bad(
            "crash", "simplify_algebra", (sigmoid, mul), raises(AssertionError, "no right side at")
        ),
        Bad("crash", "channels_last", (mm,), raises(IndexError, "dimension out of range at")),
        Bad("crash", "share_subexpressions", (tanh,), misplaced),
        Bad("crash", "write_in_place", (exp,), raises(RuntimeError, "two owners of")),
        Bad("stride", "fold_uniform", (largest,), turned),
        Bad("stride", "reorder_for_memory", (sin,), turned),
        Bad("stride", "cancel_cat_split", (relu, neg), turned),
        Bad("dtype", "hold_to_promise", (sigmoid,), put_behind(widened)),
        Bad("dtype", "seed_random", (add,), put_behind(widened)),
        Bad("hang", "simplify_views", (exp,), hangs),
        Bad("hang", "share_subexpressions", (largest, aten.abs.default), hangs),
        Bad("hang", "reorder_for_memory", (mm,), hangs),
        Bad("accuracy", "drop_noops", (sin,), put_instead(cos), dynamic=True),
        Bad("crash", "share_subexpressions", (largest,), raises(ValueError, "no hint for"), True),
        Bad("stride", "fold_uniform", (sub,), turned, dynamic=True),
    )
    return (one.bug() for one in bad)


def rules() -> Iterator[Bug]:
    """Bugs of rules that are there: another right side."""
    sides: dict[str, Callable[..., Any]] = {
        "neg_of_neg": aten.neg.default,
        "abs_of_neg": aten.neg.default,
        "relu_of_relu": aten.abs.default,
        "sub_of_neg": aten.sub.Tensor,
        "add_of_neg": swapped,
    }
    for name, function in sides.items():
        yield Bug(f"rule {name}", "accuracy", "rule", bad_rule(name, function), name)


def lowering() -> Iterator[Bug]:
    """Bugs of operators' loops."""
    softmax, mean, choice = aten._softmax.default, aten.mean.dim, aten.where.self
    bad: tuple[tuple[str, Any, Any, bool], ...] = (
        ("accuracy", aten.sigmoid.default, scaled, False),
        ("accuracy", aten.maximum.default, first_column, False),
        ("accuracy", softmax, scaled, False),
        ("accuracy", aten.cat.default, first_column, False),
        ("accuracy", mean, scaled, False),
        ("crash", aten.exp.default, gives_up(TypeError, "no rule for"), False),
        ("crash", choice, gives_up(NotImplementedError, "cannot choose in"), False),
        ("crash", aten.slice.Tensor, gives_up(IndexError, "step out of range in"), False),
        ("crash", mean, gives_up(ZeroDivisionError, "nothing to average in"), False),
        ("hang", aten.tanh.default, never_ends, False),
        ("hang", mean, never_ends, False),
        ("accuracy", aten.sub.Tensor, scaled, True),
        ("crash", aten.sin.default, gives_up(ValueError, "unknown symbol in"), True),
        ("accuracy", choice, first_column, True),
        ("hang", aten.maximum.default, never_ends, True),
        ("crash", softmax, gives_up(KeyError, "no extent of"), True),
    )
    for kind, target, harm, dynamic in bad:
        fault, word = bad_lowering(target, harm, dynamic), _word(target)
        yield Bug(f"lowering of {word}", kind, "lower", fault, word, dynamic)


def layouts() -> Iterator[Bug]:
    """Bugs of how kernels write tensors."""
    bad: tuple[tuple[str, Any, Any, bool], ...] = (
        ("stride", aten.maximum.default, with_gaps, False),
        ("stride", aten.sin.default, with_gaps, False),
        ("stride", aten.sub.Tensor, with_gaps, False),
        ("stride", aten.tanh.default, with_gaps, True),
        ("dtype", aten.relu.default, twice_as_wide, False),
        ("dtype", aten.exp.default, twice_as_wide, False),
    )
    for kind, target, harm, dynamic in bad:
        fault, word = bad_layout(target, harm, dynamic), _word(target)
        yield Bug(f"layout of {word}, {harm.__name__}", kind, "layout", fault, word, dynamic)


def kernels() -> Iterator[Bug]:
    """Bugs of code generation."""
    bad: tuple[tuple[str, Prim, Any, bool], ...] = (
        ("accuracy", Prim.TANH, doubled, False),
        ("accuracy", Prim.SIN, doubled, False),
        ("accuracy", Prim.COS, doubled, False),
        ("crash", Prim.TANH, nonsense, False),
        ("crash", Prim.SIN, unknown, False),
        ("crash", Prim.COS, too_busy, False),
        ("crash", Prim.TANH, into_nowhere, False),
        ("hang", Prim.COS, spins, False),
        ("hang", Prim.SIN, spins, False),
        ("accuracy", Prim.EXP, doubled, True),
        ("crash", Prim.EXP, unknown, True),
    )
    for kind, prim, harm, dynamic in bad:
        word = "_softmax" if dynamic else prim.name.lower()  # what has rows
        fault = bad_kernel(prim, harm, dynamic)
        yield Bug(f"code of {word}, {harm.__name__}", kind, "kernel", fault, word, dynamic)


def _word(target: Any) -> str:
    return str(target).split(".")[1]


BUGS: Final = (*passes(), *rules(), *lowering(), *layouts(), *kernels())


def plant(number: str) -> None:
    """Put a bug into the compiler of this process."""
    bug = BUGS[int(number)]
    faults.set_fault(bug.place, bug.fault)
