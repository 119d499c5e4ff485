"""Options of the test run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import parity

TORCH_WARNS = (
    "The .grad attribute of a Tensor that is not a leaf",  # Dynamo looks at every input
    "`torch.jit.script_method` is deprecated",  # importing torch's own modules
    ".*should not be instantiated. Methods on autograd functions are all static",  # Dynamo does
    ".*Profiler clears events at the end of each cycle",  # any profile, in torch 2.11
)
SLOW = (HealthCheck.too_slow,)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the parity tests run on another backend: is it ours that fails, or the test?"""
    parser.addoption("--backend", default="stator", help="backend that parity.check compiles with")
    parser.addoption("--no-kernels", action="store_true", help="let torch run every operator")
    parser.addoption("--update-golden", action="store_true", help="write kept texts anew")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the chosen backend to the harness; let pass what torch warns of on its own account."""
    os.environ["STATOR_CACHE"] = "0"  # tests of the cache have folders of their own
    parity.BACKEND.set(config.getoption("--backend"))
    parity.KERNELS.set(not config.getoption("--no-kernels"))
    # How long an example takes says more of the machine than of us.
    settings.register_profile("any machine", deadline=None, suppress_health_check=SLOW)
    settings.load_profile("any machine")
    for message in TORCH_WARNS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_collection_finish() -> None:
    """Take torch and thousands of tests, which stay to the end, from what is searched for waste.

    And search seldom: Dynamo makes hundreds of thousands of objects for one compilation, nearly all
    of which go without a search.
    """
    import torch._dynamo.guards  # noqa: F401  # the first test would; it stays to the end too

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """Spare what Dynamo does for its log alone: it empties the processor's caches, then times.

    That is 20 ms of every compilation, and of whatever runs beside it; nothing reads the number.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves no compiled code behind."""
    # Not torch.manual_seed: for each kind of device that is not there it writes down the whole
    # stack, in a list that grows; half a millisecond of each of ten thousand tests.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_searched_once() -> Iterator[None]:
    """Take what a file's tests leave for good, machine code and caches, from the search as well.

    Else a test that has waste collected waits for a search of all that thousands before it left.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether kept texts are written anew instead of compared."""
    return bool(request.config.getoption("--update-golden"))
