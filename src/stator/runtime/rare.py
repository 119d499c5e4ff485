"""Python functions that programs call where something is rare: other layouts, errors, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from stator.codegen.triton.driver import launch_error

aten: Final = torch.ops.aten


def as_planned(tensor: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A copy that lies as a kernel expects it."""
    fresh = torch.empty_strided(tensor.size(), stride, dtype=dtype, device=tensor.device)
    return fresh.copy_(tensor)


def refuse(tensor: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An input that is stored into cannot be replaced by a copy."""
    raise RuntimeError(
        f"an input of strides {tuple(tensor.stride())} and type {tensor.dtype} came where "
        f"{stride} and {dtype} were compiled for; compile the function again for it"
    )


def refuse_arguments(given: list[Any]) -> None:
    """A program was called with another number of arguments than it takes."""
    raise ValueError(f"{len(given)} arguments, which is not as many as the graph takes")


def truth(flag: torch.Tensor) -> bool:
    """Whether a flag is set."""
    return bool(flag.item())


def require_later(flag: torch.Tensor, message: str) -> None:
    """Fail where a flag is set, when the device comes to it: nobody waits for that."""
    aten._assert_async.msg(flag == 0, message)


def refuse_launch(kernel: str, code: int) -> None:
    """A kernel could not be launched."""
    raise launch_error(kernel, code)


def refuse_device(device: torch.device) -> None:
    """A device could not be made the current one."""
    raise RuntimeError(f"{device}, for which the graph was compiled, cannot be used")


def empty_strided(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A tensor by torch's own hands."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def dict_of(keys: tuple[Any, ...], *values: Any) -> dict[Any, Any]:
    """A dict of keys and values."""
    return dict(zip(keys, values, strict=True))


@dataclass(frozen=True, slots=True)
class Note:
    """What a step of a plan calls, and where in the user's program that was asked for."""

    called: str
    line: str | None = None


@dataclass(frozen=True, slots=True)
class Annotate:
    """Writes on an exception which step of a plan raised it."""

    notes: tuple[tuple[int, Note], ...]  # by step

    def __call__(self, error: BaseException, number: int) -> None:
        """Add the note of a step, if it has one."""
        for step, note in self.notes:
            if step == number:
                error.add_note(f"in {note.called}" + (f", {note.line}" if note.line else ""))
