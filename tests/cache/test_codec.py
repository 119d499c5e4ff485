"""Programs as bytes: what may be inside comes back as it was, nothing else goes in, none runs."""

from __future__ import annotations

import builtins
import copy
import functools
import json
import math
import operator
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from stator.aot import metadata, views
from stator.aot.function import StoredBackward
from stator.aot.subclasses import PLAIN
from stator.cache.codec import NotData, from_bytes, to_bytes
from stator.core.events import Held
from stator.ops.draws import draw_seed
from stator.runtime import rare
from stator.runtime.native.image import Image, Operator

LINES: Final = ["a.py:1", "b.py:2"]
aten: Final = torch.ops.aten


def again(value: Any) -> Any:
    """A value, written and read."""
    return from_bytes(to_bytes(value, LINES), LINES)


def same(one: Any, other: Any) -> bool:
    """Equal, of equal types, all the way down; NaN is NaN, and zero has a sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


PROGRAM: Final = metadata.Program(
    inputs=(metadata.InputFact(requires_grad=True, mutation=metadata.Mutation.COPY, bumps=True),),
    outputs=(
        metadata.OutputFact(metadata.Source.CONSTANT, constant=(1, 1.5, None)),
        metadata.OutputFact(
            metadata.Source.VIEW_OF_INPUT,
            view=views.View((views.Step(aten.select.int, (0, -1), (("dim", 0),)),), detach=True),
        ),
        metadata.OutputFact(
            metadata.Source.GRAPH, view=views.View(geometry=views.Geometry((2,), (3,), 1))
        ),
    ),
    values=(metadata.ValueFact(PLAIN, differentiable=True, of_output=1),),
    tangents=(metadata.TangentPlan(PLAIN, (3, 1), channels_last=False),),
    grads=(PLAIN, None),
    grad_mode_after=None,
    draws_random=True,
)
FACTS: Final = metadata.Facts(
    PROGRAM, (metadata.Saved(metadata.Kept.EXTRA, 0, is_tensor=True),), (0, 2), "no derivative"
)
IMAGE: Final = Image(
    host=b"\x7fELF\0host",
    modules=(b"one", b"", b"two"),
    kernels=((0, "kernel"), (2, "k")),
    table=(None, ..., 1.5, Operator("aten::mm"), rare.as_planned, torch.float32, (1, (2,))),
    prelude=bytes(range(256)),
    held=Held(arena=1 << 40, pool=0, torch=3),
)

VALUES: Final[dict[str, Any]] = {
    "none": None,
    "bools": [True, False, 1, 0],
    "integers": [0, -1, 1 << 63, -(1 << 200), 10**4000],
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1],
    "complex": [0j, complex(-0.0, 0.0), complex(math.inf, math.nan)],
    "texts": ["", "\0", '"\\', "é\n\u2028", "\ud800", "\U0001f600", "tuple"],
    "bytes": [b"", b"\0", bytes(range(256))],
    "nested": ([], (), {}, [[], [()]], ((1,), [2, (3, [4])]), {"a": {1: [None]}}),
    "looks like a tag": ["tensor", "float32", [1], [1], 0],
    "keys": {1: "int", "1": "text", None: 0, (1, 2): [], 1.5: 2, True + 1: 3},
    "slices": [slice(None), slice(1, -2, 3), ...],
    "sizes": [torch.Size([]), torch.Size([2, 0, 3])],
    "names of torch": [torch.float8_e4m3fn, torch.strided, torch.sparse_csr, torch.channels_last],
    "devices": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    "operators": [aten.add.Tensor, aten.mm.default, aten.add_.Tensor, torch.ops.prims.sin.default],
    "functions": [operator.add, operator.getitem, math.sqrt, max, slice, int, abs, F.relu],
    "ours": [rare.as_planned, rare.refuse, rare.truth, rare.empty_strided, draw_seed],
    "errors": [IndexError, RuntimeError, ValueError, NotImplementedError],
    "enums": [*metadata.Mutation, *metadata.Source, *metadata.Kept],
    "facts": FACTS,
    "image": IMAGE,
    "backward": StoredBackward(IMAGE, (0, 2), ((torch.float32, torch.device("cpu")),)),
    "notes": rare.Annotate(((0, rare.Note("f", "b.py:2")), (3, rare.Note("g", None)))),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_written_is_read(name: str) -> None:
    assert same(again(VALUES[name]), VALUES[name])


def test_functions_and_operators_are_the_very_same() -> None:
    for value in (*VALUES["functions"], *VALUES["ours"], *VALUES["operators"], *VALUES["enums"]):
        assert again(value) is value


PLAIN_VALUES: Final = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text()), inner, max_size=3),
        st.binary(max_size=9),
    ),
    max_leaves=8,
)


def without_nan_payloads(value: Any) -> Any:
    """One NaN is as good as another: text has but one."""
    if isinstance(value, float):
        return math.nan if value != value else value
    if isinstance(value, complex):
        return complex(without_nan_payloads(value.real), without_nan_payloads(value.imag))
    if isinstance(value, list | tuple):
        return type(value)(map(without_nan_payloads, value))
    if isinstance(value, dict):
        return {key: without_nan_payloads(item) for key, item in value.items()}
    return value


@settings(max_examples=300, deadline=None)
@given(PLAIN_VALUES)
def test_whatever_is_nested_is_read_as_it_was_written(value: Any) -> None:
    value = without_nan_payloads(value)

    assert same(again(value), value)
    assert to_bytes(value, LINES) == to_bytes(copy.deepcopy(value), LINES)


# Tensors


DTYPES: Final = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_of_any_type_is_read_bit_by_bit_or_refused(dtype: torch.dtype) -> None:
    value = torch.empty(7 * dtype.itemsize, dtype=torch.uint8)
    value.random_(2 if dtype is torch.bool else 256)
    try:
        value = value.view(dtype)
    except RuntimeError:
        pytest.skip("torch itself makes no such tensor")
    try:
        data = to_bytes(value, [])
    except NotData:
        assert "int" in str(dtype)  # types of few bits, or quantized
        return

    found = from_bytes(data, [])

    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(2, 0, 3).transpose(0, 2),
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.arange(9.0)[::2],
        lambda: torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda: torch.arange(8.0).as_strided((2, 2), (3, 1), 2),
        lambda: torch.tensor([1 + 2j, 3]).conj(),
        lambda: torch.tensor([1 + 2j, 3]).conj().imag,
        lambda: torch.tensor([math.nan, -0.0, math.inf]),
        lambda: torch.ones(1).expand(1, 1),
    ],
)
def test_a_constant_lies_as_it_did(make: Callable[[], torch.Tensor]) -> None:
    value = make()
    found = again([value])[0]

    assert (found.shape, found.stride(), found.dtype) == (value.shape, value.stride(), value.dtype)
    assert torch.equal(found.nan_to_num(7.0), value.nan_to_num(7.0))
    assert torch.equal(
        torch.signbit(torch.view_as_real(found + 0j)), torch.signbit(torch.view_as_real(value + 0j))
    )


def test_a_constant_is_the_readers_own() -> None:
    data = to_bytes(torch.zeros(4), [])
    one, other = from_bytes(data, []), from_bytes(data, [])
    one.add_(1)

    assert torch.equal(other, torch.zeros(4))
    assert torch.equal(from_bytes(data, []), torch.zeros(4))


# What is no data


class Own:
    """Something of the user's."""

    def __call__(self) -> None: ...


class Named(torch.Tensor):
    """A tensor of the user's."""


@functools.wraps(F.relu)
def in_disguise(x: Any) -> Any:
    return x


Facts = type("Facts", (), {"__module__": "stator.aot.metadata"})  # called as one of ours

REFUSED: Final[dict[str, Callable[[], Any]]] = {
    "an object": object,
    "a function": lambda: again,
    "a lambda": lambda: lambda: None,
    "a disguise": lambda: in_disguise,
    "a class": lambda: Own,
    "a callable": Own,
    "a bound method": lambda: [].append,
    "a partial": lambda: functools.partial(max, 1),
    "a module": lambda: nn.Linear(1, 1),
    "a Python module": lambda: math,
    "a file": lambda: sys.stdout,
    "a set": lambda: {1},
    "a generator": lambda: (i for i in [1]),
    "a class called as ours": lambda: Facts(),
    "eval": lambda: eval,
    "exec": lambda: exec,
    "print": lambda: print,
    "import": lambda: builtins.__import__,
    "getattr": lambda: getattr,
    "system": lambda: os.system,
    "an exit": lambda: SystemExit,
    "a number of 5000 digits": lambda: 10**5000,
    "a parameter": lambda: nn.Parameter(torch.ones(1)),
    "a tensor with grad": lambda: torch.ones(1, requires_grad=True),
    "a subclass": lambda: torch.ones(1).as_subclass(Named),
    "a sparse tensor": lambda: torch.ones(1).to_sparse(),
    "a meta tensor": lambda: torch.empty(1, device="meta"),
    "an expanded tensor": lambda: torch.ones(1).expand(3),
    "a policy": lambda: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE,
    "a random generator": torch.Generator,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_other_process_could_make_is_refused(name: str) -> None:
    with pytest.raises(NotData):
        to_bytes([REFUSED[name]()], LINES)
    with pytest.raises(NotData):
        to_bytes({"key": (REFUSED[name](),)}, LINES)


def test_lines_are_numbers_and_follow_the_reader() -> None:
    data = to_bytes(rare.Note("f", "b.py:2"), LINES)

    assert b"b.py" not in data
    assert from_bytes(data, ["x.py:7", "y.py:8"]) == rare.Note("f", "y.py:8")
    assert again(rare.Note("f", "nowhere.py:3")) == rare.Note("f", None)


# Bytes that nobody wrote

WHOLE: Final = to_bytes((FACTS, IMAGE, torch.arange(6.0).reshape(2, 3), VALUES["nested"]), LINES)


def packed(tree: Any, *blobs: bytes, lengths: Any = None) -> bytes:
    """The bytes of a tree that no writer made."""
    given = [len(blob) for blob in blobs] if lengths is None else lengths
    text = json.dumps({"lengths": given, "tree": tree}).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


FOREIGN: Final[dict[str, bytes]] = {
    "nothing": b"",
    "a length alone": (1 << 40).to_bytes(8, "little"),
    "no JSON": (3).to_bytes(8, "little") + b"{{{",
    "no tree": packed(None)[:-1],
    "unknown tag": packed(["frobnicate", 1]),
    "tag of a method": packed(["_class__", [], []]),
    "tag of a field": packed(["_getattribute__", "blobs"]),
    "tag that is no text": packed([["list"], 1]),
    "empty list": packed([]),
    "unknown data": packed(["data", "Popen", "true"]),
    "data with fields too many": packed(["data", "Saved", 1, 2, 3, 4]),
    "unknown enum": packed(["enum", "Mutation", "EXPLODE"]),
    "unknown operator": packed(["operator", "aten::no_such.thing"]),
    "a function of the system": packed(["function", "os", "system"]),
    "the same through torch": packed(["function", "torch", "os.system"]),
    "the same through an alias": packed(["function", "torch.os", "system"]),
    "eval": packed(["function", "builtins", "eval"]),
    "an exit": packed(["function", "builtins", "SystemExit"]),
    "a module of torch's": packed(["function", "torch", "nn"]),
    "a function as a name": packed(["torch", "load"]),
    "a module as a name": packed(["torch", "os"]),
    "constant with too few bytes": packed(["tensor", "float32", [4], [1], 0], bytes(15)),
    "constant with too many": packed(["tensor", "float32", [4], [1], 0], bytes(1 << 16)),
    "constant of no type": packed(["tensor", "load", [4], [1], 0], bytes(16)),
    "constant of negative size": packed(["tensor", "float32", [-4], [1], 0], bytes(16)),
    "constant too large": packed(["tensor", "float32", [1 << 60], [1], 0], bytes(16)),
    "constant that overlaps": packed(["tensor", "float32", [4], [0], 0], bytes(16)),
    "a blob too few": packed(["bytes", 1], b"one"),
    "a line too few": packed(["note", "f", 2]),
    "deep": packed(None)[:8] + b"[" * 100_000,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_bytes_that_are_no_program_raise_and_do_nothing(name: str) -> None:
    with pytest.raises(Exception, match=r".*"):
        from_bytes(FOREIGN[name], LINES)


def trees(data: bytes) -> tuple[Any, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def places(tree: Any) -> list[tuple[list[Any], int]]:
    """Every place in nested lists."""
    found = [(tree, index) for index in range(len(tree))] if isinstance(tree, list) else []
    return found + [place for item in found for place in places(item[0][item[1]])]


STRANGE: Final[list[Any]] = [
    None,
    -1,
    1 << 70,
    1.5,
    "",
    "os",
    "float",
    "_class__",
    [],
    {},
    ["tuple"],
    True,
]


def mutated(chance: random.Random) -> bytes:
    """The bytes of a program after one to three changes to what it says."""
    head, rest = trees(WHOLE)
    for _ in range(chance.randint(1, 3)):
        inside, index = chance.choice(places(head["tree"]))
        match chance.randrange(4):
            case 0:
                inside[index] = copy.deepcopy(chance.choice(STRANGE))
            case 1:
                other, place = chance.choice(places(head["tree"]))
                inside[index] = copy.deepcopy(other[place])
            case 2:
                del inside[index]
            case 3:
                inside.insert(index, copy.deepcopy(chance.choice(STRANGE)))
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no file, no code: reading needs none of them."""

    def forbidden(*_: Any, **__: Any) -> None:
        pytest.exit("reading bytes ran something", returncode=3)

    for owner, name in ((os, "system"), (subprocess, "Popen"), (Path, "write_bytes")):
        monkeypatch.setattr(owner, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch.hub, "load", forbidden)


@pytest.mark.usefixtures("_nothing_runs")
def test_a_thousand_changes_to_what_a_program_says_raise_or_give_another() -> None:
    chance, modules, raised = random.Random(0), set(sys.modules), 0
    for _ in range(1000):
        try:
            from_bytes(mutated(chance), LINES)
        except Exception:
            raised += 1

    assert 300 < raised < 1000
    assert {name for name in sys.modules if not name.startswith("torch")} <= modules


@pytest.mark.usefixtures("_nothing_runs")
def test_a_thousand_accidents_to_the_bytes_raise_or_give_another() -> None:
    chance = random.Random(1)
    for _ in range(1000):
        data = bytearray(WHOLE)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 3000))] = chance.randrange(256)
        del data[chance.choice((len(data), chance.randrange(len(data)))) :]
        try:
            from_bytes(bytes(data), LINES)
        except Exception:
            continue


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise(data: bytes) -> None:
    with pytest.raises(Exception, match=r".*"):
        from_bytes(data, [])
