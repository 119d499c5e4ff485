"""What identifies the passes of users' in a cache key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import stator
from stator.graph.registry import registered_versions
from stator.patterns import PatternPass, fwd_only, register_replacement


@pytest.fixture
def versions_of() -> Iterator[Callable[..., Any]]:
    """The versions while a pass is registered."""

    def versions(pass_: Any, **settings: Any) -> list[str] | None:
        handle = stator.passes.register("joint", pass_, **settings)
        try:
            return registered_versions()
        finally:
            handle.remove()

    yield versions
    assert registered_versions() == []


def scaled(factor: Any) -> Any:
    """A pass that closes over a number."""

    def scale(graph: fx.Graph, ctx: Any) -> int:
        return int(factor is None)

    return scale


def replacing(factor: float) -> PatternPass:
    found = PatternPass("replacing")

    def search(x: Tensor) -> Tensor:
        return x.sin().cos()

    def replace(x: Tensor) -> Tensor:
        return x.sin().cos() * factor

    register_replacement(search, replace, [torch.randn(3)], fwd_only, found)
    return found


class Stateful:
    """A pass with a state of its own."""

    __name__ = "stateful"

    def __call__(self, graph: fx.Graph, ctx: Any) -> int:
        return 0


def test_the_same_pass_is_the_same_twice(versions_of: Callable[..., Any]) -> None:
    assert versions_of(scaled(2.0)) == versions_of(scaled(2.0))
    assert versions_of(replacing(1.0)) == versions_of(replacing(1.0))


def test_what_a_function_closes_over_is_part_of_it(versions_of: Callable[..., Any]) -> None:
    assert versions_of(scaled(2.0)) != versions_of(scaled(3.0))
    assert versions_of(replacing(1.0)) != versions_of(replacing(2.0))


def test_a_place_is_part_of_it(versions_of: Callable[..., Any]) -> None:
    assert versions_of(scaled(2.0)) != versions_of(scaled(2.0), before="drop_noops")


def test_what_cannot_be_told_needs_a_version(versions_of: Callable[..., Any]) -> None:
    assert versions_of(Stateful()) is None
    assert versions_of(scaled(object())) is None
    assert versions_of(Stateful(), version="2") == ["joint stateful None None 2"]


def test_a_program_is_not_kept_while_a_pass_cannot_be_told(tmp_path: Any) -> None:
    handle = stator.passes.register("joint", Stateful())
    try:
        options = {"strict": True, "cache": True, "cache_dir": tmp_path}
        torch.compile(lambda x: x.sin() + 3, backend="stator", options=options)(torch.randn(3))
    finally:
        handle.remove()
    record = stator.last_compilation()
    assert record is not None
    assert "version" in str(record.cache)
