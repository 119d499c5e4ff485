"""Quantised models: as their own reference computes, with integers, and nothing in silence."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

import stator
from stator.core.events import Compilation
from stator.ops.libraries import int8_linear
from tests.e2e.quantized_models import MODELS, quantized_model, with_quantized_weights

pytestmark = pytest.mark.skipif(int8_linear() is None, reason="torch has no oneDNN here")

PRODUCTS = {"images": 3, "block": 6, "layers": 3, "joined": 6}


def compiled(model: Any, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Compilation]:
    """What the frozen program computes, and its record."""
    with torch.no_grad():
        program = stator.compile(model, freezing=True, cache=False, strict=True, **options)
        program(x)
        found = program(x)
    record = stator.last_compilation()
    assert record is not None
    assert record.fallback is None
    return found, record


def integer_products(record: Compilation) -> int:
    """Calls of oneDNN's operators on integers."""
    called = Counter(map(str, record.called))
    return sum(count for name, count in called.items() if name.startswith("onednn.q"))


def require_within(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """No element is further away than a share of the largest."""
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= share * expected.abs().max()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_within_a_hundredth_and_of_integers(name: str, dynamic: bool) -> None:
    model, x = quantized_model(name, dynamic=dynamic)
    found, record = compiled(model, x)

    with torch.no_grad():
        require_within(found, model(x), 0.01)
    assert integer_products(record) == PRODUCTS[name]
    kernels = {str(name) for name in record.called}
    assert not any("mm" in name or "convolution" in name for name in kernels)
    assert not any("quantized_decomposed" in name for name in kernels)
    assert sum(" is int8" in note for note in record.notes) == PRODUCTS[name]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_the_library_multiplies_integers(
    name: str, dynamic: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """By oneDNN's own account of what it runs."""
    model, x = quantized_model(name, dynamic=dynamic)
    torch._dynamo.reset()
    with torch.no_grad():
        program = stator.compile(model, freezing=True, cache=False, strict=True)
        program(x)
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            program(x)
    lines = capfd.readouterr().out.splitlines()
    ran = [
        line for line in lines if ",exec,cpu,matmul," in line or ",exec,cpu,convolution," in line
    ]
    assert len(ran) == PRODUCTS[name]
    assert all(re.search(r"src:u8.* wei:s8", line) for line in ran), ran
    weights = [line for line in lines if ",exec,cpu,reorder," in line and "dst:s8" in line]
    # They were packed before: for some zero point where it is known at run time alone, and of an
    # image that then has none oneDNN takes some of them otherwise.
    assert dynamic or not weights


def test_without_the_passes_it_is_of_floats() -> None:
    """What the test above counts is what the passes do."""
    model, x = quantized_model("layers", dynamic=False)
    found, record = compiled(model, x, skip=("int8_linear",))

    with torch.no_grad():
        require_within(found, model(x), 0.01)
    assert integer_products(record) == 0


def test_new_weights_are_packed_anew() -> None:
    model, x = quantized_model("layers", dynamic=False)
    with torch.no_grad():
        program = stator.compile(model, freezing=True, cache=False, strict=True)
        program(x)
        weights = {
            name: value.flip(0) if value.dtype is torch.int8 else value
            for name, value in model.state_dict().items()
        }
        stator.update_weights(program, weights)
        found = program(x)
    other, _ = quantized_model("layers", dynamic=False)
    with torch.no_grad():
        other.load_state_dict(weights)
        require_within(found, other(x), 0.01)


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_any_size(name: str) -> None:
    model, x = quantized_model(name, dynamic=False, any_batch=True)
    torch._dynamo.reset()
    program = torch.compile(
        model,
        backend="stator",
        dynamic=True,
        options={"freezing": True, "strict": True, "cache": False},
    )
    with torch.no_grad():
        for batch in (x, torch.cat([x, x.flip(0)]), x[:2]):
            require_within(program(batch), model(batch), 0.01)
    record = stator.last_compilation()
    assert record is not None
    assert integer_products(record) == PRODUCTS[name]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"joined"}))
def test_between_casts_to_half_precision(name: str) -> None:
    """Autocast's casts around products are no obstacle; the reference here is that of floats.

    What is joined is of bfloat16 before it is quantised, and further from these than a hundredth.
    """
    model, x = quantized_model(name, dynamic=False)
    with torch.no_grad():
        expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found, record = compiled(model, x)

    require_within(found.float(), expected, 0.01)
    assert integer_products(record) == PRODUCTS[name]


def test_without_constants_it_says_so() -> None:
    """The executor in Python keeps none."""
    model, x = quantized_model("layers", dynamic=False)
    _, record = compiled(model, x, executor="python")
    assert sum("is not int8: its weight is no constant" in note for note in record.notes) == 3


def test_each_pass_keeps_the_values() -> None:
    model, x = quantized_model("images", dynamic=False)
    found, _ = compiled(model, x, verify_passes="values")

    with torch.no_grad():
        require_within(found, model(x), 0.01)


@pytest.mark.parametrize(
    ("kind", "dtype", "called"),
    [
        ("Int8WeightOnlyConfig", torch.bfloat16, "aten._weight_int8pack_mm.default"),
        ("Int8WeightOnlyConfig", torch.float32, "aten.mm.default"),
        ("Int8DynamicActivationInt8WeightConfig", torch.float32, "aten._int_mm.default"),
        ("smooth", torch.float32, "aten._int_mm.default"),
        ("int4", torch.float32, "aten._weight_int4pack_mm_for_cpu.default"),
        ("int4", torch.bfloat16, "aten._weight_int4pack_mm_for_cpu.default"),
    ],
)
def test_weights_that_are_tensors_of_torchao(kind: str, dtype: torch.dtype, called: str) -> None:
    """In float32, torch has no kernel that gains by integers alone in the weight; that is noted."""
    model, x = with_quantized_weights(kind, dtype)
    found, record = compiled(model, x)

    with torch.no_grad():
        require_within(found.float(), model(x).float(), 0.01)
    assert list(map(str, record.called)).count(called) == PRODUCTS["layers"]
    if called == "aten.mm.default":
        assert sum("not int8: its input is not of half" in note for note in record.notes) == 3
