"""A problem as arrays."""

from __future__ import annotations

import numpy as np

from shardrec.planner.solve import Gang, Item, Option, Problem, solve
from shardrec.planner.solve.encode import encode


def test_what_a_gang_puts_on_every_rank_is_no_item() -> None:
    rest = tuple(Item(load=load, memory=(memory,)) for load, memory in ((3.0, 5.0), (2.0, 7.0), (2.0, 5.0)))
    turns = ((0, 1, 2), (1, 2, 0))
    option = Option(
        label="rows",
        everywhere=Item(load=1.0, memory=(0.5,)),
        gangs=(Gang(items=rest, places=turns, count=2), Gang(items=rest[:2], places=((0, 1), (1, 2)))),
    )
    problem = Problem(ranks=3, capacity=(100.0,), tables={"a": (option,)})
    encoded = encode(problem)
    assert encoded.base.tolist() == [[1.0 + 2 * 2.0, 0.5 + 2 * 5.0]]
    assert [kind.size[:, 0].tolist() for kind in encoded.kinds] == [[1.0, 0.0, 0.0], [3.0, 2.0]]
    # The item of which nothing is left is none; both gangs reach every rank.
    items = sorted(zip(*encoded.item_size.T, encoded.item_count, strict=True))
    assert items == [(0.0, 2.0, 2.0), (1.0, 0.0, 2.0), (2.0, 7.0, 1.0), (3.0, 5.0, 1.0)]
    assert encoded.total[:, 0].tolist() == [3 * 1.0 + 2 * 7.0 + 5.0]
    solution = solve(problem)
    assert solution is not None
    # The places are those of the gangs as they were, and so are the loads.
    first, second, third = solution.places["a"]
    assert {first, second} <= set(turns)
    assert third in ((0, 1), (1, 2))
    loads = np.ones(3)
    for place, items_of in ((first, rest), (second, rest), (third, rest[:2])):
        np.add.at(loads, list(place), [item.load for item in items_of])
    np.testing.assert_allclose(solution.loads, loads)
