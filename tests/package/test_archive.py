"""The file of a package: the same bytes every time, and refused when a single one is another."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import stator
from stator.errors import PackageError
from stator.package import archive, load
from stator.package.archive import PAGE, PackageWriter, read_package, write_package
from stator.package.build import write_file

BUILD = """
import torch, stator
from tests.package.models import encoder

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x):
        return torch.cumsum(self.encoder(x).sort(-1)[0], 0)  # calls, which a library knows by line

torch.manual_seed(0)
with torch.no_grad():
    model, wishes = Model().eval(), {"output_path": "m.pt2"}
    stator.aot_compile(model, (torch.randn(2, 7, 16),), options=wishes)
"""


def test_the_same_bytes_in_two_folders_and_two_homes(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        folder, home = tmp_path / f"work{number}", tmp_path / f"home{number}"
        folder.mkdir()
        home.mkdir()
        where = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": where}
        environment |= {"PYTHONHASHSEED": str(number), "TMPDIR": str(home)}
        (folder / "model.py").write_text(BUILD)
        command = [sys.executable, str(folder / "model.py")]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        found.append((folder / "m.pt2").read_bytes())
    assert found[0] == found[1]
    assert b"model.py:11" in found[0]
    assert b"work0" not in found[0]


def test_500_corruptions_are_refused(built: Callable[[str], Path], tmp_path: Path) -> None:
    whole = built("perceptron").read_bytes()
    dice = random.Random(20261116)
    path = tmp_path / "model.pt2"
    for number in range(500):
        data = bytearray(whole)
        match number % 5:
            case 0:
                data = data[: dice.randrange(len(data))]
            case 1:
                data += bytes(dice.randrange(1, 64))
            case 2:
                at = dice.randrange(len(data))
                del data[at : at + dice.randrange(1, 64)]
            case _:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        with pytest.raises(PackageError):
            stator.load(path)


def test_corruptions_of_a_training_step_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.pt2"
    wishes = {"output_path": path, "levels": (1,)}
    stator.aot_compile_joint(torch.nn.Linear(4, 3), (torch.ones(2, 4),), options=wishes)
    whole, dice = path.read_bytes(), random.Random(20261119)
    for number in range(100):
        data = bytearray(whole)
        if number % 4:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(len(data)) :]
        path.write_bytes(data)
        with pytest.raises(PackageError):
            stator.load(path)


def test_weights_lie_at_a_page(built: Callable[[str], Path]) -> None:
    package = read_package(built("images"))
    assert package.start % PAGE == 0
    told = {one["name"]: one for one in package.manifest["constants"]}
    with package.path.open("rb") as file:
        file.seek(package.start + told["head.bias"]["offset"])
        found = struct.unpack("<5f", file.read(20))
    assert found == tuple(stator.load(package.path).constants()["head.bias"].tolist())


def test_one_weight_under_two_names_lies_there_once(built: Callable[[str], Path]) -> None:
    package = read_package(built("tied"))
    places = {one["name"]: one["offset"] for one in package.manifest["constants"]}
    assert places["words.weight"] == places["head.weight"]
    assert package.size == 20 * 8 * 4


@pytest.mark.parametrize("build", [stator.aot_compile, stator.aot_compile_joint])
def test_weights_are_those_of_the_file_that_was_checked(
    build: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.pt2", tmp_path / "other.pt2"
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    build(model, (x,), options={"output_path": path})
    expected = model(x)
    with torch.no_grad():
        model.weight.add_(1)
    build(model, (x,), options={"output_path": other})

    def deployed(*_: object) -> None:
        other.replace(path)

    monkeypatch.setattr(load, "_check_machine", deployed)  # between the check and the weights
    torch.testing.assert_close(stator.load(path)(x), expected)
    monkeypatch.undo()
    torch.testing.assert_close(stator.load(path)(x), model(x))


def rewritten(path: Path, **changes: object) -> Path:
    """A package that is whole, and says something else of itself."""
    package = read_package(path)
    told = {**package.manifest, **changes}
    told.pop("weights")
    with path.open("rb") as file:
        file.seek(package.start)
        weights = file.read(package.size)
    files = {
        name: data
        for name, data in package.files.items()
        if name not in ("version", "archive_format", "archive_version", "byteorder")
    }
    write_package(path, told, files, [weights])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "aarch64"}, "it is for linux on aarch64"),
        ({"system": "darwin"}, "it is for darwin"),
        ({"format": 99}, "format 99"),
        ({"device": "cuda"}, "it is for cuda"),
    ],
)
def test_another_machine(
    change: dict[str, object], message: str, built: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(built("perceptron"), tmp_path))
    stator.load(rewritten(path))
    with pytest.raises(PackageError, match=message):
        stator.load(rewritten(path, **change))


@pytest.mark.parametrize("newer", [2, 10, 1000])
def test_a_newer_format(newer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "newer.pt2"
    monkeypatch.setattr(archive, "FORMAT", newer)
    write_package(path, {"format": newer}, {}, [])
    monkeypatch.undo()
    with pytest.raises(PackageError, match=f"format {newer}, and this stator reads 1"):
        stator.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "future"}, "a kind that this stator does not know: future"),
        ({"outputs": 7}, "does not tell its outputs"),
        ({"in_spec": 7}, "does not tell its in_spec"),
        ({"in_spec": "[]"}, "cannot be loaded"),
        ({"format": True}, "does not tell its format"),
        ({"kind": "joint"}, "cannot be loaded: KeyError"),
        ({"device": "cuda"}, "it is for cuda"),
    ],
)
def test_a_manifest_that_makes_no_sense(
    change: dict[str, object], message: str, built: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(built("perceptron"), tmp_path))
    with pytest.raises(PackageError, match=message):
        stator.load(rewritten(path, **change))


@pytest.mark.parametrize(
    "text", ["[]", "[" * 100000, "7", '{"weights": {"bytes": null}}', '{"weights": {"bytes": 0}}']
)
def test_a_manifest_that_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    monkeypatch.setattr(json, "dumps", lambda *_, **__: text)
    write_package(path, {}, {}, [])
    with pytest.raises(PackageError, match="it is damaged"):
        stator.load(path)


def packed(info: zipfile.ZipInfo) -> None:
    """Let an entry be compressed, so that a short file holds much."""
    info.compress_type = zipfile.ZIP_DEFLATED


def named_as_another(info: zipfile.ZipInfo) -> None:
    """Give an entry a name that there is."""
    info.filename = "package/version"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "message"),
    [(packed, "packed or encrypted"), (named_as_another, "is there twice")],
)
def test_entries_that_none_of_ours_is_like(
    change: Callable[[zipfile.ZipInfo], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, made = tmp_path / "model.pt2", archive._entry

    def entry(name: str, extra: bytes = b"") -> zipfile.ZipInfo:
        info = made(name, extra)
        if name == "extra/more":
            change(info)
        return info

    monkeypatch.setattr(archive, "_entry", entry)
    write_package(path, {}, {"extra/more": bytes(1 << 20)}, [])
    with pytest.raises(PackageError, match=message):
        read_package(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_entries_that_point_outside(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    write_package(path, {}, {name: b"x"}, [])
    with pytest.raises(PackageError, match="points outside"):
        stator.load(path)


def test_pieces_of_any_length_are_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "CHUNK", 100)
    dice = random.Random(7)
    for pieces in (
        [],
        [b""],
        [b"a" * 100],
        [dice.randbytes(dice.randrange(350)) for _ in range(9)],
    ):
        path = tmp_path / "model.pt2"
        write_package(path, {}, {"extra/more": b"more"}, pieces)
        package = read_package(path)
        whole = b"".join(pieces)
        assert path.read_bytes()[package.start :].startswith(whole)
        assert package.size == len(whole)
        assert package.files["extra/more"] == b"more"


def test_weights_that_cannot_be_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageWriter(tmp_path / "model.pt2") as package:
        monkeypatch.setattr(package, "_weights", Full())
        package.put(b"weights")
        with pytest.raises(OSError, match="no room"):
            package.finish({}, {})


class Full:
    """A file that takes nothing."""

    def write(self, _: object) -> int:
        """Fails."""
        raise OSError("no room")


def test_files_that_are_no_packages(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(PackageError, match="cannot be read"):
        stator.load(path)
    path.write_bytes(b"")
    with pytest.raises(PackageError, match="too short"):
        stator.load(path)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("package/version", "3" * 1000)
    with pytest.raises(PackageError, match="not a package of stator's"):
        stator.load(path)


def test_what_is_there_stays_when_building_fails(
    built: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(built("perceptron"), tmp_path))
    before = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("stator.package.archive.PackageWriter.finish", fails)
    model, x = torch.nn.Linear(2, 2), (torch.randn(1, 2),)
    with pytest.raises(OSError, match="no room"):
        stator.aot_compile(model, x, options={"output_path": path})
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_says_who_may_read_it(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        written = write_file(tmp_path / "model.pt2", lambda part: write_package(part, {}, {}, []))
    finally:
        os.umask(before)
    assert Path(written).stat().st_mode & 0o777 == mode


def test_the_manifest_is_json(built: Callable[[str], Path]) -> None:
    with zipfile.ZipFile(built("named")) as opened:
        told = json.loads(opened.read("package/extra/stator.json"))
    assert [one["name"] for one in told["inputs"]] == ["x", "bias"]
    assert told["arguments"] == [["tensor"], ["fixed", 3], ["tensor"]]
    assert told["outputs"] == [0, 1, 2, ["constant", None]]


def test_a_stator_that_is_not_installed_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(archive, "version", nowhere)
    assert archive.own_version() == "not installed"
