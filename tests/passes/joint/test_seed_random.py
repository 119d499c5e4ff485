"""Random operators become pure functions of one seed; what cannot, stays torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.core.fuel import Fuel
from stator.graph.edit import is_effect
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.ops import draws
from stator.options import Options
from stator.passes.joint.seed_random import DRAWS, seed_random
from stator.torch_api import FakeTensorMode, is_random_op
from tests.passes import on_cuda

aten = torch.ops.aten

Program = Callable[..., Any]

ON: Final = Options(kernels=True)


def graph_of(fn: Program, *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    """`fn` recorded operator by operator, with fake values."""
    module: fx.GraphModule = make_fx(fn, tracing_mode=mode)(*inputs)
    return module


def seeded(module: fx.GraphModule, options: Options = ON, fuel: int | None = None) -> int:
    """Run the pass; how many operators it says it replaced."""
    count = seed_random(module.graph, Ctx(options, Fuel(fuel)))
    verify(module.graph, after="seed_random")
    module.recompile()
    return count


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def random_in(module: fx.GraphModule) -> list[Any]:
    return [target for target in targets(module) if is_random_op(target)]


# What each becomes, the seed left out.
FIRES: Final[dict[str, tuple[Program, list[Any]]]] = {
    "rand": (lambda x: aten.rand([2, 3]), [draws.uniform]),
    "rand_like": (aten.rand_like, [draws.uniform]),
    "uniform": (lambda x: aten.uniform(x, -1.0, 2.0), [draws.uniform]),
    "randn": (lambda x: aten.randn([2, 3]), [draws.normal]),
    "randn_like": (aten.randn_like, [draws.normal]),
    "standard normal": (aten.normal_functional, [draws.normal]),
    "normal": (
        lambda x: aten.normal_functional(x, 1.0, 2.0),
        [draws.normal, aten.mul.Tensor, aten.add.Tensor],
    ),
    "normal of numbers": (
        lambda x: aten.normal.float_float(0.0, 2.0, [2, 3]),
        [draws.normal, aten.mul.Tensor],
    ),
    "normal of a mean": (
        lambda x: aten.normal.Tensor_float(x, 1.0),
        [draws.normal, aten.add.Tensor],
    ),
    "normal of a deviation": (
        lambda x: aten.normal.float_Tensor(0.0, x),
        [draws.require_between, draws.normal, aten.mul.Tensor],
    ),
    "normal of both": (
        aten.normal.Tensor_Tensor,
        [draws.require_between, draws.normal, aten.mul.Tensor, aten.add.Tensor],
    ),
    "bernoulli of a number": (lambda x: aten.bernoulli.p(x, 0.5), [draws.coins]),
    "bernoulli of a tensor": (aten.bernoulli.default, [draws.require_between, draws.coins]),
    "bernoulli into another": (
        lambda x, p: aten.bernoulli.Tensor(x, p),
        [draws.require_between, draws.coins],
    ),
    "dropout": (
        lambda x: aten.native_dropout(x, 0.5, True),
        [draws.coins, aten.mul.Tensor, aten.mul.Tensor],
    ),
    "randint": (lambda x: aten.randint(9, [2, 3]), [draws.integers]),
    "randint from": (lambda x: aten.randint.low(-3, 9, [2, 3]), [draws.integers]),
    "randint_like": (lambda x: aten.randint_like(x, 9), [draws.integers]),
    "randint_like from": (lambda x: aten.randint_like.low_dtype(x, -3, 9), [draws.integers]),
}


def inputs_of(name: str) -> list[Tensor]:
    count = 2 if name in ("normal of both", "bernoulli into another") else 1
    return [torch.rand(2, 3) for _ in range(count)]


def test_every_operator_is_tried() -> None:
    tried = {
        target
        for name, (program, _) in FIRES.items()
        for target in random_in(graph_of(program, *inputs_of(name)))
    }
    assert tried == set(DRAWS)


@pytest.mark.parametrize("name", FIRES)
def test_a_random_operator_becomes(name: str) -> None:
    program, becomes = FIRES[name]
    module = graph_of(program, *inputs_of(name))
    (before,) = (node.meta["val"] for node in module.graph.nodes if node.target in DRAWS)

    assert seeded(module) == 1
    assert [target for target in targets(module) if target is not draws.draw_seed] == becomes
    made = module(*inputs_of(name))
    pairs = zip(made, before, strict=True) if isinstance(before, tuple) else [(made, before)]
    for mine, fake in pairs:
        assert (mine.dtype, mine.shape, mine.stride()) == (fake.dtype, fake.shape, fake.stride())


@pytest.mark.parametrize("name", FIRES)
def test_every_node_has_its_value(name: str) -> None:
    module = graph_of(FIRES[name][0], *inputs_of(name))
    seeded(module)

    for node in module.graph.nodes:
        assert node.op == "output" or isinstance(node.meta["val"], Tensor), node.name


SILENT: Final[dict[str, Program]] = {
    "randperm": lambda x: aten.randperm(5),
    "exponential": lambda x: aten.exponential(x),
    "multinomial": lambda x: aten.multinomial(x, 2),
    "complex": lambda x: aten.randn([3], dtype=torch.complex64),
    "integers in half precision": lambda x: aten.randint(9, [3], dtype=torch.bfloat16),
    "integers that would round": lambda x: aten.randint(1 << 25, [3], dtype=torch.float32),
    "dropout that keeps all": lambda x: aten.native_dropout(x, 0.5, False),
    "no probability": lambda x: aten.bernoulli.p(x, 1.5),
    "nothing random": lambda x: aten.sin(x),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_stays_with_torch(name: str) -> None:
    module = graph_of(SILENT[name], torch.rand(2, 3))
    before = targets(module)

    assert seeded(module) == 0
    assert targets(module) == before


def test_a_generator_of_the_users_is_drawn_from() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    node = graph.call_function(aten.rand_like.default, (x,), {"generator": torch.Generator()})
    node.meta["val"] = torch.empty(3)
    graph.output((node,))

    assert seed_random(graph, Ctx(ON)) == 0


@pytest.mark.parametrize("options", [Options(kernels=False), Options(fallback_random=True)])
def test_without_kernels_or_with_eagers_bits_nothing_changes(options: Options) -> None:
    module = graph_of(aten.rand_like, torch.rand(3))

    assert seeded(module, options) == 0
    assert random_in(module) == [aten.rand_like.default]


def test_fuel_limits_it() -> None:
    module = graph_of(lambda x: (aten.rand_like(x), aten.randn_like(x)), torch.rand(3))

    assert seeded(module, fuel=1) == 1
    assert targets(module) == [draws.draw_seed, draws.uniform, aten.randn_like.default]


def test_one_seed_serves_all_and_is_drawn_where_the_first_stood() -> None:
    def program(x: Tensor) -> Any:
        first = aten.exponential(x)
        return first, aten.rand_like(x), aten.randperm(3), aten.randn_like(x)

    module = graph_of(program, torch.rand(3))

    assert seeded(module) == 2
    assert targets(module) == [
        aten.exponential.default,
        draws.draw_seed,
        draws.uniform,
        aten.randperm.default,
        draws.normal,
    ]
    streams = [
        node.args[1] for node in module.graph.nodes if node.target in (draws.uniform, draws.normal)
    ]
    assert streams == [0, 1]


def test_a_draw_that_nobody_reads_still_moves_the_generator_and_takes_its_stream() -> None:
    def program(x: Tensor) -> Tensor:
        aten.rand_like(x)
        return aten.randn_like(x)

    module = graph_of(program, torch.rand(3))

    assert seeded(module) == 2
    assert targets(module) == [draws.draw_seed, draws.normal]
    (normal,) = module.graph.find_nodes(op="call_function", target=draws.normal)
    assert normal.args[1] == 1


def test_the_seed_is_drawn_even_if_nobody_reads_it() -> None:
    def program(x: Tensor) -> Tensor:
        aten.rand_like(x)
        return x + 1

    module = graph_of(program, torch.rand(3))
    seeded(module)

    (seed,) = module.graph.find_nodes(op="call_function", target=draws.draw_seed)
    assert is_effect(seed)


def test_what_was_made_to_be_filled_goes() -> None:
    module = graph_of(lambda x: aten.uniform(aten.empty_like(x), 0.0, 1.0) + x, torch.rand(3))

    assert seeded(module) == 1
    assert targets(module) == [draws.draw_seed, draws.uniform, aten.add.Tensor]


def test_sizes_that_are_symbols_come_from_the_arguments() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return aten.rand_like(x), aten.rand([x.shape[0] * 2, 3])

    module = graph_of(program, torch.rand(5, 4), mode="symbolic")

    assert seeded(module) == 2
    like, given = module(torch.rand(7, 6))
    assert like.shape == (7, 6)
    assert given.shape == (14, 3)


def test_a_size_that_depends_on_data_stays_with_torch() -> None:
    def program(x: Tensor) -> Tensor:
        count = aten.nonzero(x).shape[0]
        return aten.rand([count])

    module = graph_of(program, torch.ones(4), mode="symbolic")

    assert seeded(module) == 0
    assert aten.rand.default in targets(module)


def test_memory_is_laid_out_as_before() -> None:
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    module = graph_of(aten.rand_like, x)
    seeded(module)

    (drawn,) = module.graph.find_nodes(op="call_function", target=draws.uniform)
    assert drawn.args[-1] == (0, 2, 3, 1)
    assert module(x).stride() == x.stride()


def test_new_nodes_know_the_users_line() -> None:
    module = graph_of(lambda x: aten.native_dropout(x, 0.5, True)[0], torch.rand(3))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    node.meta["stack_trace"] = 'File "model.py", line 7'
    seeded(module)

    lines = [n.meta.get("stack_trace") for n in module.graph.nodes if n.target is draws.coins]
    assert lines == ['File "model.py", line 7']


def test_the_same_seed_gives_the_same_numbers_without_kernels_too() -> None:
    module = graph_of(
        lambda x: (aten.rand_like(x), aten.native_dropout(x, 0.5, True)[0]), torch.rand(9)
    )
    seeded(module)
    x = torch.rand(9)
    torch.manual_seed(4)
    first = module(x)
    torch.manual_seed(4)
    again = module(x)
    later = module(x)

    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], later[0])


# --- on a GPU ---


def test_on_a_gpu_the_seed_is_drawn_and_lies_there() -> None:
    (x,) = on_cuda.fakes((2, 3))
    module = on_cuda.graph_of(lambda x: aten.native_dropout(x, 0.5, True)[0], x)

    assert seeded(module) == 1
    (seed,) = module.graph.find_nodes(op="call_function", target=draws.draw_seed)
    assert seed.args == (on_cuda.CUDA,)
    assert seed.meta["val"].device == on_cuda.CUDA
    (drawn,) = module.graph.find_nodes(op="call_function", target=draws.coins)
    assert drawn.args[0] is seed
    assert drawn.meta["val"].device == on_cuda.CUDA


def test_each_device_has_a_seed_of_its_own() -> None:
    with FakeTensorMode():
        here, there = torch.empty(3), torch.empty(3, device=on_cuda.CUDA)

    def program(x: Tensor, y: Tensor) -> Any:
        return aten.rand_like(x), aten.rand_like(y), aten.randn_like(x), aten.randn_like(y)

    module = on_cuda.graph_of(program, here, there)

    assert seeded(module) == 4
    seeds = module.graph.find_nodes(op="call_function", target=draws.draw_seed)
    assert [seed.args for seed in seeds] == [(), (on_cuda.CUDA,)]
    made = [node for node in module.graph.nodes if node.target in (draws.uniform, draws.normal)]
    assert [node.args[:2] for node in made] == [
        *((seeds[0], 0), (seeds[1], 1), (seeds[0], 2), (seeds[1], 3)),
    ]
    for node in made:
        assert node.meta["val"].device == node.args[0].meta["val"].device
