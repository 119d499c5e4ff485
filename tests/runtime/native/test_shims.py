"""C functions are declared as torch's own headers have them."""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import fx

from stator.codegen.triton.launch import module_text
from stator.core.dtypes import TORCH_DTYPES, scalar_type
from stator.runtime.memory import plan_memory
from stator.runtime.native.calls import Calls
from stator.runtime.native.executor import native_program
from stator.runtime.native.frame import Frame
from stator.runtime.native.prelude import prelude_text
from stator.runtime.native.shims import FRESH, INTO_MEMORY, PASSED_AS, WITH_NUMBERS, symbol_of
from stator.runtime.native.values import Handle, Values
from stator.runtime.plan import CPU, Allocation, Call, View
from stator.torch_api import (
    TENSOR_IN_OBJECT,
    argument_types,
    out_variant,
    torch_symbol,
)
from tests.runtime.launches import launch, plan

HEADERS: Final = (
    "inductor/aoti_torch/generated/c_shim_cpu.h",
    "inductor/aoti_torch/generated/c_shim_cuda.h",
    "inductor/aoti_torch/c/shim_cpu.h",
    "inductor/aoti_torch/c/shim.h",
    "stable/c/shim.h",
)
KINDS: Final = {
    "int64_t": "i64",
    "size_t": "i64",
    "int32_t": "i32",
    "uint32_t": "i32",
    "double": "double",
}
TABLES: Final = (INTO_MEMORY, FRESH, WITH_NUMBERS)
NAMES: Final = {op: name for table in TABLES for op, name in table.items() if op is not None}
_ON_CUDA_ALONE: Final = re.compile(
    r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_backward)?"
)
_ON_CPU_ALONE: Final = re.compile(r".*for_cpu.*|.*pointwise|_mkl_linear|mkldnn_rnn_layer")
SHIMS: Final = [
    *((op, f"aoti_torch_cpu_{n}") for op, n in NAMES.items() if not _ON_CUDA_ALONE.fullmatch(n)),
    *((op, f"aoti_torch_cuda_{n}") for op, n in NAMES.items() if not _ON_CPU_ALONE.fullmatch(n)),
]

folder = Path(torch.__file__).parent / "include" / "torch" / "csrc"
needs_headers = pytest.mark.skipif(not folder.exists(), reason="torch came without its headers")


@cache
def in_headers() -> dict[str, tuple[str, ...]]:
    """Parameters of each function that the headers declare, as LLVM has them."""
    found: dict[str, tuple[str, ...]] = {}
    for name in HEADERS:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (folder / name).read_text(), flags=re.DOTALL)
        for match in re.finditer(r"AOTITorchError\s+(\w+)\s*\(([^;]*)\)\s*;", text):
            found[match[1]] = tuple(as_llvm(piece) for piece in pieces(match[2]))
    return found


def pieces(parameters: str) -> Iterator[str]:
    """Parameters, one by one; those that are functions have commas of their own."""
    depth, start = 0, 0
    for place, letter in enumerate(parameters):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            yield parameters[start:place].strip()
            start = place + 1
    if parameters[start:].strip():
        yield parameters[start:].strip()


def as_llvm(parameter: str) -> str:
    kind = parameter.removeprefix("const ").split()[0]
    return "ptr" if "*" in parameter or kind.endswith("Handle") else KINDS.get(kind, kind)


def declared(text: str) -> dict[str, tuple[str, ...]]:
    """Parameters of each function that LLVM text declares."""
    found = re.finditer(r"^declare \S+ @(\w+)\(([^)]*)\)", text, flags=re.MULTILINE)
    return {
        match[1]: tuple(kind.strip() for kind in match[2].split(",") if kind.strip())
        for match in found
    }


def test_pieces_of_a_header_are_told_apart() -> None:
    text = "void* data,\n const int64_t* s, int32_t n, void (*f)(void* a, void* b), size_t m"

    assert [as_llvm(piece) for piece in pieces(text)] == ["ptr", "ptr", "i32", "ptr", "i64"]
    assert list(pieces("")) == []


# --- operators ---

EXAMPLES: Final[dict[str, tuple[Any, ...]]] = {
    "Tensor": ("a tensor", "a tensor", None),
    "Optional[Tensor]": ("a tensor", None),
    "int": (1, -1),
    "float": (0.5, 1),
    "number": (2, 0.5, True),
    "bool": (True, False),
    "str": ("none",),
    "Optional[int]": (3, None),
    "Optional[float]": (0.3, None),
    "Optional[number]": (2, 0.5, None),
    "Optional[bool]": (True, None),
    "Optional[str]": ("tanh", None),
    "List[int]": ([1, 2], [1], []),
    "List[bool]": ([True, False, True],),
    "Optional[List[int]]": ([4], None),
    "List[Optional[number]]": ([],),
}


def declared_for(op: Any, symbol: str, which: int) -> tuple[str, ...]:
    """How the host program declares the function that does `op`, for some choice of arguments."""
    frame = Frame()
    values = Values(frame, {}, frozenset(), frozenset())
    calls = Calls(frame, values)
    graph = fx.Graph()
    given = []
    for kind in argument_types(op):
        example = EXAMPLES[kind][which % len(EXAMPLES[kind])]
        if example == "a tensor":
            example = graph.placeholder("x")
            values.places[example.name] = Handle(frame.new_handle())
        given.append(example)
    into = Allocation("out", (), (), torch.float32) if op in INTO_MEMORY else None
    if into is not None:
        values.places["out"] = Handle(frame.new_handle())
    call = Call("out", op, tuple(given), {}, symbol=symbol, out=into)
    assert calls.is_passable(call)
    calls.run(call)
    return declared(frame.declared[symbol])[symbol]


@needs_headers
@pytest.mark.parametrize(("op", "symbol"), SHIMS, ids=str)
def test_an_operator_s_function_is_called_as_its_header_says(op: Any, symbol: str) -> None:
    wanted = in_headers()[symbol]

    for which in range(3):
        assert declared_for(op, symbol, which) == wanted


@pytest.mark.parametrize(("op", "symbol"), SHIMS, ids=str)
def test_every_function_is_there_and_every_type_has_a_rule(op: Any, symbol: str) -> None:
    if "_cpu_" in symbol or torch.version.cuda:
        assert torch_symbol(symbol) is not None
    assert set(argument_types(op)) <= set(PASSED_AS) == set(EXAMPLES)


def test_a_device_has_the_functions_that_torch_was_built_with() -> None:
    assert symbol_of("mm_out", CPU) == "aoti_torch_cpu_mm_out"
    assert symbol_of("_scaled_dot_product_flash_attention", CPU) is None
    assert symbol_of(None, CPU) is None


@pytest.mark.parametrize("op", INTO_MEMORY, ids=str)
def test_what_goes_into_memory_has_a_variant_that_python_can_call(op: Any) -> None:
    variant = out_variant(op)

    own = [argument.name for argument in op._schema.arguments]
    assert [argument.name for argument in variant._schema.arguments] == [*own, "out"]


# --- what every program calls ---


@needs_headers
def test_the_prelude_declares_torch_s_functions_as_they_are() -> None:
    known = in_headers()
    ours = {name: kinds for name, kinds in declared(prelude_text()).items() if "torch" in name}

    assert {"torch_from_blob", "aoti_torch_empty_strided", "aoti_torch_get_strides"} <= ours.keys()
    assert ours == {name: known[name] for name in ours}


@needs_headers
def test_launchers_declare_torch_s_functions_as_they_are() -> None:
    known = in_headers()
    ours = {name: kinds for name, kinds in declared(module_text([])).items() if "torch" in name}

    assert ours
    assert ours == {name: known[name] for name in ours}


@needs_headers
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_host_programs_declare_torch_s_functions_as_they_are(device: str) -> None:
    size, aten = (100, 100), torch.ops.aten
    a, b, c, e = (fx.Graph().placeholder(name) for name in "abce")
    room = replace(launch("a", "x", size=size).allocations[0], name="b")
    made = plan(
        "x",
        launch("a", "x", size=size),
        View("a", room, room.elements * 0, Call("b", aten.alias.default, (a,), {})),
        Call("c", aten.sort.default, (b,), {}, symbol="aoti_torch_cpu_sort"),
        Call("d", operator.getitem, (c, 0), {}),
        launch("e", "d", size=size),
        Call("f", aten.sort.default, (e,), {}, symbol="aoti_torch_cpu_sort"),
        outputs=(fx.Graph().placeholder("f"), b),
    )
    made = replace(made, device=torch.device(device))
    known = in_headers()
    ours = declared(native_program(made, plan_memory(made)).text)
    shared = {name: kinds for name, kinds in ours.items() if "torch" in name}

    own = {"torch_get_num_threads", "torch_from_blob"}
    if device != "cpu":
        own = {"aoti_torch_create_cuda_guard", "aoti_torch__alloc_from_pool"}
    assert {"aoti_torch_new_tensor_handle", *own} <= shared.keys()
    assert shared == {name: known[name] for name in shared}
    defined = {
        match[1]: tuple(piece.split()[0] for piece in pieces(match[2]))
        for match in re.finditer(
            r"^define \S+ @(stator_\w+)\((.*)\) {", prelude_text(), re.MULTILINE
        )
    }
    prelude = {name: kinds for name, kinds in ours.items() if name.startswith("stator_")}
    assert prelude
    assert prelude == {name: defined[name] for name in prelude}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_type_has_its_number(dtype: torch.dtype) -> None:
    address = torch_symbol(f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    assert address is not None

    assert ctypes.CFUNCTYPE(ctypes.c_int32)(address)() == scalar_type(dtype)


def test_a_tensor_is_found_inside_of_its_object() -> None:
    for tensor in (torch.empty(1), torch.nn.Parameter(torch.empty(2)), torch.empty(0).t()):
        inside = ctypes.c_uint64.from_address(id(tensor) + TENSOR_IN_OBJECT).value
        assert inside == tensor._cdata
