"""What is pending where, on shapes alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardrec.scripting.pending_types import NOTHING, Shape, solve

COUNT = 7


def many() -> list[Shape]:
    """Leaves, lists of them, and lists of those."""
    leaves = [Shape("leaf") for _ in range(COUNT)]
    lists = [Shape("list", [Shape("leaf")]) for _ in range(COUNT)]
    return [*leaves, *lists, *(Shape("list", [Shape("list", [Shape("leaf")])]) for _ in range(COUNT))]


def everything(shapes: list[Shape]) -> list[Shape]:
    return [each for shape in shapes for each in (shape, *everything(list(shape.parts)))]


# Pairs of shapes of the same kind, as a program with types would bring together.
pairs = st.tuples(st.integers(0, 2), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1))
rules = st.lists(st.tuples(st.sampled_from(["flow", "unite", "share_parts", "store"]), pairs), max_size=14)
picks = st.lists(st.integers(0, 3 * COUNT - 1), max_size=3)


@given(rules=rules, starts=picks, pins=picks)
def test_solutions_are_sound_and_least(
    rules: list[tuple[str, tuple[int, int, int]]], starts: list[int], pins: list[int]
) -> None:
    shapes = many()
    flows: list[tuple[Shape, Shape]] = []
    for rule, (level, i, j) in rules:
        a, b = shapes[level * COUNT + i], shapes[level * COUNT + j]
        if rule == "store" and level < 2:
            (b,) = shapes[(level + 1) * COUNT + j].parts
            rule = "flow"
        elif rule == "store":
            continue
        getattr(a, rule)(b)
        if rule == "flow":
            flows.append((a, b))
    for start in starts:
        shapes[start].start()
    for pin in pins:
        shapes[pin].pin()
    solve([shapes[start] for start in starts])
    found = everything(shapes)
    for pin in pins:
        assert not shapes[pin].is_pending
        assert not shapes[pin].holds_pending
    for shape in found:
        if shape.is_pending:
            assert not shape.holds_pending
    for a, b in flows:
        for mine, its in zip(everything(list(a.parts)), everything(list(b.parts)), strict=True):
            assert mine.is_pending == its.is_pending
        if a.is_pending:
            assert b.is_pending or b._root()._is_pinned
    for shape in found:
        if shape.is_pending:
            came = [shapes[start] for start in starts] + [a for a, b in flows if b._root() is shape._root()]
            assert any(each._root() is shape._root() or each.is_pending for each in came)


def test_a_wait_stands_where_pending_meets_pinned() -> None:
    source, place, after = Shape("leaf"), Shape("leaf"), Shape("leaf")
    source.start()
    source.flow(place)
    place.flow(after)
    place.pin()
    solve([source])
    assert [source.is_pending, place.is_pending, after.is_pending] == [True, False, False]


def test_what_two_lists_hold_is_one() -> None:
    item, first, second = Shape("leaf"), Shape("list", [Shape("leaf")]), Shape("list", [Shape("leaf")])
    item.start()
    item.flow(first.parts[0])
    first.flow(second)
    solve([item])
    assert second.holds_pending
    assert not second.is_pending


def test_none_goes_with_everything() -> None:
    nothing, held, place = Shape(NOTHING), Shape("list", [Shape("leaf")]), Shape("list", [Shape("leaf")])
    nothing.flow(place)
    held.parts[0].start()
    held.flow(place)
    solve([held.parts[0]])
    assert place.holds_pending
    nothing.unite(held)
    assert nothing.parts[0].is_pending


def test_kinds_that_do_not_go_together_are_plain() -> None:
    held, anything = Shape("list", [Shape("leaf")]), Shape("AnyType")
    held.parts[0].start()
    held.flow(anything)
    solve([held.parts[0]])
    assert not held.holds_pending
