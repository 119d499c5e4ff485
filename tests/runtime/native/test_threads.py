"""Programs run from many threads, inside of each other, and on both sides of a fork."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stator
from tests.runtime.native import operators
from tests.runtime.native.executors import compiled

ROOT: Final = Path(__file__).parents[3]


def network(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Kernels, C functions, Python, a check, views."""
    y = F.gelu(x @ w)
    return (
        y.softmax(-1) @ w,
        y[1:].t(),
        F.embedding(i, y),
        torch.linalg.vector_norm(torch.linalg.qr(y)[1]),
        y.topk(2).indices,
    )


def arguments(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, size), torch.randn(size, size), torch.randint(0, size, (5,))


def require_close(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


# --- threads ---


@pytest.mark.parametrize("size", [6, 150])
def test_many_threads_call_one_function(size: int) -> None:
    run = compiled(network, "native")
    inputs = [arguments(size) for _ in range(32)]
    run(*inputs[0])
    start = threading.Barrier(32)

    def work(given: tuple[Tensor, ...]) -> None:
        expected = network(*given)
        start.wait()
        kept = [run(*given) for _ in range(10)]
        for ours in kept:
            require_close(ours, expected)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, inputs))


def test_many_threads_train_one_function() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x @ w) @ w

    def gradient(call: Callable[..., Any], x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        call(x, w).sum().backward()
        return x.grad

    run, w = compiled(function, "native"), torch.randn(40, 40)
    gradient(run, w)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        x = torch.full((40, 40), number / 40)
        expected = gradient(function, x)
        start.wait()
        for _ in range(10):
            torch.testing.assert_close(gradient(run, x), expected, atol=1e-3, rtol=1e-3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_memory_may_be_given_back_at_any_time() -> None:
    run = compiled(lambda x: torch.sin(x @ x) @ x, "native")
    inputs = [torch.full((200, 200), n / 400) for n in range(4)]
    expected = [run(x) for x in inputs]
    stop = threading.Event()

    def give_back() -> None:
        while not stop.is_set():
            stator.trim()
            assert stator.memory().used >= 0

    def work(number: int) -> None:
        for _ in range(50):
            assert torch.equal(run(inputs[number]), expected[number])

    thread = threading.Thread(target=give_back)
    thread.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stop.set()
    thread.join()


def test_threads_compile_different_functions() -> None:
    torch._dynamo.reset()
    start = threading.Barrier(8)

    def work(number: int) -> None:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            for _ in range(number + 1):
                x = torch.tanh(x @ x) / 12 + number / 100
            return x, x[number:]

        run = stator.compile(function, strict=True, dynamic=True)
        start.wait()
        for size in (9, 12):
            x = torch.eye(size) / size
            require_close(run(x), function(x))

    # The threads of torch 2.11 have Dynamo's switches in common: one may put back what another set.
    with torch._dynamo.config.patch(assume_static_by_default=True), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@contextmanager
def busy() -> Iterator[list[float]]:
    """A thread that does nothing but Python; the longest time that it had to wait, in a list."""
    waited, stop = [0.0], threading.Event()

    def spin() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            waited[0], last = max(waited[0], now - last), now

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield waited
    finally:
        stop.set()
        thread.join()


LONG: Final[dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]] = {
    "kernel": (lambda x: x.sin().exp().erf().cos().tanh().lgamma(), (1 << 23,)),
    "product": (lambda x: x @ x, (2000, 2000)),
    "products": (lambda x: torch.bmm(x, x), (16, 700, 700)),
    "sort": (lambda x: x.sort()[0], (1 << 21,)),
}


@pytest.mark.parametrize("name", LONG)
def test_python_goes_on_while_a_program_works(name: str) -> None:
    function, size = LONG[name]
    run, x = compiled(function, "native"), torch.rand(size)
    run(x)

    def share_waited() -> float:
        with busy() as waited:
            start = time.perf_counter()
            run(x)
            return waited[0] / (time.perf_counter() - start)

    assert min(share_waited() for _ in range(3)) < 0.5


def test_a_program_goes_on_while_python_is_busy() -> None:
    run = compiled(network, "native")
    given = arguments(20)
    expected = network(*given)
    run(*given)

    with busy():
        for _ in range(3):
            require_close(run(*given), expected)


# --- programs inside of programs ---


def test_an_operator_may_call_a_compiled_function() -> None:
    inner = compiled(lambda x: torch.sin(x @ x) @ x, "native")
    operators.inside.append(inner)

    def outer(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x.t()
        z = operators.call_back(y)
        return z @ y, y.relu() @ z

    run = compiled(outer, "native")
    x = torch.randn(30, 30) / 30
    for _ in range(3):
        require_close(run(x), outer(x))
    operators.inside.clear()


def test_a_compiled_function_may_call_itself() -> None:
    def outer(x: Tensor) -> Tensor:
        y = (x @ x).tanh()
        return operators.call_back(y) @ y

    def nested(call: Callable[[Tensor], Tensor], depth: int) -> Callable[[Tensor], Tensor]:
        """An operator that calls `call`, in which it calls `call`, and so on."""

        def inner(x: Tensor) -> Tensor:
            operators.inside.append(nested(call, depth - 1))
            found = call(x)
            operators.inside.pop()
            return found

        return inner if depth else lambda x: x + 1

    run = compiled(outer, "native")
    x = torch.randn(20, 20) / 10
    for call in (run, outer):
        operators.inside.append(nested(call, 5))
        operators.kept.append(call(x))
        operators.inside.clear()

    torch.testing.assert_close(operators.kept.pop(), operators.kept.pop())


def test_an_error_inside_leaves_the_outer_program_whole() -> None:
    inner = compiled(lambda x: operators.fail(x @ x, 1) + 1, "native")

    def guarded(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="not this one"):
            inner(x)
        return x + 1

    operators.inside.append(guarded)
    run = compiled(lambda x: operators.call_back(x @ x) @ x, "native")
    x = torch.randn(30, 30) / 30
    torch.testing.assert_close(run(x), (x @ x + 1) @ x)
    operators.inside.clear()


# --- processes ---

FORKS: Final = """
import json, os, signal, sys, threading
import torch, stator

def function(x):
    return torch.sin(x @ x) @ x

run = stator.aot_function(function, strict=True)
x = torch.randn(200, 200) / 200
expected = run(x)
stop = threading.Event()

def work():
    while not stop.is_set():
        assert torch.equal(run(x), expected)

threads = [threading.Thread(target=work) for _ in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
codes = []
before = stator.memory()
for _ in range(15):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        torch.set_num_threads(1)
        kept = [run(x) for _ in range(5)]
        good = all(torch.equal(found, expected) for found in kept)
        kept = None
        stator.trim()
        os._exit(0 if good and torch.equal(run(x), expected) else 1)
    codes.append(os.waitpid(child, 0)[1])
after = stator.memory()
stop.set()
for thread in threads:
    thread.join()
good = all(torch.equal(run(x), expected) for _ in range(20))
print(json.dumps({"codes": codes, "good": good, "same": before == after}))
"""

LATE: Final = """
import atexit, builtins, sys
import torch, stator

run = stator.aot_function(lambda x: torch.sin(x @ x) @ x, strict=True)
x = torch.randn(200, 200)
y = run(x)

class Late:
    def __init__(self):
        self.run, self.x, self.y, self.equal = run, x, run(x), torch.equal
    def __del__(self):
        assert self.equal(self.run(self.x), self.y)

circle = [Late()]
circle.append(circle)
builtins.kept = Late(), run(x)  # gone after every module
atexit.register(lambda: print("at exit", torch.equal(run(x), y)))
"""


def printed(script: str, *arguments: str) -> str:
    """What a process prints that ends well."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("threads", [0, 3])
def test_both_sides_of_a_fork_go_on(threads: int) -> None:
    said = json.loads(printed(FORKS, str(threads)))

    assert said["codes"] == [0] * 15
    assert said["good"]
    if not threads:
        assert said["same"], "what a child did to its pool was seen by its parent"


def test_programs_may_run_while_the_process_ends() -> None:
    assert printed(LATE) == "at exit True\n"
