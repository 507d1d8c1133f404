"""Constraints: names before patterns, and no name that matches nothing."""

from __future__ import annotations

import pytest

from shardrec.errors import ConfigError
from shardrec.planner.constraint import CUTS, Constraint, constraints_by_table

TABLES = dict.fromkeys(["ads.user", "ads.item", "news.user", "news[0]"])
ROWS, COLUMNS, WHOLE = Constraint(cuts=("row_wise",)), Constraint(cuts=("column_wise",)), Constraint(ranks=(0,))


def test_a_pattern_stands_for_each_table_it_matches() -> None:
    assert constraints_by_table(TABLES, {"ads.*": ROWS}, 2) == {"ads.user": ROWS, "ads.item": ROWS}
    assert constraints_by_table(TABLES, {"*.us?r": ROWS}, 2) == {"ads.user": ROWS, "news.user": ROWS}


def test_the_first_pattern_wins_and_a_name_wins_over_both() -> None:
    orders = [
        {"ads.user": WHOLE, "ads.*": ROWS, "*": COLUMNS},
        {"ads.*": ROWS, "ads.user": WHOLE, "*": COLUMNS},
        {"ads.*": ROWS, "*": COLUMNS, "ads.user": WHOLE},
    ]
    for constraints in orders:
        assert constraints_by_table(TABLES, constraints, 2) == {
            "ads.user": WHOLE,
            "ads.item": ROWS,
            "news.user": COLUMNS,
            "news[0]": COLUMNS,
        }


def test_a_name_with_brackets_is_a_name() -> None:
    assert constraints_by_table(TABLES, {"news[0]": ROWS}, 2) == {"news[0]": ROWS}


def test_a_tables_own_name_will_do_where_one_collection_has_it() -> None:
    assert constraints_by_table(TABLES, {"item": ROWS, "us*": COLUMNS}, 2) == {
        "ads.item": ROWS,
        "ads.user": COLUMNS,
        "news.user": COLUMNS,
    }
    with pytest.raises(
        ConfigError, match=r"table 'user' and there are 'ads\.user', 'news\.user'. Give one of these, or"
    ):
        constraints_by_table(TABLES, {"user": ROWS}, 2)


@pytest.mark.parametrize("unknown", ["shops", "shops.*", "ADS.user", "users"])
def test_unknown_tables(unknown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        constraints_by_table(TABLES, {"ads.*": ROWS, unknown: ROWS}, 2)
    assert str(caught.value) == (
        f"a constraint is for an unknown table {unknown!r}. The tables are "
        "'ads.user', 'ads.item', 'news.user', 'news[0]'"
    )


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_unknown_ranks(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"table 'ads\.\*' names rank {rank}. There are ranks 0 to 1"):
        constraints_by_table(TABLES, {"ads.*": Constraint(ranks=(0, rank))}, 2)


def test_unknown_cuts() -> None:
    with pytest.raises(ConfigError) as caught:
        Constraint(cuts=("row_wise", "rowwise"))
    assert str(caught.value) == f"there is no cut 'rowwise'. The cuts are {', '.join(CUTS)}"


@pytest.mark.parametrize("load_factor", [7.0, -0.5, float("nan")])
@pytest.mark.parametrize("tiers", [(), ("device",), ("cached",)])
def test_sizes_that_no_cache_has(tiers: tuple[str, ...], load_factor: float) -> None:
    with pytest.raises(ConfigError, match=f"load_factor is {load_factor}"):
        Constraint(tiers=tiers, load_factor=load_factor)


def test_a_size_without_a_cache() -> None:
    with pytest.raises(ConfigError, match=r"load_factor is 0.5 and tiers \('host',\), which have no cache"):
        Constraint(tiers=("host",), load_factor=0.5)


def test_no_constraints() -> None:
    assert constraints_by_table(TABLES, None, 2) == {}
    assert constraints_by_table(TABLES, {}, 2) == {}
