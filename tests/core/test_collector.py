"""The collector rests inside and is as it was behind, also after an error."""

from __future__ import annotations

import gc

import pytest

from stator.core.collector import collector_off


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_it_was(on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with collector_off():
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(ValueError, match="inside"), collector_off():
            raise ValueError("inside")
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
