"""What is asked of torch.cuda, in which order; there is no GPU, so what answers stands for it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.runtime import cuda_recorder
from stator.runtime.cuda_recorder import CudaRecorder, recorder_of
from tests.runtime.recorder import Program

GPU = torch.device("cuda", 0)


class Graph:
    """A recording that notes what it is asked."""

    said: list[str] = []  # noqa: RUF012  of all of them

    def __init__(self) -> None:
        self.said.append("new")

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.said.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.said.append("end")

    def replay(self) -> None:
        self.said.append("replay")


class Stream:
    """A stream by name."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other.name)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that torch.cuda is asked."""
    heard: list[str] = []

    @contextmanager
    def within(what: Any) -> Any:
        heard.append(f"within {getattr(what, 'name', what)}")
        yield
        heard.append(f"out of {getattr(what, 'name', what)}")

    monkeypatch.setattr(Graph, "said", heard)
    for name, value in {
        "device": within,
        "stream": within,
        "Stream": lambda device: Stream("side"),
        "CUDAGraph": Graph,
        "synchronize": lambda: heard.append("synchronize"),
        "empty_cache": lambda: heard.append("empty"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: heard.append(f"zeros on {device}"))
    monkeypatch.setattr(
        cuda_recorder, "end_allocation", lambda device, pool: heard.append(f"give up {pool}")
    )
    return heard


def test_a_call_is_recorded_on_a_stream_of_its_own(said: list[str]) -> None:
    def run(arguments: list[Any]) -> list[Any]:
        said.append(f"run {arguments}")
        return [7]

    replay, results = CudaRecorder(GPU).record("pool", run, [1, 2])
    replay()

    assert results == [7]
    assert said == [
        *("within cuda:0", "synchronize", "empty", "new", "within side"),
        *("begin in pool, thread_local", "run [1, 2]", "end", "out of side", "out of cuda:0"),
        "replay",
    ]


def test_a_recording_that_fails_is_left_as_if_it_had_ended(said: list[str]) -> None:
    def run(arguments: list[Any]) -> list[Any]:
        raise RuntimeError("not while recording")

    with pytest.raises(RuntimeError, match="not while recording"):
        CudaRecorder(GPU).record("pool", run, [])

    assert said[5:] == [
        *("begin in pool, thread_local", "end", "give up pool"),
        *("new", "begin in None, thread_local", "zeros on cuda:0", "end"),
    ]


def test_replays_on_several_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream("one"), Stream("two")]
    now = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    recorder = CudaRecorder(GPU)
    for stream in (streams[0], streams[0], streams[1], streams[1], streams[0]):
        now[0] = stream
        assert recorder.order() is stream

    assert [stream.waits for stream in streams] == [["two"], ["one"]]


def test_copies_are_held_for_every_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in memory of the stream that was current when they were made."""
    program = Program(lambda x: [x * 2])
    call = program.recorded()
    held: list[tuple[int, Any]] = []

    def hold(tensor: Tensor, stream: Any) -> None:
        held.append((tensor.data_ptr(), stream))

    monkeypatch.setattr(Tensor, "record_stream", hold)
    given = [torch.ones(4) for _ in range(6)]
    for x, stream in zip(given, ("one", "one", "one", "two", "two", "one"), strict=True):
        program.recorder.stream = stream
        assert torch.equal(call([x])[0], x * 2)

    (size,) = call.sizes
    (buffer,) = size.recording.buffers
    place = buffer.tensor.data_ptr()
    assert held == [(place, "one"), (place, "two"), (place, "one")]


def test_a_device_has_one_recorder() -> None:
    assert recorder_of(GPU) is recorder_of(torch.device("cuda:0"))
    assert recorder_of(GPU) is not recorder_of(torch.device("cuda:1"))


def test_the_stream_that_is_asked_is_that_of_the_programs_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]

    @contextmanager
    def device(other: torch.device) -> Any:
        before, now[0] = now[0], other.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)

    asked = [CudaRecorder(torch.device("cuda", number)).is_recording() for number in (0, 1, 2)]

    assert asked == [False, True, False]
    assert now == [0]
