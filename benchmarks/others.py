"""Runtimes that take a whole model: ONNX Runtime and OpenVINO, where they are installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.case import Program
from benchmarks.machine import THREADS
from benchmarks.record import ONNX_RUNTIME, OPENVINO

PACKAGES: Final = {ONNX_RUNTIME: ("onnxruntime", "onnxscript"), OPENVINO: ("openvino",)}

Session = Callable[[tuple[Tensor, ...]], Any]


def installed() -> list[str]:
    """Those that can take part here."""
    return [
        name for name, packages in PACKAGES.items() if all(find_spec(part) for part in packages)
    ]


def converted(name: str, program: Program) -> Program:
    """`program`, converted when it is first called, with those arguments."""
    sessions: list[Session] = []

    def run(*arguments: Tensor) -> Any:
        if not sessions:
            if not isinstance(program, torch.nn.Module):
                return program(*arguments)  # the trivial one, by which first uses are timed
            make = _onnx_runtime if name == ONNX_RUNTIME else _openvino
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they trace by what torch calls old
                sessions.append(make(program, arguments))
        return sessions[0](arguments)

    return run


def _openvino(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> Session:
    openvino: Any = import_module("openvino")
    shapes = [tuple(argument.size()) for argument in arguments]
    model = openvino.convert_model(module, example_input=arguments, input=shapes)
    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def run(given: tuple[Tensor, ...]) -> Tensor:
        results = request.infer([value.numpy() for value in given], share_inputs=True)
        return torch.from_numpy(results[0])

    return run


def _onnx_runtime(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> Session:
    onnxruntime: Any = import_module("onnxruntime")
    exported = torch.onnx.export(module, arguments, dynamo=True, verbose=False)
    assert exported is not None, "dynamo=True returns a program"
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        exported.model_proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]

    def run(given: tuple[Tensor, ...]) -> Tensor:
        fed = {name: value.numpy() for name, value in zip(names, given, strict=True)}
        return torch.from_numpy(session.run(None, fed)[0])

    return run
