"""Fuel counts rewrites and stops them."""

from stator.core.fuel import Fuel


def test_fuel_without_a_limit_never_runs_dry() -> None:
    fuel = Fuel()

    assert all(fuel.spend(f"rewrite {i}") for i in range(1000))
    assert fuel.left is None


def test_as_many_rewrites_fire_as_there_is_fuel() -> None:
    fuel = Fuel(2)

    assert [fuel.spend(name) for name in "abcd"] == [True, True, False, False]
    assert fuel.left == 0


def test_an_empty_tank_lets_nothing_fire() -> None:
    fuel = Fuel(0)

    assert not fuel.spend("a")
    assert fuel.spent == []


def test_rewrites_that_fired_are_named_in_order() -> None:
    fuel = Fuel(2)
    for name in "abc":
        fuel.spend(name)

    assert fuel.spent == ["a", "b"]


def test_each_record_has_its_own_list() -> None:
    Fuel().spend("a")

    assert Fuel().spent == []


def test_the_last_rewrite_of_the_smallest_failing_fuel_is_the_wrong_one() -> None:
    def names_fired(limit: int) -> list[str]:
        fuel = Fuel(limit)
        for name in ("fold", "share", "miscompile", "drop"):
            fuel.spend(name)
        return fuel.spent

    works, fails = 0, 4
    while fails - works > 1:
        middle = (works + fails) // 2
        if "miscompile" in names_fired(middle):
            fails = middle
        else:
            works = middle

    assert names_fired(fails)[-1] == "miscompile"
