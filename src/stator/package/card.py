"""Packages for a GPU: which cards they are for, and the code of their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stator.codegen.llvm.jit import compile_text
from stator.errors import CompileError, OptionError, Unsupported
from stator.loops.ir import Kernel
from stator.runtime.plan import Launch, Plan, Together


def card_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The one GPU that tensors lie on, beside the CPU; None: there is none among them."""
    devices = sorted({value.device for value in tensors} - {torch.device("cpu")}, key=str)
    if not devices:
        return None
    if len(devices) > 1 or devices[0].type != "cuda":
        raise Unsupported(
            "package",
            f"its tensors lie on {', '.join(map(str, devices))}",
            hint="a package is for the CPU, or for one NVIDIA GPU",
        )
    return devices[0]


def capability_of(device: torch.device, asked: Any = None) -> int:
    """The compute capability that kernels are compiled for (90: Hopper): told, or the card's."""
    if asked is not None:
        text = str(asked).removeprefix("sm_").replace(".", "")
        if not text.isdigit() or int(text) < 70:
            raise OptionError(
                f"gpu_arch cannot be {asked!r}",
                hint="give a compute capability: 90, or 'sm_90', for Hopper",
            )
        return int(text)
    if not torch.cuda.is_available():
        raise CompileError(
            "package",
            f"its tensors lie on {device}, and there is no such card to compile for",
            hint="say what it is for: options={'gpu_arch': 90}",
        )
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


def compile_launchers(plan: Plan, names: Mapping[Kernel, str], capability: int) -> bytes:
    """An object file with a launcher for each kernel, and their cubins."""
    from stator.codegen.triton.backend import launchers_of  # Triton is for GPUs alone
    from stator.codegen.triton.launch import module_text

    launches = [step for step in plan.steps if isinstance(step, Launch | Together)]
    anywhere = {step.nameless for step in launches if not plan.loose.isdisjoint(step.takes)}
    return compile_text(module_text(launchers_of(names, capability, anywhere)), "x86-64")
