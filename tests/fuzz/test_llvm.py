"""Random kernels: what LLVM makes of them against the interpreter."""

from __future__ import annotations

from typing import Final

import pytest

from tests.fuzz.cases import case_of, decisions_of, explained, failure

KERNELS: Final = 600
SHARDS: Final = 8  # so that several workers share them


@pytest.mark.parametrize("shard", range(SHARDS))
def test_machine_code_agrees_with_the_interpreter(shard: int) -> None:
    for number in range(shard, KERNELS, SHARDS):
        case = case_of(decisions_of(number))
        try:
            wrong = failure(case)
        except Exception as error:
            raise AssertionError(explained(number)) from error
        assert wrong is None, explained(number)
