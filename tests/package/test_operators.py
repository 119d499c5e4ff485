"""Operators of eager mode from the disk: found, compiled, damaged, replaced; and switched on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import stator
from stator import eager_ops
from stator.errors import OptionError, PackageError, StatorWarning, Unsupported
from stator.package import operators
from stator.package.archive import LIBRARY, own_version, read_package
from stator.package.lookup import Operator
from stator.package.native import Container

add = torch.ops.aten.add.Tensor
X, Y = torch.randn(3, 4), torch.randn(4)


def compiled(folder: Path, *args: Any, **options: Any) -> str:
    """The package of an addition."""
    return stator.aoti_compile_with_persistent_cache(
        "aten",
        "add.Tensor",
        "cpu",
        False,
        add,
        args or (X, Y),
        {},
        options={"cache_dir": folder, **options},
    )


def entries(folder: Path) -> list[dict[str, Any]]:
    """What the list of the operator says."""
    text = (folder / "aoti_eager" / "aten" / "cpu" / "add.Tensor.json").read_text()
    found: list[dict[str, Any]] = json.loads(text)
    return found


def test_a_miss_then_hits(tmp_path: Path) -> None:
    path = compiled(tmp_path)
    when = Path(path).stat().st_mtime_ns
    assert compiled(tmp_path) == path
    assert Path(path).stat().st_mtime_ns == when
    torch.testing.assert_close(stator.load(path)(X, Y), X + Y)
    (entry,) = entries(tmp_path)
    assert entry["kernel_path"] == f"lib/{Path(path).name}"
    first, second = entry["meta_info"]
    assert first == {
        "arg_order": 0,
        "is_dynamic": False,
        "device_type": "cpu",
        "device_index": -1,
        "dtype": "torch.float32",
        "sizes": [3, 4],
        "strides": [4, 1],
        "requires_grad": False,
        "dispatch_key_set": first["dispatch_key_set"],
    }
    assert second["arg_order"] == 1


def test_a_tensor_given_twice_stands_for_two(tmp_path: Path) -> None:
    path = compiled(tmp_path, X, X)
    assert compiled(tmp_path, X, X + 1) == path
    torch.testing.assert_close(stator.load(path)(X, X + 1), 2 * X + 1)


def test_other_arguments_and_options_are_other_entries(tmp_path: Path) -> None:
    paths = {
        compiled(tmp_path),
        compiled(tmp_path, X.t().contiguous().t(), Y),
        compiled(tmp_path, X.double(), Y.double()),
        compiled(tmp_path, X, 2),
        compiled(tmp_path, X, 2.0),
        compiled(tmp_path, X, Y, fallback_random=True),
    }
    assert len(paths) == len(entries(tmp_path)) == 6


def test_damaged_entries_are_left_out_and_replaced(tmp_path: Path) -> None:
    first, second, third = compiled(tmp_path), compiled(tmp_path, X, 2), compiled(tmp_path, X, 3)
    Path(first).unlink()
    Path(second).write_bytes(b"PK")
    file = tmp_path / "aoti_eager" / "aten" / "cpu" / "add.Tensor.json"
    file.write_text(json.dumps([*entries(tmp_path), {"meta_info": 3}, "what"]))
    with pytest.warns(StatorWarning, match="add.Tensor"):
        assert compiled(tmp_path, X, 3) == third
    with pytest.warns(StatorWarning):
        assert compiled(tmp_path, X, 2) == second
    assert Path(second).stat().st_size > 1000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(tmp_path)
    file.write_text("{")
    with pytest.warns(StatorWarning, match="cannot be read"):
        assert compiled(tmp_path, X, 3) == third
    assert len(entries(tmp_path)) == 1


def test_another_version_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path(compiled(tmp_path))
    when = before.stat().st_mtime_ns
    with monkeypatch.context() as other:
        other.setattr(operators, "own_version", lambda: "9.9")
        after = Path(compiled(tmp_path))
    assert after != before
    assert [entry["stator"] for entry in entries(tmp_path)] == [own_version(), "9.9"]
    assert compiled(tmp_path) == str(before)
    assert before.stat().st_mtime_ns == when


def test_kernels_that_nobody_asks_for_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = Path(compiled(tmp_path, X, 2))
    with monkeypatch.context() as other:
        other.setattr(operators, "own_version", lambda: "9.9")
        old = Path(compiled(tmp_path))
    file = tmp_path / "aoti_eager" / "aten" / "cpu" / "add.Tensor.json"
    file.write_text(json.dumps(entries(tmp_path)[1:]))
    kept = compiled(tmp_path, X, 3)
    assert old.exists()
    assert not nameless.exists()
    os.utime(old, (0, 0))  # older than a month
    also = compiled(tmp_path, X, 4)
    assert sorted(Path(kept).parent.iterdir()) == sorted([Path(kept), Path(also)])
    assert len(entries(tmp_path)) == 2


def test_an_entry_is_for_the_default_type(tmp_path: Path) -> None:
    whole = torch.tensor([1, 2])
    divide = torch.ops.aten.div.Tensor
    arguments: Any = ("aten", "div.Tensor", "cpu", False, divide, (whole, whole), {})
    found = []
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            path = stator.aoti_compile_with_persistent_cache(
                *arguments, options={"cache_dir": tmp_path}
            )
            found.append(stator.load(path)(whole, whole).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


def test_an_entry_is_for_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capability, level in (("DEFAULT", 1), ("AVX2", 3), ("AVX512", 4)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        path = Path(compiled(tmp_path))
        assert read_package(path).manifest["levels"] == [level]
        found.append(path)
    assert len(set(found)) == 3
    monkeypatch.setenv("STATOR_LEVEL", "3")
    assert compiled(tmp_path) == str(found[1])


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    path = Path(compiled(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Path(compiled(tmp_path / "there"))
    assert moved.name == path.name
    assert len(entries(tmp_path / "there")) == 1


def test_a_number_that_is_none_is_found(tmp_path: Path) -> None:
    fill = torch.ops.aten.masked_fill.Scalar
    given: Any = ("aten", "masked_fill.Scalar", "cpu", False, fill, (X, X > 0, float("nan")), {})
    times = []
    for _ in range(2):
        path = stator.aoti_compile_with_persistent_cache(*given, options={"cache_dir": tmp_path})
        times.append(Path(path).stat().st_mtime_ns)
    assert times[0] == times[1]


def test_no_list_leads_out_of_the_folder(tmp_path: Path) -> None:
    path = Path(compiled(tmp_path))
    file = tmp_path / "aoti_eager" / "aten" / "cpu" / "add.Tensor.json"
    other = tmp_path / path.name
    stator.aot_compile(torch.nn.Bilinear(4, 4, 4), (X, X), options={"output_path": other})
    for way in (str(other), os.path.relpath(other, file.parent)):
        (entry,) = entries(tmp_path)
        file.write_text(json.dumps([{**entry, "kernel_path": way}]))
        assert compiled(tmp_path) == str(path)
        assert other.exists()


def test_what_others_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(compiled(tmp_path))
    libraries, folder = path.parent, path.parent.parent
    for one in (libraries, folder):
        one.chmod(0o777)
    compiled(tmp_path)
    assert [one.stat().st_mode & 0o022 for one in (libraries, folder)] == [0, 0]
    libraries.chmod(0o1777)  # shared on purpose
    with pytest.raises(PackageError, match="others may write"):
        compiled(tmp_path)
    libraries.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PackageError, match="belongs to another user"):
        compiled(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="a file is given away by root alone")
def test_files_of_another_user_are_replaced(tmp_path: Path) -> None:
    path = Path(compiled(tmp_path))
    file = tmp_path / "aoti_eager" / "aten" / "cpu" / "add.Tensor.json"
    for one in (path, file):
        os.chown(one, 12345, -1)
        with pytest.warns(StatorWarning, match="another user"):
            compiled(tmp_path)
        assert [path.stat().st_uid, file.stat().st_uid] == [0, 0]


WRITER = """
import sys, torch, stator
from pathlib import Path
from tests.package.test_operators import compiled, X
for number in range(4):
    compiled(Path(sys.argv[1]), X, number)
"""


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=environment)
        for _ in range(2)
    ]
    assert [one.wait() for one in running] == [0, 0]
    assert len(entries(tmp_path)) == 4


def test_what_is_refused(tmp_path: Path) -> None:
    arguments: Any = ("aten", "add.Tensor", "cpu", True, add, (X, Y), {})
    with pytest.raises(Unsupported, match="fixed sizes"):
        stator.aoti_compile_with_persistent_cache(*arguments)
    with pytest.raises(TypeError, match="takes no object"):
        compiled(tmp_path, X, object())
    with pytest.raises(OptionError, match="device"):
        eager_ops.enable("aten", ["add.Tensor"], device="cuda")
    for name in ("add_.Tensor", "t", "bernoulli", "nothing"):
        with pytest.raises(OptionError):
            eager_ops.enable("aten", [name])
    with pytest.raises(OptionError, match=r"give \['add.Tensor'\]"):
        eager_ops.enable("aten", "add.Tensor")
    for ns, name in (("../aten", "add"), ("aten", "../add"), ("aten", "a/b"), ("", "add")):
        given: Any = (ns, name, "cpu", False, add, (X, Y), {})
        with pytest.raises(OptionError, match="no operator is called"):
            stator.aoti_compile_with_persistent_cache(*given, options={"cache_dir": tmp_path})


REFUSED = {
    "softmax.int": "enable _softmax instead",  # autograd would not see what it calls any more
    "linear": "enable addmm and mm",
    "cosine_similarity": "those that it calls",
    "unbind_copy.int": r"returns List\[Tensor\]",
    "_foreach_sqrt": r"returns List\[Tensor\]",
    "equal": "returns bool",
    "add": "name its overload",
}


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_eager_mode_keeps(name: str) -> None:
    with pytest.raises(OptionError, match=REFUSED[name]):
        eager_ops.enable("aten", ["add.Tensor", name])
    assert not eager_ops._enabled


@pytest.fixture
def enabled(tmp_path: Path) -> Iterator[Path]:
    """Some operators of eager mode are compiled ones."""
    names = ["add.Tensor", "gelu", "_softmax", "var_mean.correction"]
    eager_ops.enable("aten", names, options={"cache_dir": tmp_path})
    try:
        yield tmp_path
    finally:
        eager_ops.disable()


def test_eager_mode_takes_the_kernels(enabled: Path) -> None:
    x, y = torch.randn(5, 6), torch.randn(6)
    expected = x.numpy() + y.numpy()
    for _ in range(3):
        torch.testing.assert_close((x + y).numpy(), expected)
    assert len(entries(enabled)) == 1
    one, _ = eager_ops._enabled["aten::add.Tensor"]
    assert len(one.operator.entries) == 1
    for number in (1, 0.5, True):
        torch.testing.assert_close((x + number).numpy(), x.numpy() + number)
    whole = torch.arange(3)
    assert (whole + 1).dtype is torch.int64
    assert (whole + 0.5).dtype is torch.float32
    assert len(entries(enabled)) == 1  # there is no kernel for each number
    torch.testing.assert_close(x.t() + x.t(), 2 * x.t())


def kernels_of(name: str) -> int:
    """How many kernels an operator has found."""
    one, _ = eager_ops._enabled[f"aten::{name}"]
    return len(one.operator.entries)


def calls_of(operators: dict[str, Any]) -> dict[str, Any]:
    """What operators give, by torch's own kernels and by compiled ones, twice."""
    return {name: [call() for _ in range(2)] for name, call in operators.items()}


def test_lists_and_texts_among_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, functional, aten = torch.randn(4, 6), torch.nn.functional, torch.ops.aten
    operators = {
        "native_layer_norm": lambda: functional.layer_norm(x, (6,)),
        "native_layer_norm, longer": lambda: functional.layer_norm(x, (4, 6)),
        "gelu": lambda: functional.gelu(x),
        "gelu, tanh": lambda: functional.gelu(x, approximate="tanh"),
        "add.Tensor": lambda: torch.add(x, x, alpha=2),
        "sum.dim_IntList, of doubles": lambda: x.sum((1,), dtype=torch.float64),
        "sum.dim_IntList, kept": lambda: x.sum((1,), keepdim=True, dtype=torch.float64),
        "sum.dim_IntList": lambda: x.sum((0, 1)),
        "sum.dim_IntList, of one": lambda: x.sum((1,)),
        "cat": lambda: torch.cat((x, x)),
        "cat, of three": lambda: torch.cat((x, x, x), 1),
        "constant_pad_nd": lambda: aten.constant_pad_nd(x, [1, 2], 0.5),
    }
    names = {name.partition(",")[0] for name in operators}
    expected = calls_of(operators)
    eager_ops.enable("aten", sorted(names), options={"cache_dir": tmp_path})
    try:
        torch.testing.assert_close(calls_of(operators), expected)
        for name in names:
            assert kernels_of(name) == sum(one.startswith(name) for one in operators), name
        # What is known is found: nothing comes to Python any more.
        monkeypatch.setattr(eager_ops._Enabled, "_find", None)
        torch.testing.assert_close(calls_of(operators), expected)
    finally:
        eager_ops.disable()


def test_what_was_seen_with_a_tensor_twice_is_right_for_two(tmp_path: Path) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    operators = {
        "add.Tensor": lambda first, second: first + second,
        "cat": lambda first, second: torch.cat((first, second)),
        "mm": torch.mm,
    }
    expected = {name: function(x, y) for name, function in operators.items()}
    eager_ops.enable("aten", list(operators), options={"cache_dir": tmp_path})
    try:
        for name, function in operators.items():
            function(x, x)
            torch.testing.assert_close(function(x, y), expected[name])
            assert kernels_of(name) == 1
    finally:
        eager_ops.disable()


HALF = torch.tensor([1e-3, 0.0, 1.0], dtype=torch.float16)
BYTE = torch.tensor([1], dtype=torch.uint8)
NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "beyond what the type holds": lambda: HALF * 1e5,
    "beyond it, of one element": lambda: HALF[0] * 1e5,
    "where there is nothing": lambda: (1 - HALF.ne(1).half()) * -1e9,
    "by which is divided": lambda: 100 * HALF / 1e5,
    "finer than the type": lambda: torch.linspace(0.1, 9, 2000).bfloat16() * 0.1,
    "that bytes do not hold": lambda: BYTE + 300 + BYTE * -1,
    "that integers do not hold": lambda: torch.tensor([3], dtype=torch.int32) * 2**33,
    "complex": lambda: HALF.float() * 2j,
    "that are chosen": lambda: torch.where(HALF > 0, 0.1, torch.zeros(3, dtype=torch.float64)),
    "and nothing else": lambda: torch.ops.aten.add.Tensor(1, 2),
}


def test_numbers_are_what_eager_makes_of_them(tmp_path: Path) -> None:
    expected = {name: call() for name, call in NUMBERS.items()}
    names = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "where.self"]
    eager_ops.enable("aten", names, options={"cache_dir": tmp_path})
    try:
        for name, call in NUMBERS.items():
            found = call()
            assert found.dtype is expected[name].dtype, name
            torch.testing.assert_close(found, expected[name], rtol=0, atol=0, msg=name)
    finally:
        eager_ops.disable()


def test_the_default_type_counts_when_it_changes(tmp_path: Path) -> None:
    whole, before = torch.tensor([1, 2]), torch.get_default_dtype()
    eager_ops.enable("aten", ["div.Tensor"], options={"cache_dir": tmp_path})
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            assert (whole / whole).dtype is dtype
        assert kernels_of("div.Tensor") == 2
    finally:
        torch.set_default_dtype(before)
        eager_ops.disable()


def test_longer_arguments_than_a_key_holds(tmp_path: Path) -> None:
    x = torch.randn(3)
    eager_ops.enable("aten", ["cat"], options={"cache_dir": tmp_path})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StatorWarning)
            for count in (31, 32, 33, 200):
                for _ in range(2):
                    assert torch.equal(torch.cat([x] * count), x.repeat(count))
    finally:
        eager_ops.disable()


def test_gradients_flow_as_before(enabled: Path) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        (torch.nn.functional.gelu(x) + x).sum().backward()
    found = x.grad
    eager_ops.disable()
    twin = x.detach().clone().requires_grad_()
    for _ in range(3):
        (torch.nn.functional.gelu(twin) + twin).sum().backward()
    torch.testing.assert_close(found, twin.grad)


def test_many_kinds_of_arguments(enabled: Path) -> None:
    for size in range(1, 35):
        x = torch.randn(size)
        for _ in range(2):
            assert torch.equal(x + x, 2 * x)
    one, _ = eager_ops._enabled["aten::add.Tensor"]
    assert len(one.operator.entries) == 34
    assert one.operator.table.count == 128


def test_threads(enabled: Path) -> None:
    wrong: list[int] = []

    def run(number: int) -> None:
        for size in range(1, 8):
            x = torch.full((size,), float(number))
            if not torch.equal(x + x, 2 * x):
                wrong.append(number)

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_fill_a_table_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = read_package(Path(compiled(tmp_path, X, X)))
    container = Container(package.files, LIBRARY, (package.file, package.start), 1)
    operator, put = Operator(print), Operator._put
    inside: list[int] = []
    most = []

    def slowly(entry: Any, slots: Any) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        put(entry, slots)
        inside.pop()

    monkeypatch.setattr(Operator, "_put", staticmethod(slowly))
    given = [(torch.empty(size),) for size in (1, 2, 3)] * 2
    threads = [Thread(target=operator.add, args=(args, {}, container)) for args in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]  # the same arguments are there once


def test_disabled_again(enabled: Path) -> None:
    eager_ops.disable()
    torch.testing.assert_close(X + Y, torch.from_numpy(X.numpy() + Y.numpy()))
    assert not (enabled / "aoti_eager").exists()


def test_other_options_need_another_start(enabled: Path) -> None:
    options = {"cache_dir": enabled}
    eager_ops.enable("aten", ["add.Tensor"], options=options)
    with pytest.raises(OptionError, match=r"disable\(\) first"):
        eager_ops.enable("aten", ["relu", "add.Tensor"], options={**options, "levels": (1,)})
    assert "aten::relu" not in eager_ops._enabled


def test_what_has_no_native_key_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, read = torch.randn(3), []

    def reading(path: Path) -> Any:
        read.append(path)
        return read_package(path)

    monkeypatch.setattr(eager_ops, "read_package", reading)
    eager_ops.enable("aten", ["cat"], options={"cache_dir": tmp_path})
    try:
        results = [torch.cat([x] * 40) for _ in range(3)]
    finally:
        eager_ops.disable()
    assert len(read) == 1
    for result in results:
        assert torch.equal(result, x.repeat(40))


def test_a_cache_that_fails_does_not_fail_the_operator(
    enabled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(eager_ops, "Container", fails)
    with pytest.warns(StatorWarning, match=r"runs as before.*Too many open files"):
        total = X + X
    assert torch.equal(total, 2 * X)


def test_errors_are_eagers(enabled: Path) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.randn(3) + torch.randn(4)


def test_an_operator_without_a_kernel_runs_as_before(tmp_path: Path) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    expected = (x.exp(), x * x)
    eager_ops.enable("aten", ["exp", "mul.Tensor"], options={"cache_dir": tmp_path})
    try:
        with pytest.warns(StatorWarning, match="no kernel for them but torch's own"):
            first = (x.exp(), x * x)
        assert kernels_of("exp") == kernels_of("mul.Tensor") == 0
        torch.testing.assert_close([first, (x.exp(), x * x)], [expected] * 2)
    finally:
        eager_ops.disable()


def test_what_a_kernel_calls_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_package

    def silent(path: Path) -> Any:
        found = read(path)
        return replace(found, manifest={**found.manifest, "calls": []})

    monkeypatch.setattr(eager_ops, "read_package", silent)
    x = torch.randn(4, dtype=torch.complex64)
    expected = x.exp()
    eager_ops.enable("aten", ["exp"], options={"cache_dir": tmp_path})
    try:
        found = [x.exp() for _ in range(3)]  # it comes back to the operator, and ends there
        assert kernels_of("exp") == 1
    finally:
        eager_ops.disable()
    torch.testing.assert_close(found, [expected] * 3)
