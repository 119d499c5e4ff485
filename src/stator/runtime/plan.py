"""The plan: what to run, in order, and which values die where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from stator.graph.verify import user_line
from stator.loops.index import Index, Symbol
from stator.loops.ir import Kernel
from stator.loops.values import product
from stator.lower.sizes import Shown
from stator.lower.tensors import extent
from stator.torch_api import is_mutable_op

CPU: Final = torch.device("cpu")
ALIGNED: Final = 16  # bytes that a thread of a GPU moves at once


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that is made before a step runs, and filled by it."""

    name: str
    size: tuple[Index, ...]
    stride: tuple[Index, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> Index:
        """How many elements it has room for."""
        total = product(self.size)
        if self.is_dense or total.constant == 0:
            return total
        return extent(self.size, self.stride)

    @property
    def is_dense(self) -> bool:
        """Whether it is without gaps, whatever its sizes turn out to be."""
        return extent(self.size, self.stride) is product(self.size)


@dataclass(frozen=True, slots=True)
class Call:
    """Call an operator.  Text form: `mm = aten.mm.default(x, w)`."""

    name: str
    target: Any
    args: tuple[Any, ...]  # nodes stand for values
    kwargs: dict[str, Any]
    symbol: str | None = None  # a C function of torch's that does it
    out: Allocation | None = None  # memory for the result, where that function takes some
    bytes: Index | None = None  # of what it makes itself, where they are known
    line: str | None = None  # of the user's program
    parts: int | None = None  # how many results there are, if it returns them in a list
    onto: str | None = None  # the one tensor that it stores into, of the plan's own

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return (self.name,)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads."""
        found: list[str] = []
        fx.map_arg((self.args, self.kwargs), lambda node: found.append(node.name))
        return tuple(found)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names whose memory it may change."""
        if self.onto is not None:
            return (self.onto,)
        return self.takes if is_mutable_op(self.target) else ()

    @property
    def called(self) -> str:
        """The operator's name, without an address."""
        return self.target.__name__ if isinstance(self.target, FunctionType) else str(self.target)

    def __str__(self) -> str:
        given = [str(arg) for arg in self.args] + [f"{k}={v}" for k, v in self.kwargs.items()]
        given += [f"out={self.name}"] if self.out is not None else []
        return f"{self.name} = {self.called}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class View:
    """Look at a tensor's memory in another way.  Text form: `y = aten.t.default(x)`, `y is x`."""

    source: str  # the tensor whose memory it is
    made: Allocation
    offset: Index  # from the source's first element, in elements
    call: Call | None = None  # the operator that would do it; None: a kernel stored over the source

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return (self.made.name,)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads."""
        return (self.source,) if self.call is None else self.call.takes

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into: none."""
        return ()

    def __str__(self) -> str:
        return f"{self.made.name} is {self.source}" if self.call is None else str(self.call)


@dataclass(frozen=True, slots=True)
class Constant:
    """Name an object that the graph holds.  Text form: `w = constant weight`."""

    name: str
    value: Any

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return (self.name,)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads: none."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into: none."""
        return ()

    def __str__(self) -> str:
        return f"{self.name} = constant {type(self.value).__name__}"


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a native kernel.  Text form: `a, b = kernel_0(a, b, x, y)`."""

    kernel: Kernel
    nameless: Kernel  # the same kernel for all that compute the same
    arguments: tuple[str, ...]
    sizes: tuple[Index, ...]
    allocations: tuple[Allocation, ...]
    work: Index  # operations; few are not worth several threads
    writes: tuple[str, ...]  # inputs that it stores into

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return tuple(allocation.name for allocation in self.allocations)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads."""
        return tuple(name for name in self.arguments if name not in self.makes)

    def __str__(self) -> str:
        given = [*self.arguments, *(str(size) for size in self.sizes)]
        made = f"{', '.join(self.makes)} = " if self.makes else ""
        return f"{made}{self.kernel.name}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Together:
    """Run one kernel over a list.  Text form: `together: a = kernel_0(…); b = kernel_1(…)`."""

    launches: tuple[Launch, ...]

    @property
    def nameless(self) -> Kernel:
        """The kernel that runs."""
        return replace(self.launches[0].nameless, is_list=True)

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return tuple(name for launch in self.launches for name in launch.makes)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads."""
        return tuple(name for launch in self.launches for name in launch.takes)

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into."""
        return tuple(name for launch in self.launches for name in launch.writes)

    @property
    def work(self) -> Index:
        """Operations of all."""
        return sum((launch.work for launch in self.launches), Index.of(0))

    def __str__(self) -> str:
        return f"together: {'; '.join(str(launch) for launch in self.launches)}"


@dataclass(frozen=True, slots=True)
class Require:
    """Raise an error if a flag is not zero.  Text form: `require flag == 0: message`."""

    flag: str
    error: type[Exception]
    message: str

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives: none."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """The flag."""
        return (self.flag,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into: none."""
        return ()

    def __str__(self) -> str:
        return f"require {self.flag} == 0: {self.message}"


@dataclass(frozen=True, slots=True)
class Number:
    """A size that follows from the inputs.  Text form: `n = 2*size_s0`."""

    name: str
    index: Index

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives."""
        return (self.name,)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads: none."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into: none."""
        return ()

    def __str__(self) -> str:
        return f"{self.name} = {self.index}"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget values.  Text form: `free a, b`."""

    names: tuple[str, ...]

    @property
    def makes(self) -> tuple[str, ...]:
        """Names it gives: none."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """Names it reads: none."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that it stores into: none."""
        return ()

    def __str__(self) -> str:
        return f"free {', '.join(self.names)}"


Step: TypeAlias = Call | View | Constant | Launch | Together | Require | Number | Free


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph as a straight line of steps."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: Any  # tuple of nodes and constants
    # Strides and types that kernels rely on: some operators lay results as nobody foretold.
    layouts: Mapping[str, tuple[tuple[Index, ...], torch.dtype]] = field(default_factory=dict)
    sizes: Mapping[str, Shown] = field(default_factory=dict)  # by the names of symbols
    entries: Mapping[Kernel, Any] = field(default_factory=dict)  # nameless kernel -> machine code
    hints: Mapping[Symbol, int] = field(default_factory=dict)  # what symbols were when it was made
    # What dies one by one while results come: in the pool one gives its memory to the other.
    relays: frozenset[str] = frozenset()
    donated: frozenset[str] = frozenset()  # inputs that kernels store over: nobody else has them
    origins: Callable[[], Mapping[str, Any]] = dict  # runtime.origins.Origin, by kernels' names
    loose: frozenset[str] = frozenset()  # that may begin where a GPU's widest access may not
    device: torch.device = CPU  # where kernels run and allocations lie; calls may be elsewhere

    @property
    def on_gpu(self) -> bool:
        """Whether its kernels are launched, and run while the program goes on."""
        return bool(self.device.type != "cpu")

    @property
    def callers(self) -> frozenset[str]:
        """Inputs that are the caller's: what is stored there must be seen there."""
        return frozenset(self.inputs) - self.donated

    def __str__(self) -> str:
        body = "".join(f"  {step}\n" for step in self.steps)
        return f"plan({', '.join(self.inputs)})\n{body}  return {self.outputs}"


def loose_names(steps: Sequence[Step], callers: Collection[str]) -> frozenset[str]:
    """What kernels cannot be promised to begin at a multiple of `ALIGNED` bytes.

    So it is with what the caller has written to where it lies, and with views that begin inside of
    others.  All else is made so, or copied if it is not.
    """
    loose = {name for step in steps for name in step.writes if name in callers}
    for step in steps:
        if isinstance(step, View):
            start = (step.offset * step.made.dtype.itemsize).constant
            if step.source in loose or start is None or start % ALIGNED:
                loose.add(step.made.name)
    return frozenset(loose)


def make_plan(module: fx.GraphModule) -> Plan:
    """Order of the graph, with every value freed behind its last reader."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    dying = _last_reads(graph, output)
    steps: list[Step] = []
    unread = tuple(node.name for node in placeholders if not node.users)
    if unread:
        steps.append(Free(unread))
    for node in graph.nodes:
        if node.op == "get_attr":
            steps.append(Constant(node.name, attribute(module, str(node.target))))
        elif node.op == "call_function":
            line = user_line(node)
            steps.append(Call(node.name, node.target, node.args, dict(node.kwargs), line=line))
        else:
            continue
        dead = [source.name for source in dying.get(node, ())]
        if not node.users:
            dead.append(node.name)
        if dead:
            steps.append(Free(tuple(dead)))
    return Plan(tuple(node.name for node in placeholders), tuple(steps), output.args[0])


def _last_reads(graph: fx.Graph, output: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        if node is not output:
            dying.setdefault(node, []).append(source)
    return dying


def attribute(module: fx.GraphModule, path: str) -> Any:
    """What the module holds under a dotted name."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def calls(plan: Plan) -> Iterator[Call]:
    """Every operator call, in order."""
    return (step for step in plan.steps if isinstance(step, Call))
