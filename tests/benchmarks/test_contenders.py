"""A watch counts what a backend does, and nothing twice."""

import pytest

from benchmarks.contenders import Watch, contenders
from benchmarks.others import installed


def test_a_backend_that_calls_itself_is_one_graph() -> None:
    watch = Watch()

    def compile_graph(depth: int) -> int:
        return watched(depth - 1) + 1 if depth else 0

    watched = watch.around(compile_graph)

    assert watched(3) == 3
    assert watched(0) == 0
    assert watch.graphs == 2
    assert watch.seconds > 0


def test_a_failure_passes_through_a_watch() -> None:
    watch = Watch()

    with pytest.raises(ZeroDivisionError):
        watch.around(lambda: 1 // 0)()
    watch.around(lambda: None)()

    assert watch.graphs == 2


def test_freezing_takes_part_in_inference_alone() -> None:
    assert contenders("infer", peer=True) == [
        *("eager", "stator", "stator_frozen"),
        *("inductor", "frozen", *installed()),
    ]
    assert contenders("train", peer=True) == ["eager", "stator", "inductor"]
    assert contenders("infer", peer=False) == ["eager", "stator", "stator_frozen"]
