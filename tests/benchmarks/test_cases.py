"""Every row runs at its small size; a row is measured from end to end."""

import json
import math
import subprocess
import sys
from typing import Final

import pytest
import torch

from benchmarks.case import Case
from benchmarks.cases import KINDS, cases, find
from benchmarks.closeness import tensors

# In a process of its own: it changes the allocator and the number of threads.
MEASURE: Final = """
import json
from dataclasses import asdict
from benchmarks.cases import find
from benchmarks.row import Budget, measure
case = find("micro", "layernorm_train")
print(json.dumps(asdict(measure(case, case.tiny, peer=False, budget=Budget(3, 60)))))
"""


def shown(case: Case) -> str:
    return f"{case.kind}-{case.name}"


@pytest.mark.parametrize("case", cases(), ids=shown)
def test_a_row_computes_finite_results(case: Case) -> None:
    task = case.tiny()

    results = tensors(task.results(task.step(task.program)))

    assert results
    assert all(bool(torch.isfinite(result).all()) for result in results)
    assert all(leaf.grad is not None for leaf in task.leaves)


def test_rows_have_names_of_their_own() -> None:
    for kind in KINDS:
        names = [case.name for case in cases([kind])]

        assert names
        assert len(names) == len(set(names))
        assert all(find(kind, name).name == name for name in names)


def test_a_row_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])

    assert set(row["outcomes"]) == {"eager", "stator"}
    assert [outcome["error"] for outcome in row["outcomes"].values()] == [None, None]
    assert [len(outcome["times"]) for outcome in row["outcomes"].values()] == [3, 3]
    assert row["outcomes"]["stator"]["graphs"] == 1
    assert row["outcomes"]["stator"]["relative_error"] < 1e-5
    assert 0 < row["outcomes"]["stator"]["backend"] < row["outcomes"]["stator"]["first_call"]
    assert len(row["copies"]) == 3
    assert row["moved"] == 4 * (4 * 8 * 32 + 4 * 32)
    assert math.isclose(row["flops"], 0)
