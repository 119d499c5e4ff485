"""GPU tests are skipped without a GPU; what a test queued is waited for, so that it is blamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.on_device import DEVICE, HAS_DEVICE, WHERE, wait
from tests.gpu.ready import register_backend

HERE = Path(__file__).parent
# What takes minutes in Triton's interpreter; the kernels are those of other tests.  A name ends
# where its parameters begin.
LONG = (
    "test_cross_entropy[700-50257",
    "test_cross_entropy[33-32000",
    "test_uniform_and_normal_numbers_have_their_moments[",
    "test_as_many_are_dropped_as_should_be[",
    "test_masks_are_even_along_both_axes[",
    "test_the_backward_drops_what_the_forward_dropped[",
    "test_one_program_serves_all_sizes[",
    "test_a_transformer[",
    "test_a_convolutional_network[",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no device to run on."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        if not HAS_DEVICE:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif WHERE == "interpreter" and f"{item.name}[".startswith(LONG):
            item.add_marker(pytest.mark.skip(reason="too long for Triton's interpreter"))
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
