"""Plans: saved and read unchanged, told apart by fingerprint, refused with every fault."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardrec.errors import PlanError
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.planner import explain
from tests.plans import CUTS, cut_plan, random_plan, random_tables, random_topology, randoms

PLAN = ShardingPlan(
    topology=Topology(hosts=1, ranks_per_host=2),
    tables=(
        cuts.row_wise("ads", 10, 8, ranks=[0, 1]),
        cuts.column_wise("users", 6, 16, ranks=[1, 0]),
        cuts.data_parallel("days", 7, 4),
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    rng: Random = draw(randoms())
    return random_plan(rng, random_tables(rng), random_topology(rng))


@given(plans())
def test_json_round_trip(plan: ShardingPlan) -> None:
    again = ShardingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert 0 <= plan.fingerprint < 2**48


@given(plans())
def test_copies_are_equal(plan: ShardingPlan) -> None:
    assert plan.by_name.keys() == {table.name for table in plan.tables}  # fills the caches, which must not travel badly
    for again in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert again == plan
        assert hash(again) == hash(plan)
        assert again.fingerprint == plan.fingerprint


@given(rng=randoms())
def test_fingerprints_tell_plans_apart(rng: Random) -> None:
    tables, topology = random_tables(rng), random_topology(rng)
    one, other = random_plan(rng, tables, topology), random_plan(rng, tables, topology)
    assert (one.fingerprint == other.fingerprint) == (one == other)


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "import sys, json; from shardrec.layout import ShardingPlan;"
        "print(ShardingPlan.from_json(json.loads(sys.argv[1])).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(PLAN.to_json())],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == PLAN.fingerprint


@given(rng=randoms())
def test_local_numel_adds_up(rng: Random) -> None:
    tables, topology = random_tables(rng), random_topology(rng)
    for plan in (random_plan(rng, tables, topology), cut_plan(rng.choice(sorted(CUTS)), rng, tables, topology)):
        total = sum(
            rows * dim * (topology.world_size if plan.by_name[name].replicated else 1)
            for name, (rows, dim) in tables.items()
        )
        assert sum(plan.local_numel(rank) for rank in range(plan.world_size)) == total


def test_save_and_load(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == PLAN
    assert ShardingPlan.load(str(tmp_path / "plan.json")) == PLAN


# ---------------------------------------------------------------------------------------------------------- faults


def test_all_the_faults_of_all_the_tables_at_once() -> None:
    def shard(table: str, *place: int) -> Shard:
        top, bottom, left, right, rank = place
        return Shard(table=table, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)

    def layout(name: str, *shards: Shard) -> TableLayout:
        return TableLayout(name=name, num_embeddings=10, embedding_dim=8, shards=shards)

    with pytest.raises(PlanError) as caught:
        ShardingPlan(
            topology=Topology(hosts=1, ranks_per_host=2),
            tables=(
                layout("gaps", shard("gaps", 2, 5, 0, 8, 0), shard("gaps", 6, 10, 0, 8, 1)),
                layout("twice", shard("twice", 0, 10, 0, 8, 0), shard("twice", 0, 10, 4, 8, 1)),
                layout("lost", shard("lost", 0, 10, 0, 8, 2)),
                layout("odd", shard("odd", 0, 10, 0, 2, 0), shard("odd", 0, 10, 2, 8, 0)),
                layout("empty", shard("empty", 0, 10, 0, 8, 0), shard("empty", 3, 3, 0, 8, 1)),
                layout("bare"),
                layout("double", shard("double", 0, 10, 0, 8, 0)),
                layout("double", shard("double", 0, 10, 0, 8, 1)),
                layout("stray", shard("other", 0, 10, 0, 8, 0)),
            ),
        )
    expected = [
        "table 'double' comes 2 times. Names must be unique in a plan",
        "table 'gaps': rows 0:2, columns 0:8 are on no rank. Add a shard for them",
        "table 'gaps': rows 5:6, columns 0:8 are on no rank. Add a shard for them",
        "table 'twice': rows 0:10, columns 4:8 are in two shards "
        "(twice[0:10, 0:8] on rank 0; twice[0:10, 4:8] on rank 1). Keep one",
        "lost[0:10, 0:8] on rank 2: there is no rank 2. The plan is for ranks 0 to 1, move the shard to one of them",
        "odd[0:10, 0:2] on rank 0: the kernels take columns that are cut at multiples of 4: move the column boundary",
        "odd[0:10, 2:8] on rank 0: the kernels take columns that are cut at multiples of 4: move the column boundary",
        "empty[3:3, 0:8] on rank 1: rows must be a non-empty part of [0, 10); correct the shard, or leave it out",
        "table 'bare' has no shard. Give it to a rank with a cut, or replicate it",
        "table 'stray' holds a shard of table 'other': other[0:10, 0:8] on rank 0. Put it into that table's layout",
    ]
    assert list(caught.value.faults) == expected
    message = str(caught.value)
    assert message.startswith("the sharding plan has 10 faults:")
    assert all(f"{number}. {fault}" in message for number, fault in enumerate(expected, 1))


def test_plan_error_survives_pickling() -> None:
    """Ranks send their errors to each other and to launchers."""
    error = PlanError(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.faults, str(again)) == (PlanError, error.faults, str(error))


def test_check_tables() -> None:
    shapes = {"ads": (10, 8), "users": (6, 16), "days": (7, 4)}
    PLAN.check_tables(shapes)
    PLAN.check_tables({"users": (6, 16)}, partial=True)
    with pytest.raises(PlanError) as caught:
        PLAN.check_tables({"ads": (10, 16), "users": (6, 16), "shops": (3, 4)})
    assert list(caught.value.faults) == [
        "table 'ads' is (10, 16) in the model and (10, 8) in the plan. Plan the model again",
        "the plan has no table 'shops'. Plan the model again, or add a layout for it",
        "the plan has a table 'days' that the model lacks. Its tables are 'ads', 'users', 'shops'",
    ]
    with pytest.raises(PlanError, match="Its tables are none"):
        PLAN.check_tables({})


# ----------------------------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a sharding plan"),
        ("17", "not a sharding plan"),
        ("null", "not a sharding plan"),
        ("{}", r"not a sharding plan: KeyError 'format'"),
        ('{"format": 2}', r"format 2 and this release reads format 1. Plan again"),
        ('{"format": "1"}', r"format '1' and this release reads format 1"),
        (
            '{"format": 1, "topology": {"hosts": 1, "ranks_per_host": 0}, "tables": []}',
            "at least one host and one rank",
        ),
        (
            '{"format": 1, "topology": {"hosts": 1.5, "ranks_per_host": 2}, "tables": []}',
            "hosts is 1.5. Give a whole number",
        ),
        (
            '{"format": 1, "topology": {"hosts": true, "ranks_per_host": 2}, "tables": []}',
            "hosts is True. Give a whole number",
        ),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=fault) as caught:
        ShardingPlan.load(path)
    assert str(path) in str(caught.value)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.pt"
    path.write_bytes(b"PK\x03\x04\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"plan\.pt: not JSON"):
        ShardingPlan.load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        ShardingPlan.load(tmp_path / "absent.json")


def test_a_faulty_file_names_itself_at_each_fault(tmp_path: Path) -> None:
    data = PLAN.to_json()
    data["tables"][0]["shards"].pop()
    data["tables"][1]["shards"][0][4] = 9
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        ShardingPlan.load(path)
    assert len(caught.value.faults) == 2
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)


def nodes(data: Any) -> list[tuple[Any, Any]]:
    """Each container of a JSON value with each of its keys or indices."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in entries for found in [(data, key), *nodes(value)]]


JUNK: list[Any] = [None, True, -1, 0, 3, 1.5, 10**30, "", "many", [], {}, [[1, 2]], {"a": 1}]


@given(where=st.integers(0, 10**6), junk=st.sampled_from(JUNK), change=st.sampled_from(["set", "drop", "repeat"]))
def test_any_damage_is_a_plan_error_or_another_sound_plan(where: int, junk: Any, change: str) -> None:
    data = copy.deepcopy(PLAN.to_json())
    places = nodes(data)
    container, key = places[where % len(places)]
    if change == "set":
        container[key] = copy.deepcopy(junk)
    elif change == "drop":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    try:
        plan = ShardingPlan.from_json(data)
    except PlanError as error:
        assert error.faults
    else:
        assert plan.to_json() == data, "what was read is not what was written"


# -------------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize("world_size", [1, 2, 12])
def test_explain_shows_each_table(world_size: int) -> None:
    topology = Topology(ranks_per_host=world_size)
    plan = ShardingPlan(
        topology=topology,
        tables=(
            cuts.row_wise("clicks", 4000, 64, ranks=range(world_size)),
            cuts.data_parallel("weekdays", 7, 4),
            cuts.table_wise("shops", 500, 16, rank=world_size - 1),
        ),
    )
    text = io.StringIO()
    Console(file=text, width=140).print(explain(plan))
    shown = text.getvalue()
    for word in ("clicks", "4,000", "64", "row-wise", "weekdays", "data-parallel", "all", "shops", "table-wise"):
        assert word in shown
    assert f"3 tables on {world_size} rank" in shown
    assert "embedding MiB per rank" in shown


def test_frozen() -> None:
    change: Callable[..., None] = object.__getattribute__(PLAN, "__setattr__")
    with pytest.raises(AttributeError):
        change("tables", ())


# ----------------------------------------------------------------------------------------------------------- diff


@given(rng=randoms())
def test_a_diff_says_what_ranks_have_to_receive(rng: Random) -> None:
    """Counted weight by weight: what a rank holds in the new plan and did not hold in the old one."""
    topology = random_topology(rng)
    tables = random_tables(rng)
    old, new = (random_plan(rng, tables, topology) for _ in range(2))
    changes = {change.name: change for change in old.diff(new)}
    for table in new.tables:
        before = old.by_name[table.name]
        moved = sum(len(_held(table, rank) - _held(before, rank)) for rank in range(topology.world_size))
        if table.name in changes:
            assert changes[table.name].moved_numel == moved
        else:
            assert moved == 0
    assert old.diff(old) == ()


def _held(layout: TableLayout, rank: int) -> set[tuple[int, int]]:
    """The (row, column) of each weight that a rank holds."""
    if layout.replicated:
        return {(row, col) for row in range(layout.num_embeddings) for col in range(layout.embedding_dim)}
    return {
        (row, col)
        for shard in layout.on_rank(rank)
        for row in range(shard.row_start, shard.row_end)
        for col in range(shard.col_start, shard.col_end)
    }


def test_a_diff_names_tables_that_come_and_go() -> None:
    topology = Topology(ranks_per_host=2)

    def plan(*tables: TableLayout) -> ShardingPlan:
        return ShardingPlan(topology=topology, tables=tables)

    kept, gone, added = (cuts.table_wise(name, 10, 8, rank=0) for name in ("kept", "gone", "added"))
    changes = plan(kept, gone).diff(plan(added, kept))
    assert [(change.name, change.old, change.new) for change in changes] == [
        ("added", None, added),
        ("gone", gone, None),
    ]
    with pytest.raises(PlanError, match=r"'kept' is .10, 8. in one plan and .20, 8. in the other"):
        plan(kept).diff(plan(cuts.table_wise("kept", 20, 8, rank=0)))
    with pytest.raises(PlanError, match="for 2 and 1 ranks"):
        plan(kept).diff(ShardingPlan(topology=Topology(ranks_per_host=1), tables=(kept,)))
