"""Packages of the test models, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stator
from tests.package.models import made


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a model's package."""
    folder = tmp_path_factory.mktemp("packages")
    paths: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in paths:
            model, args, kwargs, dynamic = made(name)
            wishes = {"output_path": folder / f"{name}.pt2"}
            with torch.no_grad():
                path = stator.aot_compile(
                    model, args, kwargs, dynamic_shapes=dynamic, options=wishes
                )
            paths[name] = Path(path)
        return paths[name]

    return path_of
