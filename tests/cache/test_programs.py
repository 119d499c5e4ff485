"""Programs in a folder: whatever happens to it, results are right; at worst they are compiled."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import fsspec  # type: ignore[import-untyped]  # ships no py.typed
import pytest
import torch
from torch import Tensor, fx

import stator.cache
from stator import backend, pipeline
from stator.aot.metadata import Facts
from stator.cache import Key, Store
from stator.cache.codec import from_bytes, to_bytes
from stator.cache.programs import Programs
from stator.cache.store import MAGIC
from stator.core.events import Compilation, last_compilation
from stator.errors import StatorWarning
from stator.options import MODES
from stator.runtime.native.image import Image
from tests.style.tree import ROOT

Use = Callable[..., Any]
ROOMY: Final = 1 << 30


def waves(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.cos()


def fresh(fn: Use, folder: Path, **changed: Any) -> Use:
    """`fn`, compiled as a new process would."""
    torch._dynamo.reset()
    options = {"strict": True, "cache": True, "cache_dir": folder, **changed}
    compiled: Use = torch.compile(fn, backend="stator", options=options)
    return compiled


def record() -> Compilation:
    found = last_compilation()
    assert found is not None, "nothing was compiled"
    return found


def require_right(folder: Path, fn: Use = waves, **changed: Any) -> str:
    """Compile, compare with eager; what the cache said."""
    x = torch.randn(7)
    torch.testing.assert_close(fresh(fn, folder, **changed)(x), fn(x))
    return record().cache or ""


def failing(code: int) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one program."""
    assert require_right(tmp_path / "cache").startswith("miss")
    return tmp_path / "cache"


def key_in(file: Path) -> Key:
    return Key.of(json.loads(file.read_bytes()[len(MAGIC) :].split(b"\n", 1)[0])["key"])


def test_a_miss_says_which_part_differs(folder: Path) -> None:
    x = torch.randn(7)
    assert require_right(folder) == "hit"
    with torch.no_grad():
        fresh(waves, folder)(x)
    assert record().cache == "miss: state differs from the nearest entry"
    fresh(waves, folder)(x.double())
    assert record().cache == "miss: inputs differs from the nearest entry"
    assert require_right(folder, lambda x: x.tan()).startswith("miss: graph differs")
    told = require_right(folder, fallback_random=True)
    assert told == "miss: options differs from the nearest entry"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cache": False}, "Options.cache"),
        ({"executor": "python"}, "only native programs are kept"),
        ({"kernels": False}, "only native programs are kept"),
    ],
)
def test_where_programs_are_not_kept_the_record_says_why(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    assert require_right(tmp_path / "cache", **changed) == f"off: {reason}"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mode", MODES)
def test_programs_of_every_mode_are_kept(tmp_path: Path, mode: str) -> None:
    by = partial(backend.compile_fx, mode=mode, options={"cache": True, "cache_dir": tmp_path})
    for told in ("miss: the cache is empty", "hit"):
        torch._dynamo.reset()
        torch.compile(waves, backend=by)(torch.randn(7))
        assert record().cache == told


def test_dumps_are_written_whatever_is_in_the_folder(folder: Path, tmp_path: Path) -> None:
    assert require_right(folder, dump_dir=tmp_path / "dump").startswith("off: Options.dump_dir")
    assert list((tmp_path / "dump").rglob("*_plan.txt"))


def test_without_a_home_nothing_is_kept_and_all_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    x = torch.randn(7)
    compiled = torch.compile(waves, backend="stator", options={"strict": True, "cache": True})

    torch.testing.assert_close(compiled(x), waves(x))
    assert record().cache == "off: Could not determine home directory."


def test_programs_travel_in_an_archive(folder: Path, tmp_path: Path) -> None:
    stator.cache.export(tmp_path / "programs.zip", Store(folder, ROOMY))
    stator.cache.import_(tmp_path / "programs.zip", Store(tmp_path / "other", ROOMY))

    assert require_right(tmp_path / "other") == "hit"


# A sound entry that makes no program


def rewritten(folder: Path, change: Callable[[Any], Any]) -> None:
    """Replace what the entry says, with the right checksum."""
    (file,) = folder.iterdir()
    key, store = key_in(file), Store(folder, ROOMY)
    payload = store.load(key)
    assert payload is not None
    value = change(from_bytes(payload, ["somewhere:1"] * 9))
    store.save(key, value if isinstance(value, bytes) else to_bytes(value, []))


def with_image(**changed: Any) -> Callable[[Any], Any]:
    def change(found: tuple[Facts, Image]) -> Any:
        return found[0], replace(found[1], **changed)

    return change


USELESS: Final[dict[str, Callable[[Any], Any]]] = {
    "nothing": lambda found: b"",
    "zeros": lambda found: bytes(100),
    "none": lambda found: None,
    "facts alone": lambda found: found[0],
    "the other way round": lambda found: found[::-1],
    "two numbers": lambda found: (1, 2),
    "facts twice": lambda found: (found[0], found[0]),
    "more": lambda found: (*found, 1),
    "no host": with_image(host=b""),
    "half a host": lambda found: with_image(host=found[1].host[: len(found[1].host) // 2])(found),
    "a host without the entry": lambda found: with_image(host=found[1].modules[0])(found),
    "no modules": with_image(modules=()),
    "other kernels": with_image(kernels=((0, "no_such_kernel"),)),
    "no kernels": with_image(kernels=()),
    "fields of other types": with_image(modules=3),
}


@pytest.mark.parametrize("name", USELESS)
def test_an_entry_that_makes_no_program_is_a_miss_and_replaced(folder: Path, name: str) -> None:
    rewritten(folder, USELESS[name])

    assert require_right(folder).startswith("miss: ")
    assert require_right(folder) == "hit"


def test_a_backward_that_cannot_be_loaded_is_compiled(tmp_path: Path) -> None:
    def gradient() -> Any:
        x = torch.ones(3, requires_grad=True)
        fresh(waves, tmp_path)(x).sum().backward()
        return x.grad

    expected = gradient()
    store = Store(tmp_path, ROOMY)
    for file in tmp_path.iterdir():
        if "backward" in dict(key_in(file).parts):
            store.save(key_in(file), to_bytes(None, []))

    assert torch.equal(gradient(), expected)
    assert record().cache == "hit"
    assert any(stage.name == "backward/plan" for stage in record().stages)


def test_bytes_of_any_kind_are_no_program(tmp_path: Path) -> None:
    key, chance = Key.of({"graph": "1"}), random.Random(0)
    programs = Programs(Store(tmp_path, ROOMY), key, [], Compilation())
    for _ in range(200):
        programs.store.save(key, chance.randbytes(chance.randrange(64)))

        assert programs.find() is None
        assert programs.find_backward((False,)) is None


def test_an_entry_names_no_address(tmp_path: Path) -> None:
    require_right(tmp_path, lambda x: x + 0 * torch.rand(7))

    assert all(b" at 0x" not in file.read_bytes() for file in tmp_path.iterdir())


def test_what_could_not_be_compiled_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> NoReturn:
        raise MemoryError("once")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "plan_kernels", broken)
        with pytest.warns(StatorWarning, match="once"):
            require_right(tmp_path, strict=False)

    assert list(tmp_path.iterdir()) == []
    assert require_right(tmp_path, strict=False).startswith("miss")
    assert require_right(tmp_path, strict=False) == "hit"


# A damaged file


def test_a_graph_that_holds_a_parameter_is_kept(tmp_path: Path) -> None:
    module = scaled_graph()
    module.weight = torch.nn.Parameter(torch.ones(5))
    (mul,) = module.graph.find_nodes(op="call_function", target=torch.mul)
    with module.graph.inserting_before(mul):
        mul.args = (mul.args[0], module.graph.get_attr("weight"))
    module.recompile()
    options = {"strict": True, "cache": True, "cache_dir": tmp_path}
    for _ in range(2):
        backend.compile_fx(module, [torch.ones(5)], options=options)

    assert record().cache == "hit"


def scaled_graph() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.mul, (x, 2)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def compile_graph(folder: Path) -> str:
    """Compile without Dynamo, which takes most of the time of a small compilation."""
    x = torch.randn(5)
    options = {"strict": True, "cache": True, "cache_dir": folder}
    (found,) = backend.compile_fx(scaled_graph(), [x], options=options)(x)
    assert torch.equal(found, x * 2)
    return record().cache or ""


def damaged(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at = chance.choice((chance.randrange(len(data)), chance.randrange(min(len(data), 2000))))
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[max(at, 1) :]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case 3:
                data[at : at + 16] = bytes(16)
    return bytes(data)


def test_two_hundred_accidents_to_an_entry_leave_results_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_graph(tmp_path)
    (file,) = tmp_path.iterdir()
    whole, chance, missed = file.read_bytes(), random.Random(0), 0
    for number in range(200):
        data = damaged(whole, chance)
        file.write_bytes(data)
        with monkeypatch.context() as patch:
            if number % 20:  # most are not compiled again: that takes its time
                patch.setattr(
                    backend, "_compile_anew", lambda captured, *_: captured.module.forward
                )
            told = compile_graph(tmp_path)
        assert (told == "hit") == (data == whole)
        missed += told.startswith("miss: ")
        file.unlink(missing_ok=True)

    assert missed > 180
    file.write_bytes(whole)
    assert compile_graph(tmp_path) == "hit"


def test_an_entry_of_another_version_is_replaced(folder: Path) -> None:
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes().replace(b"entry 1\n", b"entry 0\n", 1))

    assert "miss" in require_right(folder)
    assert any("another version" in note for note in record().notes)
    assert require_right(folder) == "hit"


# A folder or a disk that refuses


def test_a_folder_of_another_user_is_neither_read_nor_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)

    assert require_right(folder) == f"miss: {folder} belongs to another user"
    assert any("another user" in note for note in record().notes)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_where_nothing_can_be_written_a_note_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", failing(code))

    assert require_right(folder, torch.tan).startswith("miss")
    assert any(os.strerror(code) in note for note in record().notes)
    assert require_right(folder) == "hit"  # what is there serves


def test_a_disk_that_fills_up_leaves_results_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A file that takes a little."""

        def __init__(self, handle: int, _mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        def write(self, data: bytes) -> None:
            os.write(self.handle, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", Full)
        require_right(folder, torch.tan)

    assert any("No space" in note for note in record().notes)
    assert len(list(folder.iterdir())) == 1
    assert require_right(folder, torch.tan).startswith("miss")
    assert require_right(folder, torch.tan) == "hit"


def test_a_limit_too_small_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        assert require_right(tmp_path, cache_limit=1000).startswith("miss")
        assert any("exceeds the cache's 1000" in note for note in record().notes)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_for_one_program_keeps_the_latest(tmp_path: Path) -> None:
    require_right(tmp_path)
    limit = sum(file.stat().st_size for file in tmp_path.iterdir()) * 3 // 2

    assert require_right(tmp_path, torch.tan, cache_limit=limit).startswith("miss")
    assert require_right(tmp_path, torch.tan, cache_limit=limit) == "hit"
    assert require_right(tmp_path, cache_limit=limit).startswith("miss")


@pytest.mark.parametrize("kind", ["file", "link to nowhere", "folder"])
def test_something_else_in_place_of_the_folder_or_the_entry(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "cache"
    if kind == "folder":
        require_right(place)
        (file,) = place.iterdir()
        file.unlink()
        file.mkdir()
    elif kind == "file":
        place.write_text("taken")
    else:
        place.symlink_to(tmp_path / "nowhere")

    assert require_right(place).startswith("miss")
    assert any(str(place) in note for note in record().notes)


# A remote


@pytest.fixture
def remote() -> Iterator[str]:
    """An empty place that the tests of this process share."""
    files = fsspec.filesystem("memory")
    yield "memory://stator-programs"
    if files.exists("/stator-programs"):
        files.rm("/stator-programs", recursive=True)


def test_machines_share_programs_through_a_remote(tmp_path: Path, remote: str) -> None:
    assert require_right(tmp_path / "one", remote_cache=remote).startswith("miss")
    assert require_right(tmp_path / "other", remote_cache=remote) == "hit"
    assert require_right(tmp_path / "other") == "hit"  # kept there from now on


def test_a_damaged_entry_of_a_remote_is_compiled(tmp_path: Path, remote: str) -> None:
    require_right(tmp_path / "one", remote_cache=remote)
    files = fsspec.filesystem("memory")
    for name in files.find("/stator-programs"):
        files.pipe_file(name, files.cat_file(name)[:-1])

    assert require_right(tmp_path / "other", remote_cache=remote).startswith("miss")
    assert any("damaged" in note for note in record().notes)
    assert require_right(tmp_path / "third", remote_cache=remote) == "hit"  # put right


@pytest.mark.parametrize("url", ["nosuch://host/path", "memory", "://", "file:///proc/nowhere"])
def test_a_remote_that_does_not_answer_leaves_results_right(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = [require_right(tmp_path / "cache", remote_cache=url) for _ in range(2)]

    assert told[0].startswith("miss")
    assert told[1] == "hit"


# Threads


def by(number: int) -> Use:
    """A function of its own for each number."""

    def scaled(x: Tensor) -> Tensor:
        return (x * number).sin() + number

    return scaled


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in threads that begin together."""
    start = threading.Barrier(count)

    def begin(number: int) -> Any:
        start.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def test_eight_threads_fill_one_folder_and_find_it_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"strict": True, "cache": True, "cache_dir": tmp_path}

    def work(number: int) -> bool:
        x = torch.full((6,), float(number))
        fn = by(number)
        compiled = torch.compile(fn, backend="stator", options=options, dynamic=False)
        return bool(torch.allclose(compiled(x), fn(x), atol=1e-5))

    for again in (False, True):
        torch._dynamo.reset()
        if again:
            monkeypatch.setattr(backend, "_compile_anew", failing(errno.EIO))
        # The threads of torch 2.11 have Dynamo's switches in common: one may put back what
        # another set, and the second number would be a symbol.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            assert all(in_threads(8, work))
    assert len(Store(tmp_path, ROOMY).entries()) == 8


def test_many_threads_call_one_program_from_the_folder(tmp_path: Path) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1).square().sum(0)

    def gradients(fn: Use, seed: int) -> Sequence[Tensor]:
        random_ = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(8, 8, generator=random_).requires_grad_() for _ in range(2))
        y = fn(x, w)
        return (y.detach(), *torch.autograd.grad(y.sum(), (x, w)))

    gradients(fresh(loss, tmp_path), 0)
    compiled = fresh(loss, tmp_path)
    found = in_threads(32, lambda n: [gradients(compiled, n) for _ in range(3)])

    assert record().cache == "hit"
    for number, results in enumerate(found):
        for result in results:
            torch.testing.assert_close(result, gradients(loss, number))


# Processes

SCRIPT: Final = """
import json, sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

def forward({names}):
    {first} = torch.softmax({x} @ {w}, -1)
    return {first}.sum(0), {first}.amax()

x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
options = {{"strict": True, "cache": True, "cache_dir": sys.argv[1]}}
one, other = torch.compile(forward, backend="stator", options=options)(x, w)
(one.sum() + other).backward()
import stator
numbers = torch.cat([t.detach().flatten() for t in (one, other, x.grad, w.grad)]).tolist()
compiler = {{"stator.pipeline", "stator.ops", "stator.lower", "llvmlite"}}
print(json.dumps([stator.last_compilation().cache, numbers, sorted(compiler & sys.modules.keys())]))
"""


def started(place: Path, name: str, seed: int, folder: Path) -> Any:
    """A process that runs the script, in a file and a folder of its own."""
    place.mkdir(parents=True)
    names = {"names": "x, w", "x": "x", "w": "w", "first": "y"}
    if seed % 2:
        names = {"names": "left, right", "x": "left", "w": "right", "first": "found"}
    (place / name).write_text("\n" * seed + SCRIPT.format(**names))
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, name, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe)


def finished(process: Any) -> list[Any]:
    out, problems = process.communicate(timeout=240)
    assert process.returncode == 0, problems.decode()
    told: list[Any] = json.loads(out)
    return told


def test_processes_write_the_same_bytes_and_read_each_others(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    first = finished(started(tmp_path / "a", "program.py", 0, alone))
    pair = [started(tmp_path / n, f"{n}.py", seed, shared) for n, seed in (("b", 1), ("c", 2))]
    pair_told = [finished(process) for process in pair]  # at once, into one folder
    later = finished(started(tmp_path / "d", "later.py", 3, alone))

    assert first[0] == "miss: the cache is empty"
    assert all(told[1] == first[1] for told in (*pair_told, later))
    assert later[0] == "hit"
    assert later[2] == []
    written = {file.name: file.read_bytes() for file in alone.iterdir()}
    assert {file.name: file.read_bytes() for file in shared.iterdir()} == written
    assert len(written) == 2
    assert str(tmp_path).encode() not in b"".join(written.values())
