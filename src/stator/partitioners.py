"""Our cut of a joint graph, for those who trace it themselves.

It serves as `partition_fn` of PyTorch's own `aot_function`.
Names, arguments and results are those of PyTorch's partitioner: a joint graph has placeholders of
primals and of tangents, and returns what the forward does, then the gradients.

    forward:  primals -> values, saved tensors, saved sizes
    backward: saved sizes, saved tensors, tangents -> gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.aot.partition.choose import Wish, choose
from stator.aot.partition.classify import Classes, classify
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.order import backward_order, forward_nodes
from stator.errors import OptionError
from stator.graph.capture import annotated_budget
from stator.graph.edit import drop_unread, is_effect, needed_by
from stator.options import torchs_budget
from stator.torch_api import is_mutable_op, pytree, size_expression, size_hint

__all__ = ["choose_saved_values_set", "min_cut_rematerialization_partition"]

aten = torch.ops.aten

# How PyTorch names the placeholders that only the backward gets, in the order in which it gets
# them, and those that come last of the forward's.
_LATE: Final = ("tangents", "bwd_seed", "bwd_base_offset")
_SEEDS: Final = ("fwd_seed", "fwd_base_offset")
_OF_BACKWARD: Final = ("is_backward", "must_be_in_backward")  # what it notes on nodes
_UNWATCHED: Final = "saved_tensor_with_no_vc_check"  # and on values that may change once saved


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    memory_budget: float | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph, cut where a step is quickest.

    `memory_budget` is the share that may be kept of what the quickest cut keeps; None: what torch's
    annotation of the graph says, else its setting `activation_memory_budget`.  The inputs, the name
    of a compiler and which inputs are parameters change nothing: those are held in any case.
    """
    joint = _joint_of(joint_module.graph, num_fwd_outputs)
    classes = classify(joint)
    _check_independent(joint, classes)
    if memory_budget is None:
        memory_budget = _asked_of_torch(joint.graph, classes)
    saved = _Saved.of(joint, classes, _chosen(joint, classes, memory_budget))
    descriptions = _descriptions(joint.graph)
    forward = saved.forward()
    backward = saved.backward()
    _describe(forward, descriptions[:num_fwd_outputs])
    _describe(backward, descriptions[num_fwd_outputs:])
    return fx.GraphModule(joint_module, forward), fx.GraphModule(joint_module, backward)


def choose_saved_values_set(
    joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1.0
) -> list[fx.Node]:
    """What the backward gets from the forward under a budget, in the order of the graph.

    `node_info` is PyTorch's: of it, `inputs`, `required_fw_nodes` and `required_bw_nodes` are read.
    """
    if node_info is None:
        raise OptionError(
            "choose_saved_values_set got no node_info: nothing says how many of the graph's "
            "outputs are the forward's",
            hint="pass an object with inputs, required_fw_nodes and required_bw_nodes, as "
            "PyTorch's classify_nodes returns; or call min_cut_rematerialization_partition with "
            "num_fwd_outputs",
        )
    joint = _joint_as_told(joint_graph, node_info)
    kept = frozenset(_chosen(joint, classify(joint), memory_budget).kept)
    return [node for node in joint_graph.nodes if node in kept]


def _asked_of_torch(graph: fx.Graph, classes: Classes) -> float:
    """The budget that torch's partitioner would take."""
    annotated = annotated_budget(node for node in graph.nodes if node in classes.forward)
    return torchs_budget() if annotated is None else annotated


def _chosen(joint: Joint, classes: Classes, budget: float) -> Cut:
    if not 0 <= budget <= 1:
        raise OptionError(
            f"memory_budget is {budget}, and has to be in [0, 1]",
            hint="0 saves inputs only, 1 what makes a step quickest",
        )
    return choose(joint, classes, Wish(budget=budget))


def _joint_of(graph: fx.Graph, count: int) -> Joint:
    """A joint graph whose first `count` outputs are the forward's."""
    outputs = _outputs(graph)
    if not 0 <= count <= len(outputs):
        raise OptionError(f"num_fwd_outputs is {count}, and the graph has {len(outputs)} outputs")
    early = [node for node in _placeholders(graph) if not _is_named(node, _LATE)]
    primals = sorted(early, key=lambda node: _is_named(node, _SEEDS))
    return _marked(graph, primals, outputs[:count], outputs[count:])


def _joint_as_told(graph: fx.Graph, node_info: Any) -> Joint:
    """A joint graph of which PyTorch has said which nodes each side requires.

    It requires every gradient of the backward, and of the outputs those of the forward come first.
    """
    outputs = _outputs(graph)
    forward = frozenset(node_info.required_fw_nodes)
    nodes = [output for output in outputs if isinstance(output, fx.Node)]
    count = next((i for i, node in enumerate(nodes) if node not in forward), len(nodes))
    grads = [node for node in nodes if node in node_info.required_bw_nodes]
    return _marked(graph, node_info.inputs, nodes[:count], grads)


def _marked(
    graph: fx.Graph, primals: Sequence[fx.Node], values: Sequence[Any], grads: Sequence[Any]
) -> Joint:
    """The same, with a note on each node that the forward runs for its effect."""
    effects = [node for node in graph.nodes if is_effect(node) and _is_forward(node)]
    for node in effects:
        node.meta["in_forward"] = True
    writers = (node for node in effects if is_mutable_op(node.target))
    written = {source for node in writers for source in _written_by(node)}
    written.update(_written_later(graph, primals))
    keepers = {node: aten.clone.default for node in primals if node in written}
    late = [node for node in _placeholders(graph) if _is_named(node, _LATE)]
    tangents = sorted(late, key=lambda node: not _is_named(node, _LATE[:1]))
    return Joint(graph, primals, tangents, values, (), grads, keepers)


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") not in _OF_BACKWARD


def _written_by(node: fx.Node) -> list[fx.Node]:
    """What an operator that writes writes to: its first argument, or that list's members."""
    return [found for found in pytree.tree_leaves(node.args[:1]) if isinstance(found, fx.Node)]


def _written_later(graph: fx.Graph, primals: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Primals that the caller writes outputs to, when the forward has run."""
    targets = [getattr(note, "mutated_input", None) for note in _descriptions(graph)]
    for node in primals:
        if (note := node.meta.get("desc")) is not None and note in targets:
            yield node


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def _is_named(node: fx.Node, parts: Iterable[str]) -> bool:
    return any(part in str(node.target) for part in parts)


def _outputs(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return pytree.tree_leaves(output.args)  # type: ignore[no-any-return]  # untyped


def _descriptions(graph: fx.Graph) -> list[Any]:
    """What PyTorch notes on each output; nothing, if the graph is not from there."""
    (output,) = graph.find_nodes(op="output")
    return pytree.tree_leaves(output.meta.get("desc", []))  # type: ignore[no-any-return]  # untyped


def _describe(graph: fx.Graph, descriptions: list[Any]) -> None:
    (output,) = graph.find_nodes(op="output")
    if descriptions:
        output.meta["desc"] = descriptions


def _check_independent(joint: Joint, classes: Classes) -> None:
    """Raise an error if the forward would need what only the backward gets."""
    wrong = next((node for node in joint.tangents if node in classes.forward), None)
    if wrong is not None:
        raise OptionError(
            f"num_fwd_outputs is {len(joint.values)}, but one of the first {len(joint.values)} "
            f"outputs is computed from {wrong.name}",
            hint="the forward's outputs come first, then the gradients: count the former",
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """A joint graph that is cut, and in which order the values that are kept are handed over."""

    joint: Joint
    classes: Classes
    cut: Cut
    tensors: Sequence[fx.Node]
    sizes: Sequence[fx.Node]

    @staticmethod
    def of(joint: Joint, classes: Classes, cut: Cut) -> _Saved:
        """What is handed over under `cut`: of what it keeps, that which the backward reads."""
        runs = [node for node, _ in backward_order(joint, classes, cut)]
        read = {source for node in runs for source in node.all_input_nodes}
        read.update(grad for grad in joint.grads if isinstance(grad, fx.Node))
        kept = [node for node in cut.kept if node in read]
        tensors = [node for node in kept if isinstance(node.meta.get("val"), torch.Tensor)]
        # PyTorch's wrapper takes the last ones for those that autograd does not watch.
        tensors.sort(key=lambda node: bool(node.meta.get(_UNWATCHED)))
        numbers = [node for node in kept if not isinstance(node.meta.get("val"), torch.Tensor)]
        sizes = _with_symbols(joint, classes, tensors, numbers)
        return _Saved(joint, classes, cut, tensors, sizes)

    def forward(self) -> fx.Graph:
        """The graph from primals to values and what is saved."""
        graph = fx.Graph()
        copies = {node: graph.node_copy(node) for node in self.joint.primals}
        # Ahead of what overwrites them, in the forward or by the caller.
        overwritten = self.cut.copied | self.joint.keepers.keys()
        old = {node: _cloned(graph, copies[node]) for node in self.tensors if node in overwritten}
        wanted = forward_nodes(self.classes, self.cut) | needed_by(self.sizes)
        for node in self.joint.graph.nodes:
            if node in wanted and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        tensors = [old.get(node, copies[node]) for node in self.tensors]
        sizes = [copies[node] for node in self.sizes]
        graph.output((*_mapped(self.joint.values, copies), *tensors, *sizes))
        drop_unread(graph)
        return graph

    def backward(self) -> fx.Graph:
        """The graph from what is saved and the tangents to gradients."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*self.sizes, *self.tensors, *self.joint.tangents):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        early = dict(copies)
        for node, is_early in backward_order(self.joint, self.classes, self.cut):
            found = early if is_early else copies
            found[node] = graph.node_copy(node, found.__getitem__)
            found[node].meta["autograd_backward"] = True
            if is_early and node in self.cut.relays:
                copies[node] = found[node]
        graph.output(tuple(_mapped(self.joint.grads, copies)))
        drop_unread(graph)
        return graph


def _cloned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = graph.call_function(aten.clone.default, (node,))
    clone.meta["val"] = node.meta["val"]
    return clone


def _mapped(values: Iterable[Any], copies: dict[fx.Node, fx.Node]) -> Iterator[Any]:
    for value in values:
        yield copies[value] if isinstance(value, fx.Node) else value


def _with_symbols(
    joint: Joint, classes: Classes, tensors: Sequence[fx.Node], numbers: Sequence[fx.Node]
) -> list[fx.Node]:
    """`numbers`, and those that define the sizes of what the backward gets: definitions first."""
    homes: dict[Any, fx.Node] = {}
    for node in joint.graph.nodes:
        if (symbol := _defined(node)) is not None and classes.is_early(node):
            homes.setdefault(symbol, node)
    symbols: dict[Any, None] = {}
    for node in (*numbers, *tensors, *joint.tangents):
        symbols.update(dict.fromkeys(sorted(_symbols(node.meta.get("val")), key=str)))
    binding = [homes[symbol] for symbol in symbols if symbol in homes]
    return [*binding, *(node for node in numbers if node not in binding)]


def _defined(node: fx.Node) -> Any:
    """The symbol that a node gives a value to; None if it does not."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    expression = size_expression(value)
    if expression is None or not expression.is_Symbol:
        return None
    return expression if node.op == "placeholder" or size_hint(value) is None else None


def _symbols(value: Any) -> set[Any]:
    """The symbols in a size, or in how a tensor lies in memory."""
    if isinstance(value, torch.Tensor):
        numbers = (*value.size(), *value.stride(), value.storage_offset())
        return set().union(*(_symbols(number) for number in numbers))
    if not isinstance(value, torch.SymInt):
        return set()
    expression = size_expression(value)
    return set() if expression is None else set(expression.free_symbols)
