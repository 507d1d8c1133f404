"""The best sets of parts: the same from C++ as from Python."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.native import library
from shardrec.planner.solve import Option, Part, Piece, Problem
from shardrec.planner.solve import sets as module
from shardrec.planner.solve.encode import Floats, encode
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.knapsack import knapsack
from shardrec.planner.solve.problem import host_places
from shardrec.planner.solve.sets import best_sets
from tests.plans import randoms


def random_inside(rng: Random, hosts: int, local: int) -> Inside:
    """Parts that are larger on some of a host's ranks, or alike on all."""
    places = host_places(hosts, local)
    turned = tuple(host[turn:] + host[:turn] for host in places for turn in range(local))
    tables = {}
    for number in range(rng.randint(0, 6)):
        large, small = rng.choice([3.0, 2.1, 1.2]), rng.choice([0.0, 0.3, 1.0])
        many = rng.randint(1, local)
        pieces = (Piece(load=large),) * many + (Piece(load=small),) * (local - many)
        part = Part(pieces=pieces, places=places if many == local else turned)
        tables[f"t{number}"] = (Option(label="", everywhere=Piece(), parts=(part,)),)
    one = Part(pieces=(Piece(load=1.0),), places=tuple((rank,) for rank in range(hosts * local)))
    tables["one"] = (Option(label="", everywhere=Piece(), parts=(one,)),)
    return Inside(encode(Problem(ranks=hosts * local, capacity=(np.inf,), tables=tables)), 0.1, 100, 0)


@pytest.mark.skipif(library() is None, reason="no compiled functions")
@settings(max_examples=100, deadline=None)
@given(rng=randoms())
def test_compiled_sets_are_those_of_python(rng: Random) -> None:
    inside = random_inside(rng, 2, rng.choice([1, 2, 4, 9]))
    room = rng.choice([0, 31, 45, 60])
    # Some by weight, so that sums are alike but for their rounding.
    price: Floats = np.array([rng.choice([0.0, 0.01 * float(ways[0].sum()), rng.random()]) for ways in inside.kinds])
    free, _ = knapsack(np.array([9, 20, 31]), np.array([rng.choice([0.0, 0.1, rng.random()]) for _ in range(3)]), 100)
    with patch.object(module, "library", return_value=None):
        most = best_sets(inside, room, price, free, least=0.0, beam=3).most
    least, beam, near = most * rng.choice([0.0, 0.5, 0.9]), rng.choice([0, 1, 5, 1000]), most * rng.choice([0.0, 0.2])
    # Few enough states that some searches end before they are done.
    with patch.object(module, "_STATES", rng.choice([30, 300])), patch.object(module, "_FOUND", rng.choice([2, 100])):
        found = best_sets(inside, room, price, free, least=least, beam=beam, near=near)
        with patch.object(module, "library", return_value=None):
            wanted = best_sets(inside, room, price, free, least=least, beam=beam, near=near)
    assert found.most == wanted.most
    np.testing.assert_array_equal(found.values, wanted.values)
    np.testing.assert_array_equal(found.sets, wanted.sets)
    np.testing.assert_array_equal(found.loads, wanted.loads)
