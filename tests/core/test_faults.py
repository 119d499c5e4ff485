"""Faults strike where they are set, as long as they are set, and nowhere else."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from stator.backend import compile_fx
from stator.core import faults
from stator.errors import CompileError
from stator.graph.capture import attribute_tensors


def test_no_fault_is_set() -> None:
    assert not faults.SET


def test_a_value_passes_where_no_fault_is_set() -> None:
    with faults.fault("lower", lambda value, node: value + 1):
        assert faults.strike("kernel", 5, None) == 5


def test_a_fault_changes_what_passes_until_it_is_taken_out() -> None:
    with faults.fault("lower", lambda value, node: value + node):
        assert faults.strike("lower", 5, 2) == 7
    assert faults.strike("lower", 5, 2) == 5
    assert not faults.SET


def test_faults_of_one_place_strike_one_after_the_other() -> None:
    with (
        faults.fault("lower", lambda value: value + 1),
        faults.fault("lower", lambda value: value * 10),
    ):
        assert faults.strike("lower", 1) == 20


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no place 'linker'"):
        faults.set_fault("linker", lambda value: value)


def test_the_environment_names_a_function_that_sets_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("a_module_of_bugs")
    module.plant = lambda words: faults.set_fault("lower", lambda value: f"{value} {words}")  # type: ignore[attr-defined]  # a module made by hand
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(faults, "wanted_fault", lambda: "a_module_of_bugs:plant:and more")
    monkeypatch.setitem(faults.SET, "from the environment", [])
    try:
        assert faults.strike("lower", "this") == "this and more"
        assert list(faults.SET) == ["lower"]
    finally:
        faults.SET.clear()


def test_a_kernel_with_a_fault_is_neither_found_nor_kept() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.atan.default, (x,)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert not attribute_tensors(module)
    inputs = [torch.randn(3)]
    options = {"strict": True, "cache": False}

    def wrong(text: str, kernel: object) -> str:
        raise RuntimeError("no text")

    (right,) = compile_fx(module, inputs, options=options)(*inputs)
    with faults.fault("kernel", wrong), pytest.raises(CompileError, match="no text"):
        compile_fx(module, inputs, options=options)
    (again,) = compile_fx(module, inputs, options=options)(*inputs)
    assert torch.equal(right, again)
