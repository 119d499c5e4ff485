"""Random operators as pure functions of one seed a device, which kernels compute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.ops import draws
from stator.torch_api import OpOverload, size_expression, size_hint

aten = torch.ops.aten

# What stands for a random node: one node, or one for each of its results.  None: torch draws it.
Drawn: TypeAlias = fx.Node | tuple[fx.Node, ...] | None

DEVICES: Final = ("cpu", "cuda")  # those that there are kernels for


def seed_random(graph: fx.Graph, ctx: Ctx) -> int:
    """Let random operators draw from a seed of the graph's own; return how many do.

    before: y = rand([2, 3])
    after:  seed = draw_seed()
            y = uniform(seed, 0, (0.0, 1.0), [2, 3], float32)

    The seed is drawn where the first of them stood, from the generator of the device that they draw
    on.  It is one, however many there are: a program that runs again and draws more behind (see
    aot/higher.py) draws the same up to there.  For that, too, whether an operator is replaced
    follows from its kind and types, never from its sizes.
    """
    if ctx.options.draws_as_eager:
        return 0
    seeds: dict[torch.device, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if not _is_ours(node) or not ctx.fuel.spend(node.name):
            continue
        site = _Site(graph, node, seeds, count)
        with graph.inserting_before(node):
            drawn = DRAWS[node.target](site, *node.args, **node.kwargs) if site.measure() else None
        if drawn is not None:
            count += 1
            _replace(node, drawn)
    if count:
        drop_unread(graph)
    return count


def _is_ours(node: fx.Node) -> bool:
    """Whether the node draws from torch's own generator for a tensor of a kind we have."""
    if node.op != "call_function" or node.target not in DRAWS:
        return False
    if node.kwargs.get("generator") is not None or node.kwargs.get("pin_memory"):
        return False
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) else value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    known = all(not isinstance(n, torch.SymInt) or size_hint(n) is not None for n in value.size())
    return value.device.type in DEVICES and known


def _replace(node: fx.Node, drawn: fx.Node | tuple[fx.Node, ...]) -> None:
    if isinstance(drawn, fx.Node):
        drawn.meta |= node.meta
        node.replace_all_uses_with(drawn)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, "several results are read one by one"
            part = drawn[user.args[1]]
            part.meta |= user.meta
            user.replace_all_uses_with(part)
            node.graph.erase_node(user)
    node.graph.erase_node(node)


@dataclass(slots=True)
class _Site:
    """A random node, and what is written in its place."""

    graph: fx.Graph
    node: fx.Node
    seeds: dict[torch.device, fx.Node]  # those that are drawn so far
    stream: int
    size: list[Any] = field(default_factory=list)

    @property
    def value(self) -> torch.Tensor:
        """What the node gives, or the first of that."""
        value = self.node.meta["val"]
        return value[0] if isinstance(value, tuple | list) else value

    def measure(self) -> bool:
        """Take its size from the arguments; False where they do not tell."""
        self.size = [self._size(n) for n in self.value.size()]
        return all(n is not None for n in self.size)

    def draw(self, function: Any, *given: Any, dtype: torch.dtype | None = None) -> fx.Node:
        """A call of a function of draws.py."""
        dtype = self.value.dtype if dtype is None else dtype
        args = (self._seed(), self.stream, *given, self.size, dtype, _order(self.value))
        made = self.call(function, *args)
        made.meta["val"] = torch.empty_like(self.value, dtype=dtype)
        return made

    def _seed(self) -> fx.Node:
        """The seed of the device, drawn here if this is the first who asks for it."""
        device = self.value.device
        if device not in self.seeds:
            seed = self.call(draws.draw_seed, *(() if device.type == "cpu" else (device,)))
            seed.meta["effect"] = True
            seed.meta["val"] = self.value.new_empty((2,), dtype=torch.int32)
            self.seeds[device] = seed
        return self.seeds[device]

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call, said to come from the line of the node."""
        made = self.graph.call_function(target, args)
        made.meta = {k: v for k, v in self.node.meta.items() if k in ("stack_trace", "in_forward")}
        return made

    def compute(self, target: Any, *args: Any) -> fx.Node:
        """A call of an operator on tensors, or of a function that gives back its first one."""
        made = self.call(target, *args)
        values = fx.map_arg(args, lambda node: node.meta["val"])
        is_operator = isinstance(target, OpOverload)
        made.meta["val"] = target(*values) if is_operator else torch.empty_like(values[0])
        return made

    def _size(self, size: Any) -> Any:
        """A size as an argument: a number, or a node that has it."""
        if not isinstance(size, torch.SymInt):
            return size
        for source in self.node.all_input_nodes:
            value = source.meta.get("val")
            if _is_same(value, size):
                return source
            for dim, length in enumerate(value.size() if isinstance(value, torch.Tensor) else ()):
                if _is_same(length, size):
                    made = self.call(aten.sym_size.int, source, dim)
                    made.meta["val"] = size
                    return made
        return None


def _is_same(value: Any, size: torch.SymInt) -> bool:
    return isinstance(value, torch.SymInt) and size_expression(value) == size_expression(size)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions in the order in which they lie in memory; None if that is their own."""
    stride = [size_hint(n) if isinstance(n, torch.SymInt) else n for n in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: -(stride[dim] or 0))
    return None if order == list(range(value.dim())) else tuple(order)


def _uniform(site: _Site, x: Any, low: Any = 0.0, high: Any = 1.0, **options: Any) -> Drawn:
    """rand, and uniform of a range."""
    if not _is_float(site) or not _are_numbers(low, high) or low > high:
        return None
    return site.draw(draws.uniform, (float(low), float(high)))


def _rand(site: _Site, x: Any, **options: Any) -> Drawn:
    return _uniform(site, x)


def _normal(site: _Site, x: Any, mean: Any = 0.0, std: Any = 1.0, **options: Any) -> Drawn:
    """randn, and a normal distribution of which mean and deviation are numbers."""
    if not _is_float(site) or not _are_numbers(mean, std) or std < 0:
        return None
    return _moved(site, mean, std)


def _randn(site: _Site, x: Any, **options: Any) -> Drawn:
    return _normal(site, x)


def _normal_of(site: _Site, mean: Any, std: Any = 1.0, *size: Any, **options: Any) -> Drawn:
    """A normal distribution of which mean or deviation may be tensors."""
    if not _is_float(site):
        return None
    for given in (mean, std):
        if isinstance(given, fx.Node):
            value = given.meta["val"]
            if not isinstance(value, torch.Tensor) or value.dtype is not site.value.dtype:
                return None
        elif not _are_numbers(given):
            return None
    if not isinstance(std, fx.Node):
        return None if std < 0 else _moved(site, mean, std)
    # Eager's result is row-major here, though fake tensors are laid as the deviation is.
    site.node.meta["val"] = site.value.new_empty(site.value.size())
    message = "normal expects all elements of std >= 0.0"
    std = site.compute(draws.require_between, std, 0.0, float("inf"), message)
    return _moved(site, mean, std)


def _moved(site: _Site, mean: Any, std: Any) -> Drawn:
    """A standard number times std, plus mean."""
    drawn = site.draw(draws.normal)
    if isinstance(std, fx.Node) or std != 1:
        drawn = site.compute(aten.mul.Tensor, drawn, std)
    if isinstance(mean, fx.Node) or mean != 0:
        drawn = site.compute(aten.add.Tensor, drawn, mean)
    return drawn


def _bernoulli_of(site: _Site, p: Any, **options: Any) -> Drawn:
    """1 with the probability that a tensor says."""
    return _bernoulli(site, p, p)


def _bernoulli(site: _Site, x: Any, p: Any = 0.5, **options: Any) -> Drawn:
    """1 with one probability, or with those of a tensor."""
    if not isinstance(p, fx.Node):
        return site.draw(draws.coins, p) if _are_numbers(p) and 0 <= p <= 1 else None
    value = p.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in draws.DIGITS:
        return None
    message = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
    return site.draw(draws.coins, site.compute(draws.require_between, p, 0.0, 1.0, message))


def _dropout(site: _Site, x: Any, p: Any, train: Any) -> Drawn:
    """x * mask / (1 - p), and the mask."""
    if train is False or not _is_float(site) or not _are_numbers(p) or not 0 <= p <= 1:
        return None
    mask = site.draw(draws.coins, 1 - p, dtype=torch.bool)
    kept = site.compute(aten.mul.Tensor, x, mask)
    return site.compute(aten.mul.Tensor, kept, 1 / (1 - p) if p < 1 else 0.0), mask


def _randint(site: _Site, high: Any, *size: Any, **options: Any) -> Drawn:
    return _integers(site, 0, high)


def _randint_from(site: _Site, low: Any, high: Any, *size: Any, **options: Any) -> Drawn:
    return _integers(site, low, high)


def _randint_like(site: _Site, x: Any, high: Any, **options: Any) -> Drawn:
    return _integers(site, 0, high)


def _randint_like_from(site: _Site, x: Any, low: Any, high: Any, **options: Any) -> Drawn:
    return _integers(site, low, high)


def _integers(site: _Site, low: Any, high: Any) -> Drawn:
    """Integers of [low, high), each of them exact in the result's type."""
    dtype = site.value.dtype
    if dtype.is_complex or dtype in (torch.float16, torch.bfloat16):
        return None
    bounds = [_hint(low), _hint(high)]
    if any(bound is None for bound in bounds):
        return None
    if dtype.is_floating_point and any(abs(n or 0) > 1 << draws.DIGITS[dtype] for n in bounds):
        return None
    return site.draw(draws.integers, (low, high))


def _hint(bound: Any) -> int | None:
    value = bound.meta.get("val") if isinstance(bound, fx.Node) else bound
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return value if isinstance(value, int) else None


def _is_float(site: _Site) -> bool:
    return site.value.dtype in draws.DIGITS


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


DRAWS: Final[dict[Any, Callable[..., Drawn]]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform.default: _uniform,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.float_float: _normal_of,
    aten.bernoulli.default: _bernoulli_of,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.native_dropout.default: _dropout,
    aten.randint.default: _randint,
    aten.randint.low: _randint_from,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_from,
}
