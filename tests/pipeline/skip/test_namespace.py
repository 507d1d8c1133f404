"""Namespaces."""

from __future__ import annotations

import copy
import pickle

from shardrec.pipeline.skip import Namespace


def test_unequal_to_others_and_equal_to_copies() -> None:
    one, other = Namespace(), Namespace()
    assert one != other
    assert one != "one"
    for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert same == one
        assert same is not one
        assert hash(same) == hash(one)
    assert len({one, other, copy.copy(one)}) == 2
    assert not hasattr(one, "__dict__")
