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


def test_ordered_and_after_none() -> None:
    namespaces = [Namespace() for _ in range(5)]
    ordered = sorted([*namespaces, None], key=lambda one: (one is not None, one))  # type: ignore[arg-type]
    assert ordered[0] is None
    assert sorted(reversed(namespaces)) == ordered[1:]
    keys = [(namespaces[0], "a"), (None, "b")]
    assert sorted(keys, reverse=True)[0] == keys[0]
    assert not hasattr(namespaces[0], "__dict__")
