"""GPU tests are skipped without a GPU; what a test queued is waited for, so that it is blamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.on_device import DEVICE, HAS_DEVICE, wait
from tests.gpu.ready import register_backend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no device to run on."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        if not HAS_DEVICE:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif DEVICE.type == "cuda":
            # Errors elsewhere: here torch warns of drivers, libraries and other versions' plans.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True, scope="session")
def _backend_is_known() -> None:
    register_backend()


@pytest.fixture(autouse=True)
def _device_is_idle() -> Iterator[None]:
    """A fault of a kernel is raised at the end of its own test."""
    yield
    wait()
