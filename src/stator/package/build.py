"""Files of a library: the library alone, or a package with its weights beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import torch

from stator.package.archive import FORMAT, LIBRARY, NEEDED, PAGE, PackageWriter, own_version
from stator.package.host import Input
from stator.package.library import Code, Library, Targets
from stator.package.link import link
from stator.package.program import TENSOR
from stator.package.tables import MARK, Held

# Torch's loader finds the metadata by the name of a source file.
_NO_SOURCE: Final = b"// There is no C++ behind this library: its machine code comes from LLVM.\n"


def write_file(path: Path, write: Callable[[Path], None]) -> str:
    """Write a file under another name first: what is there stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{token_hex(8)}")
    part.touch(exist_ok=False)  # for whom the umask says, as any file
    try:
        write(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return str(path)


def write_shared(path: Path, library: Library, linker: str, weights: Sequence[Any]) -> None:
    """Machine code, the weights from a page on, and where they begin."""
    code = _linked(library.code, linker)
    with path.open("wb") as out:
        out.write(code)
        if weights:
            out.write(bytes(-len(code) % PAGE))
            start = out.tell()
            out.writelines(weights)
            out.write(MARK.to_bytes(8, "little") + start.to_bytes(8, "little"))


def finish_archive(
    package: PackageWriter, library: Library, linker: str | None, targets: Targets
) -> None:
    """All but the weights of a model's package."""
    files = {
        f"{LIBRARY}_metadata.json": _metadata(targets),
        f"{LIBRARY}.cpp": _NO_SOURCE,
        **library_files(LIBRARY, library.code, linker),
    }
    manifest = {
        **manifest_of(targets),
        "kind": "model",
        "in_spec": library.names.in_spec,
        "out_spec": library.names.out_spec,
        "inputs": list(map(input_told, library.inputs)),
        "arguments": arguments_told(library.given),
        "outputs": list(library.outputs),
        "written": [number for number, is_written in enumerate(library.written) if is_written],
        "constants": constants_told(library.code.blob.held),
        "calls": list(library.calls),
    }
    package.finish(manifest, files)


def _metadata(targets: Targets) -> bytes:
    """What torch's loader asks for; it warns where the capability is another than the card's."""
    told = {"AOTI_DEVICE_KEY": targets.device}
    if targets.capability is not None:
        told["AOTI_COMPUTE_CAPABILITY"] = str(targets.capability)
    return json.dumps(told).encode()


def _linked(code: Code, linker: str) -> bytes:
    return link(linker, [code.host, *code.kernels.values()], NEEDED[code.device])


def library_files(stem: str, code: Code, linker: str | None) -> dict[str, bytes]:
    """A library, or where there is no linker what it would be linked of."""
    if linker is not None:
        return {f"{stem}.so": _linked(code, linker)}
    kernels = {f"{stem}_kernels_{level}.o": data for level, data in code.kernels.items()}
    return {f"{stem}.o": code.host, **kernels}


def manifest_of(targets: Targets) -> dict[str, Any]:
    """What every package tells of itself."""
    return {
        "format": FORMAT,
        "stator": own_version(),
        "torch": torch.__version__,
        "system": "linux",
        "machine": "x86_64",
        "device": targets.device,
        "levels": list(targets.levels),
        **({} if targets.capability is None else {"capability": targets.capability}),
    }


def arguments_told(given: Sequence[Any]) -> list[Any]:
    """What a program takes: tensors, and what it was built for."""
    return [["tensor"] if one is TENSOR else ["fixed", one] for one in given]


def constants_told(held: Sequence[Held]) -> list[dict[str, Any]]:
    """Constants, and where they lie."""
    return [
        {
            "name": one.name,
            "dtype": str(one.dtype).removeprefix("torch."),
            "size": list(one.size),
            "stride": list(one.stride),
            "offset": one.offset,
            "bytes": one.bytes,
            "folded": one.is_folded,
            "device": one.device,
        }
        for one in held
    ]


def input_told(given: Input) -> dict[str, Any]:
    """One of the tensors that the caller gives."""
    return {
        "name": given.name,
        "dtype": str(given.dtype).removeprefix("torch."),
        "size": list(map(_shown, given.size, given.ranges)),
        "device": given.device,
    }


def _shown(size: Any, span: tuple[int, int]) -> Any:
    return size.constant if size.constant is not None else [str(size), *span]
