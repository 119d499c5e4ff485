"""A key: its digest names all of its parts, and it says which of them differ."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stator.cache import Key

PARTS = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4)


def test_the_order_in_which_parts_come_does_not_matter() -> None:
    one, other = Key.of({"graph": "a", "options": "b"}), Key.of({"options": "b", "graph": "a"})

    assert one == other
    assert one.digest == other.digest


def test_a_digest_is_the_same_in_every_process() -> None:
    key = Key.of({"graph": "1f", "torch": "2.11.0"})

    assert key.digest == sha256(b'[["graph", "1f"], ["torch", "2.11.0"]]').hexdigest()


@given(PARTS, PARTS)
def test_keys_have_one_digest_exactly_if_no_part_differs(
    one: dict[str, str], other: dict[str, str]
) -> None:
    a, b = Key.of(one), Key.of(other)

    assert (a.digest == b.digest) == (a == b) == (a.differing(b) == ())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "1", "b": "2"}, {"a": '1", "b": "2'}),
        ({"a": ""}, {}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ({"a": "\\u00e9"}, {"a": "é"}),
        ({"a": "\ud800"}, {"a": "\ufffd"}),  # half of a surrogate pair has no UTF-8
    ],
)
def test_parts_do_not_run_into_each_other(one: dict[str, str], other: dict[str, str]) -> None:
    assert Key.of(one).digest != Key.of(other).digest


def test_differing_parts_are_named_in_order_and_missing_ones_too() -> None:
    key = Key.of({"graph": "a", "options": "b", "torch": "2.11"})
    other = Key.of({"graph": "z", "options": "b", "cpu": "avx2"})

    assert key.differing(other) == other.differing(key) == ("cpu", "graph", "torch")


@pytest.mark.parametrize("parts", [(("b", "1"), ("a", "2")), (("a", "1"), ("a", "2"))])
def test_parts_out_of_order_or_twice_are_a_bug_of_ours(parts: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(AssertionError, match=r"Key\.of"):
        Key(parts)
