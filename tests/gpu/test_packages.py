"""Packages for a GPU, on one: built here, loaded in another process, beside eager."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import stator
from stator.errors import PackageError
from stator.package.archive import LIBRARY, read_package
from stator.package.native import Container
from tests.gpu.on_device import DEVICE, needs_card, wait

pytestmark = needs_card

ROOT: Final = Path(__file__).parents[2]
BATCH: Final = Dim("batch", min=2, max=64)


class Block(nn.Module):
    """A layer of a transformer, with torch's attention."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        count, length, width = x.shape
        heads = self.qkv(self.first(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Images(nn.Module):
    """Convolutions, batch norms, a residual, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second, self.other = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x + F.relu(self.other(self.second(x))), 2)
        return self.head(x.mean((2, 3)))


class Counter(nn.Module):
    """A buffer that every call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input times how often this was called."""
        self.calls.add_(1)
        return x * self.calls


class Calls(nn.Module):
    """Operators that are calls, tensors that are made, a constant of the CPU, random numbers."""

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Values, places, sums."""
        values, places = x.sort(-1)
        steps = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        return values * steps + x[rows] * torch.tensor(2.0), places, x.cumsum(-1), x.topk(3)[0]


def perceptron() -> nn.Module:
    """Products with bias."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32))


Made = tuple[nn.Module, tuple[Any, ...], Any, dict[str, Any]]
MODELS: Final[dict[str, Callable[[], Made]]] = {
    "perceptron": lambda: (perceptron(), (torch.randn(32, 64),), None, {}),
    "dynamic": lambda: (perceptron(), (torch.randn(16, 64),), ({0: BATCH},), {}),
    "block": lambda: (Block(), (torch.randn(4, 128, 256),), None, {}),
    "half": lambda: (Block().bfloat16(), (torch.randn(4, 128, 256).bfloat16(),), None, {}),
    "images": lambda: (Images(), (torch.randn(8, 3, 32, 32),), None, {}),
    "frozen": lambda: (Images(), (torch.randn(8, 3, 32, 32),), None, {"freezing": True}),
    "calls": lambda: (Calls(), (torch.randn(16, 33), torch.randint(16, (16,))), None, {}),
}


def made(name: str) -> Made:
    """A model on the card with its arguments; the same in every process."""
    torch.manual_seed(0)
    model, args, dynamic, options = MODELS[name]()
    return model.eval().to(DEVICE), tuple(a.to(DEVICE) for a in args), dynamic, options


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The path of a model's package, built once."""
    folder = tmp_path_factory.mktemp("packages")
    paths: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in paths:
            paths[name] = build(name, folder / f"{name}.pt2")
        return paths[name]

    return path_of


def build(name: str, path: Path, **more: Any) -> Path:
    """Build a model's package."""
    model, args, dynamic, options = made(name)
    wishes = {"output_path": path, **options, **more}
    with torch.no_grad():
        return Path(stator.aot_compile(model, args, dynamic_shapes=dynamic, options=wishes))


def check(loaded: Callable[..., Any], name: str, *args: Tensor) -> None:
    """A loaded package and its model return the same, but for roundings."""
    model, own, _, _ = made(name)
    given = args or own
    within = 3e-2 if name == "half" else 1e-3
    with torch.no_grad():
        expected = model(*given)
        found = loaded(*given)
    expected = expected if isinstance(expected, Tensor) else tuple(expected)
    torch.testing.assert_close(found, expected, atol=within, rtol=within)


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_eager(name: str, built: Callable[..., Path]) -> None:
    loaded = stator.load(built(name))

    for _ in range(3):
        check(loaded, name)


def in_another_process(code: str) -> None:
    """Run code there that may import these tests."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["perceptron", "half", "images"])
def test_in_another_process(name: str, built: Callable[..., Path]) -> None:
    in_another_process(
        "import stator\n"
        "from tests.gpu.test_packages import check\n"
        f"check(stator.load({str(built(name))!r}), {name!r})\n"
    )


def test_the_first_call_of_a_process_may_be_recorded(built: Callable[..., Path]) -> None:
    """Kernels are loaded then, which the mode of torch.cuda.graph would not allow."""
    in_another_process(
        "import stator, torch\n"
        "from tests.gpu.test_packages import made\n"
        "model, (x,), _, _ = made('perceptron')\n"
        f"loaded, graph = stator.load({str(built('perceptron'))!r}), torch.cuda.CUDAGraph()\n"
        "with torch.no_grad():\n"
        "    expected = model(x)\n"
        "    with torch.cuda.graph(graph):\n"
        "        found = loaded(x)\n"
        "graph.replay()\n"
        "torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)\n"
    )


@pytest.mark.parametrize("name", ["perceptron", "dynamic", "half", "images", "calls"])
def test_torchs_own_loader(name: str, built: Callable[..., Path]) -> None:
    loaded = torch._inductor.aoti_load_package(str(built(name)))

    check(loaded, name)


def test_torchs_runner_of_a_bare_library(tmp_path: Path) -> None:
    path = build("perceptron", tmp_path / "model.so")
    runner = torch._C._aoti.AOTIModelContainerRunnerCuda(str(path), 1, "cuda:0")

    check(lambda *args: runner.run(list(args))[0], "perceptron")
    names = {name for name, _ in made("perceptron")[0].named_parameters()}
    assert set(runner.get_constant_names_to_original_fqns().values()) == names


def test_without_a_linker(tmp_path: Path) -> None:
    check(stator.load(build("perceptron", tmp_path / "model.pt2", linker=False)), "perceptron")


def test_the_same_bytes_twice(tmp_path: Path, built: Callable[..., Path]) -> None:
    again = build("half", tmp_path / "model.pt2")

    assert again.read_bytes() == built("half").read_bytes()


def test_one_package_serves_all_sizes(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("dynamic"))

    for count in (2, 17, 64):
        check(loaded, "dynamic", torch.randn(count, 64, device=DEVICE))
    with pytest.raises(ValueError, match="size 65 in dimension 0, and it was built for 2 to 64"):
        loaded(torch.randn(65, 64, device=DEVICE))


@pytest.mark.parametrize("by", ["stator", "torch"])
def test_another_stream(by: str, built: Callable[..., Path]) -> None:
    path = built("perceptron")
    load: Any = stator.load if by == "stator" else torch._inductor.aoti_load_package
    loaded = load(str(path))
    model, (x,), _, _ = made("perceptron")
    stream = torch.cuda.Stream()
    wait()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)  # on the default stream the zeros would be read
        late.copy_(x)
        found = loaded(late)
    stream.synchronize()
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), atol=1e-3, rtol=1e-3)


def test_inputs_that_lie_otherwise_are_copied(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("perceptron"))

    check(loaded, "perceptron", torch.randn(32 * 64 + 1, device=DEVICE)[1:].view(32, 64))
    check(loaded, "perceptron", torch.randn(64, 32, device=DEVICE).t())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.cpu(), "input 0, input: it is on cpu, and it was built for cuda"),
        (lambda x: x.double(), "type float64, and it was built for float32"),
        (lambda x: x[:31], "size 31 in dimension 0, and it was built for 32"),
        (lambda x: x[0], "1 dimensions, and it was built for 2"),
    ],
)
def test_inputs_that_do_not_fit(
    spoil: Callable[[Tensor], Tensor], message: str, built: Callable[..., Path]
) -> None:
    loaded = stator.load(built("perceptron"))
    (x,) = made("perceptron")[1]

    with pytest.raises(ValueError, match=message):
        loaded(spoil(x))
    check(loaded, "perceptron")


def test_two_loads_share_nothing(tmp_path: Path) -> None:
    x = torch.randn(7, device=DEVICE)
    model = Counter().to(DEVICE)
    path = stator.aot_compile(model, (x,), options={"output_path": tmp_path / "model.pt2"})
    first, second = stator.load(path), stator.load(path)

    torch.testing.assert_close([first(x), first(x), first(x)], [x, 2 * x, 3 * x])
    torch.testing.assert_close(second(x), x)


def test_constants_are_replaced(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("perceptron"))
    model, (x,), _, _ = made("perceptron")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
        for device in (DEVICE, torch.device("cpu")):
            state = {k: v.detach().to(device) for k, v in other.state_dict().items()}
            loaded.load_constants(state)
            torch.testing.assert_close(loaded(x), other(x), atol=1e-3, rtol=1e-3)
            loaded.load_constants({k: v.detach() for k, v in model.state_dict().items()})
            check(loaded, "perceptron")
    assert {value.device.type for value in loaded.constants().values()} == {"cuda"}


def test_random_numbers_follow_the_seed(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, True) + torch.rand_like(x)

    x = torch.randn(1000, device=DEVICE)
    path = stator.aot_compile(Noise(), (x,), options={"output_path": tmp_path / "model.pt2"})
    loaded = stator.load(path)
    torch.manual_seed(3)
    first, second = loaded(x), loaded(x)
    torch.manual_seed(3)

    assert torch.equal(first, loaded(x))
    assert not torch.equal(first, second)


def test_memory_is_given_back(built: Callable[..., Path]) -> None:
    (x,) = made("half")[1]
    path = built("half")
    gc.collect()  # of what tests before this one left
    wait()
    before = torch.cuda.memory_allocated()
    loaded = stator.load(path)
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        loaded(x)
    wait()

    assert torch.cuda.memory_allocated() == held > before
    del loaded
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_threads(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("perceptron"))
    model, args, _, _ = made("perceptron")  # once: threads share torch's generator
    with torch.no_grad():
        expected = model(*args)
    wrong: list[BaseException] = []

    def go() -> None:
        try:
            for _ in range(20):
                torch.testing.assert_close(loaded(*args), expected, atol=1e-3, rtol=1e-3)
        except BaseException as error:
            wrong.append(error)

    threads = [Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_call_can_be_recorded(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("perceptron"))
    model, (x,), _, _ = made("perceptron")
    given = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loaded(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = loaded(given)
    given.copy_(2 * x)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(found, model(2 * x), atol=1e-3, rtol=1e-3)


# --- other cards ---


def test_another_capability_is_refused(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    other = 80 if (major, minor) != (8, 0) else 90
    path = build("perceptron", tmp_path / "model.pt2", gpu_arch=other)

    with pytest.raises(PackageError, match=f"has {major}.{minor}"):
        stator.load(path)
    package = read_package(path)
    weights = (package.file, package.start)
    with pytest.raises(PackageError, match=f"cuda:0 has {major}.{minor}"):
        Container(package.files, LIBRARY, weights, 1, torch.device("cuda", 0))


def test_devices_are_chosen_and_refused(built: Callable[..., Path]) -> None:
    loaded = stator.load(built("perceptron"), device="cuda:0")

    assert loaded.device == torch.device("cuda:0")
    check(loaded, "perceptron")
    with pytest.raises(PackageError, match="it is for cuda, and cpu was asked for"):
        stator.load(built("perceptron"), device="cpu")
    with pytest.raises(PackageError, match="there is no cuda:99"):
        stator.load(built("perceptron"), device="cuda:99")
