"""Drawn models, of which parts are out of use, frozen or tied, train as the unsharded ones; no rank hangs."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.modules.structures import RANKS, Structure, structures, train
from tests.ranks import ranks


@pytest.mark.timeout(7200)
@given(structure=structures())
def test_a_drawn_model_trains_as_the_unsharded_one(structure: Structure) -> None:
    first, *others = ranks(RANKS, train, structure, timeout=30.0)
    assert others == [first], "the ranks made other numbers of steps"
