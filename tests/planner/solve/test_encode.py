"""A problem as arrays."""

from __future__ import annotations

import numpy as np

from shardrec.planner.solve import Option, Part, Piece, Problem, solve
from shardrec.planner.solve.encode import encode


def test_what_a_part_puts_on_every_rank_is_no_piece() -> None:
    rest = tuple(Piece(load=load, memory=(memory,)) for load, memory in ((3.0, 5.0), (2.0, 7.0), (2.0, 5.0)))
    turns = ((0, 1, 2), (1, 2, 0))
    option = Option(
        label="rows",
        everywhere=Piece(load=1.0, memory=(0.5,)),
        parts=(Part(pieces=rest, places=turns, count=2), Part(pieces=rest[:2], places=((0, 1), (1, 2)))),
    )
    problem = Problem(ranks=3, capacity=(100.0,), tables={"a": (option,)})
    encoded = encode(problem)
    assert (encoded.base_load.tolist(), encoded.base_memory.tolist()) == ([1.0 + 2 * 2.0], [[0.5 + 2 * 5.0]])
    assert [block.loads.tolist() for block in encoded.blocks] == [[1.0, 0.0, 0.0], [3.0, 2.0]]
    # The piece of which nothing is left is none; both parts reach every rank.
    pieces = sorted(zip(encoded.piece_load, encoded.piece_memory[:, 0], encoded.piece_count, strict=True))
    assert pieces == [(0.0, 2.0, 2.0), (1.0, 0.0, 2.0), (2.0, 7.0, 1.0), (3.0, 5.0, 1.0)]
    assert encoded.total_load.tolist() == [3 * 1.0 + 2 * 7.0 + 5.0]
    solution = solve(problem)
    assert solution is not None
    # The places are those of the parts as they were, and so are the loads.
    first, second, third = solution.places["a"]
    assert {first, second} <= set(turns)
    assert third in ((0, 1), (1, 2))
    loads = np.ones(3)
    for place, pieces_of in ((first, rest), (second, rest), (third, rest[:2])):
        np.add.at(loads, list(place), [piece.load for piece in pieces_of])
    np.testing.assert_allclose(solution.loads, loads)
