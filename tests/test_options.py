"""Every option: what it takes, what it refuses, and what the refusal says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import stator
from stator import options
from stator.errors import OptionError, StatorError
from stator.options import FUELS, MODES, Options, list_options, read_options

SWITCHES = [field.name for field in fields(Options) if isinstance(field.default, bool)]

# What may be given, and what it becomes.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    **{name: [(True, True), (False, False)] for name in SWITCHES},
    "cache_dir": [(None, None), ("a/folder", Path("a/folder")), (Path("b"), Path("b"))],
    "cache_limit": [(0, 0), (1 << 40, 1 << 40)],
    "remote_cache": [(None, None), ("s3://bucket/folder", "s3://bucket/folder")],
    "logs": [((), ()), (["fusion", "passes"], ("fusion", "passes"))],
    "skip": [((), ()), (["a_pass"], ("a_pass",)), (("a", "b"), ("a", "b"))],
    "codegen": [("auto", "auto"), ("triton", "triton")],
    "executor": [("native", "native"), ("python", "python")],
    **{name: [(None, None), (0, 0), (12, 12)] for name in FUELS},
    "memory_budget": [(0, 0), (0.25, 0.25), (1, 1)],
    "memory_limit": [
        *((None, None), (4096, 4096), ("8GiB", 8 << 30), ("512 MiB", 512 << 20)),
        *(("2 GB", 2 * 10**9), ("1.5kib", 1536), ("2e9", 2 * 10**9), ("100b", 100)),
    ],
    "save_policy": [(None, None), (len, len)],
    "recompute_costs": [("flops", "flops"), ("profile", "profile")],
    "knapsack": [("dp", "dp"), ("ilp", "ilp"), ("greedy", "greedy")],
    "fuel_log": [(None, None), ("a/file", Path("a/file")), (Path("b"), Path("b"))],
    "verify": [(True, True), (False, False), ("kernels", "kernels")],
    "numerics": [("fast", "fast"), ("eager", "eager")],
    "verify_passes": [("graphs", "graphs"), ("values", "values")],
    "dump_dir": [(None, None), ("a/folder", Path("a/folder")), (Path("b"), Path("b"))],
}

REFUSED: dict[str, list[Any]] = {
    **{name: [1, 0, "yes", None] for name in SWITCHES},
    "cache_dir": [3, True, ["a"]],
    "cache_limit": ["much", 1.5, -1, True, None],
    "remote_cache": ["", 3, True],
    "logs": ["fusion", ["fusoin"], [1]],
    "skip": ["a_pass", [1], ["a_pass", None]],
    "codegen": ["cuda", None, 1],
    "executor": ["c++", None, 1],
    **{name: ["much", 1.5, -1, True] for name in FUELS},
    "memory_budget": [-0.1, 1.1, "half", True, None],
    "memory_limit": [0, -1, "much", "", "8 GiBs", "1.2.3GiB", ".", "5ib", "1e400", 1.5, True],
    "save_policy": ["save", 3],
    "recompute_costs": ["guess", None],
    "knapsack": ["best", None],
    "fuel_log": [3, True, ["a"]],
    "verify": [1, 0, "graphs", None],
    "numerics": ["exact", None, True],
    "verify_passes": ["everything", None, True],
    "dump_dir": [3, True, ["a"]],
}


@pytest.fixture(autouse=True)
def _no_dump_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("DUMP", "CACHE", "CACHE_DIR", "REMOTE_CACHE", "FUEL", "FUEL_LOG", "EXPLAIN_MEMORY")
    for name in names:
        monkeypatch.delenv(f"STATOR_{name}", raising=False)


def refusal(**given: Any) -> OptionError:
    """The error that the options raise."""
    with pytest.raises(OptionError) as caught:
        read_options(None, given)
    return caught.value


# One by one


def test_every_option_is_tested_here() -> None:
    assert set(TAKEN) == set(REFUSED) == {field.name for field in fields(Options)}


@pytest.mark.parametrize(
    ("name", "given", "becomes"),
    [(name, given, becomes) for name, pairs in TAKEN.items() for given, becomes in pairs],
)
def test_an_option_takes(name: str, given: Any, becomes: Any) -> None:
    found = getattr(read_options(None, {name: given}), name)

    assert found == becomes
    assert type(found) is type(becomes)


@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, values in REFUSED.items() for given in values]
)
def test_an_option_refuses(name: str, given: Any) -> None:
    error = refusal(**{name: given})

    assert name in error.what
    assert repr(given) in error.what
    assert "give " in (error.hint or "")
    assert repr(list_options()[name]) in (error.hint or "")  # the default


def test_an_unknown_option_names_the_nearest_and_all_there_are() -> None:
    error = refusal(dumpdir="a")

    assert "'dumpdir'" in error.what
    assert "did you mean 'dump_dir'?" in (error.hint or "")
    assert all(name in (error.hint or "") for name in list_options())


def test_an_option_like_no_other_gets_no_guess() -> None:
    error = refusal(zzz=1)

    assert "did you mean" not in str(error)
    assert all(name in str(error) for name in list_options())


def test_a_refusal_is_one_of_our_errors_and_a_value_error() -> None:
    error = refusal(fuel="much")

    assert isinstance(error, StatorError)
    assert isinstance(error, ValueError)


# Together


@pytest.mark.parametrize(
    "given",
    [
        {"memory_budget": 0.5, "memory_limit": "8GiB"},
        {"memory_budget": 0.5, "aggressive_recomputation": True},
        {"memory_limit": "8GiB", "aggressive_recomputation": True},
        {"memory_budget": 0.5, "kernels": False},
        {"memory_limit": "8GiB", "kernels": False},
        {"aggressive_recomputation": True, "kernels": False},
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    error = refusal(**given)

    assert all(name in str(error) for name in given)


def test_torchs_own_budget_holds_where_nothing_else_is_asked() -> None:
    config: Any = torch._functorch.config
    with config.patch(activation_memory_budget=0.5):
        assert read_options().memory_budget == 0.5
        assert read_options(None, {"memory_budget": 1.0}).memory_budget == 1.0
        for other in ({"memory_limit": 1}, {"aggressive_recomputation": True}, {"kernels": False}):
            assert read_options(None, other).memory_budget == 1.0
    with config.patch(activation_memory_budget=2.0), pytest.raises(OptionError, match="budget"):
        read_options()


# Defaults


def test_without_options_all_are_at_their_defaults() -> None:
    assert read_options() == Options()
    assert read_options("default", {}) == Options()


def test_every_option_is_listed_with_its_default() -> None:
    listed = stator.list_options()

    assert list(listed) == [field.name for field in fields(Options)]
    assert Options(**listed) == Options()


def test_by_default_graphs_are_verified_and_failures_fall_back() -> None:
    made = Options()

    assert made.verify
    assert not made.strict
    assert (made.skip, made.fuel, made.dump_dir) == ((), None, None)


def test_options_do_not_change_once_made() -> None:
    made = read_options(None, {"fuel": 3})

    with pytest.raises(FrozenInstanceError):
        made.fuel = 4  # type: ignore[misc]  # what the test is about


def test_options_that_are_given_whole_are_taken_as_they_are() -> None:
    made = Options(strict=True, fuel=2)

    assert read_options(None, made) is made


def test_options_that_are_given_whole_are_checked() -> None:
    assert read_options(None, Options(memory_limit="8GiB")).memory_limit == 8 << 30
    for wrong in (Options(memory_budget=5), Options(memory_budget=0.5, memory_limit=1)):
        with pytest.raises(OptionError, match="memory_budget"):
            read_options(None, wrong)


def test_reading_leaves_the_given_mapping_alone() -> None:
    given = {"skip": ["a_pass"], "dump_dir": "a"}

    read_options(None, given)

    assert given == {"skip": ["a_pass"], "dump_dir": "a"}


def test_where_things_are_written_stays_out_of_a_cache_key() -> None:
    unkeyed = [field.name for field in fields(Options) if not field.metadata.get("keyed", True)]

    paths = ["cache_dir", "cache_limit", "remote_cache", "dump_dir"]
    assert unkeyed == ["fuel_log", "cache", *paths, "explain", "logs", "progress"]


# Environment


def test_the_environment_names_the_dump_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATOR_DUMP", "from/outside")

    assert read_options() == Options(dump_dir=Path("from/outside"))


@pytest.mark.parametrize("given", ["from/inside", None])
def test_what_is_given_outweighs_the_environment(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATOR_DUMP", "from/outside")

    found = read_options(None, {"dump_dir": given}).dump_dir

    assert found == (Path(given) if given else None)


def test_an_empty_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATOR_DUMP", "")

    assert read_options().dump_dir is None


# Modes


def test_torch_s_modes_are_known() -> None:
    assert set(MODES) == {
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    }


def test_what_the_modes_ask_of_a_gpu() -> None:
    told = {mode: read_options(mode) for mode in MODES}

    assert [mode for mode in MODES if told[mode].cuda_graphs] == ["reduce-overhead", "max-autotune"]
    tuned = ["max-autotune", "max-autotune-no-cudagraphs"]
    assert [mode for mode in MODES if told[mode].tune] == tuned
    assert told["default"] == Options()


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_mode_leaves_room_for_options(mode: str | None) -> None:
    assert read_options(mode, {"fuel": 3}).fuel == 3


def test_an_unknown_mode_names_the_nearest_and_all_there_are() -> None:
    with pytest.raises(OptionError) as caught:
        read_options("max-autotone")

    assert "'max-autotone'" in caught.value.what
    assert "did you mean 'max-autotune'?" in (caught.value.hint or "")
    assert all(mode in (caught.value.hint or "") for mode in MODES)


def test_a_mode_is_a_set_of_options_that_others_outweigh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MODES", {"default": {}, "careful": {"strict": True, "fuel": 1}})

    assert read_options("careful") == Options(strict=True, fuel=1)
    assert read_options("careful", {"fuel": 2}) == Options(strict=True, fuel=2)


def test_limits_of_a_bisection_travel_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATOR_FUEL", "9")  # of whoever bisects: it does not go on
    told = options.environment_for(None, Path("log"), {"pass_fuel": 0, "executor": "python"})
    for name in ("STATOR_FUEL", "STATOR_KERNEL_FUEL"):
        assert name not in told
    monkeypatch.delenv("STATOR_FUEL")
    for name in ("STATOR_PASS_FUEL", "STATOR_EXECUTOR", "STATOR_FUEL_LOG", "STATOR_CACHE"):
        monkeypatch.setenv(name, told[name])

    made = read_options()

    assert (made.fuel, made.pass_fuel, made.kernel_fuel) == (None, 0, None)
    assert (made.executor, made.fuel_log, made.cache) == ("python", Path("log"), False)
