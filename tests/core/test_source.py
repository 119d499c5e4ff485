"""Generated Python: literals, bound objects, tracebacks."""

from __future__ import annotations

import enum
import linecache
import math
import traceback
from typing import Any

import pytest
import torch

from stator.core.source import Source


class Colour(enum.IntEnum):
    """A number by inheritance; its repr is no expression."""

    RED = 1


def evaluated(value: Any) -> Any:
    """What the literal of `value` gives in the module that it was written for."""
    source = Source()
    source.add(f"result = {source.literal(value)}", 0)
    return source.load("literal")["result"]


def function_of(*lines: str) -> Any:
    """A loaded function `f` with the given body."""
    source = Source()
    source.add("def f():", 0)
    for line in lines:
        source.add(line)
    return source.load("example")["f"]


# Literals


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        0,
        -7,
        2**70,
        'it\'s a "text"\nof two lines \\ é',
        1.5,
        0.1,
        1e308,
        5e-324,
        [],
        (),
        (3,),
        [1, [2.5, (None, "x")], []],
        ((), (1, (2,))),
    ],
    ids=repr,
)
def test_a_literal_is_the_value_again_in_its_own_type(value: Any) -> None:
    found = evaluated(value)

    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_zero_keeps_its_sign() -> None:
    assert math.copysign(1, evaluated(-0.0)) == -1
    assert math.copysign(1, evaluated([0.0])[0]) == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_infinity_again(value: float) -> None:
    assert evaluated(value) == value
    assert evaluated([1, (value,)]) == [1, (value,)]


def test_what_is_no_number_stays_so() -> None:
    assert math.isnan(evaluated(math.nan))
    assert math.isnan(evaluated((math.nan, 2))[0])


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.device("cpu"),
        torch.channels_last,
        torch.strided,
        3 + 4j,
        Colour.RED,
        torch.Size([2, 3]),
        slice(1, None),
    ],
    ids=repr,
)
def test_any_other_constant_is_the_very_object(value: Any) -> None:
    assert evaluated(value) is value
    assert evaluated([value])[0] is value


# Names


def test_one_object_has_one_name() -> None:
    source, thing = Source(), object()

    assert source.bind(thing) == source.bind(thing, "another_hint")


def test_equal_objects_have_names_of_their_own() -> None:
    source, one, other = Source(), [1], [1]

    assert source.names[source.bind(one)] is one
    assert source.names[source.bind(other)] is other


def test_names_follow_their_hint() -> None:
    assert "mm" in Source().bind(torch.mm, "mm")


def test_objects_that_only_the_source_holds_are_not_mixed_up() -> None:
    source = Source()

    # Each list dies where nothing holds it, and the next one would get its id.
    names = [source.bind([number]) for number in range(100)]

    assert [source.names[name] for name in names] == [[number] for number in range(100)]


# Loading


def test_lines_run_at_their_depth_with_the_bound_objects() -> None:
    source = Source()
    sine = source.bind(math.sin, "sin")
    source.add("def f(x):", 0)
    source.add("if x > 0:")
    source.add(f"return {sine}(x)", 2)
    source.add("return None")

    f = source.load("example")["f"]

    assert f(1.0) == math.sin(1.0)
    assert f(-1.0) is None


def test_running_the_text_leaves_the_bound_names_alone() -> None:
    source = Source()
    name = source.bind(7)
    source.add(f"{name} = 8", 0)

    assert source.load("example")[name] == 8
    assert source.names == {name: 7}


# Tracebacks


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_traceback_shows_label_and_generated_line() -> None:
    f = function_of("zero = 0", "return 1 // zero  # the guilty one")

    with pytest.raises(ZeroDivisionError) as caught:
        f()

    assert "<stator example " in text_of(caught.value)
    assert "return 1 // zero  # the guilty one" in text_of(caught.value)


def test_two_texts_with_one_label_show_their_own_lines() -> None:
    first, second = function_of("return 1 // 0  # first"), function_of("return 1 // 0  # second")

    with pytest.raises(ZeroDivisionError) as of_first:
        first()
    with pytest.raises(ZeroDivisionError) as of_second:
        second()

    assert "# first" in text_of(of_first.value)
    assert "# second" not in text_of(of_first.value)
    assert "# second" in text_of(of_second.value)


def test_a_text_is_kept_once_however_often_it_is_loaded() -> None:
    function_of("return 7  # once")
    before = len(linecache.cache)
    function_of("return 7  # once")

    assert len(linecache.cache) == before


def test_generated_lines_outlive_a_check_of_the_line_cache() -> None:
    f = function_of("return 1 // 0  # still here")
    linecache.checkcache()

    with pytest.raises(ZeroDivisionError) as caught:
        f()

    assert "# still here" in text_of(caught.value)
