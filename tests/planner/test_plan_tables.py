"""Plans of tables: all covered, within memory and constraints, the same every time, and proven by a bound."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import COLUMN_UNIT, Machine, Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.layout.presets import preset
from shardrec.planner import Constraint, SolveLimits, TableLoad, plan_tables
from shardrec.planner.constraint import CUTS
from shardrec.planner.cost import CostModel, Histogram, Profile
from shardrec.planner.cut_option import Candidate, lay_out
from shardrec.planner.make_plan import best_plan
from shardrec.planner.planner import Planner
from shardrec.planner.price import priced_plan
from shardrec.planner.solve.problem import Place
from tests.plans import random_plan, random_topology, randoms

QUICK = SolveLimits(gap=0.05, effort=3)


def machine(memory: float = inf) -> Machine:
    return Machine(
        name="test", kind="cpu", host_memory=memory, memory_bandwidth=1e10, host_link=1e9, network=5e8, latency=1e-4
    )


def random_loads(rng: Random, most: int = 5) -> dict[str, TableLoad]:
    return {
        f"t{number}": TableLoad(
            num_embeddings=rows,
            embedding_dim=COLUMN_UNIT * rng.choice([1, 2, 8, 32]),
            poolings=tuple(rng.choice([1.0, 5.0]) for _ in range(rng.randint(1, 3))),
            histogram=random_histogram(rng, rows),
            pooled=rng.random() < 0.8,
            row_state_bytes=4,
            whole_row_state=rng.random() < 0.5,
        )
        for number, rows in enumerate(rng.choices([1, 3, 50, 1000, 10**6], k=rng.randint(1, most)))
    }


def random_histogram(rng: Random, rows: int) -> Histogram | None:
    if rng.random() < 0.7 or rows < 3:
        return None
    return Histogram(rows=(0, rng.randint(1, rows - 1), rows), below=(0.0, rng.random(), 1.0))


def random_constraints(rng: Random, names: list[str], topology: Topology) -> dict[str, Constraint]:
    found = {}
    for name in rng.sample(names, rng.randint(0, len(names))):
        chosen = tuple(rng.sample(CUTS, rng.randint(0, 3)))
        ranks = tuple(rng.sample(range(topology.world_size), rng.randint(0, topology.world_size)))
        ranks = () if set(chosen) == {"data_parallel"} else ranks
        found[name] = Constraint(cuts=chosen, ranks=ranks, min_columns=rng.choice([0, 8]))
    return found


@settings(max_examples=6, deadline=None)
@given(rng=randoms())
def test_covers_every_table_within_the_constraints(rng: Random) -> None:
    loads, topology = random_loads(rng), random_topology(rng, most_ranks=6)
    constraints = random_constraints(rng, sorted(loads), topology)
    try:
        plan = plan_tables(loads, topology, batch_size=64, constraints=constraints, limits=QUICK)
    except ConfigError as error:
        named = re.search(r"table '(\w+)'", str(error))
        assert named is not None
        limit = constraints[named.group(1)]
        host_bound = {"table_row_wise", "table_column_wise", "grid", "data_parallel"}
        assert limit.ranks, error
        assert set(limit.cuts) <= host_bound, error
        return
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in plan.tables] == [
        (name, load.num_embeddings, load.embedding_dim) for name, load in loads.items()
    ]
    report = plan.report
    assert report is not None
    assert report.bound_ms <= report.cost_ms
    assert report.cost_ms == pytest.approx(max(report.rank_ms))
    assert [each.name for each in report.tables] == list(loads)
    for name, limit in constraints.items():
        layout = plan.by_name[name]
        if limit.cuts:
            assert layout.cut in limit.cuts
        if limit.ranks:
            assert set(layout.ranks) <= set(limit.ranks)
            assert not layout.replicated
        if limit.min_columns and layout.cut == "column_wise" and len(layout.stripes()) > 1:
            assert min(shard.cols for shard in layout.shards) >= limit.min_columns


def test_what_a_constraint_leaves_on_one_rank_is_taken() -> None:
    loads = {"t": next(iter(random_loads(Random(0)).values()))}
    limit = Constraint(cuts=("grid", "data_parallel"))
    plan = plan_tables(loads, Topology(), batch_size=64, constraints={"t": limit}, limits=QUICK)
    assert plan.by_name["t"].replicated


@settings(max_examples=4, deadline=None)
@given(rng=randoms())
def test_no_plan_by_hand_beats_the_bound(rng: Random) -> None:
    """Tables each by any cut that the planner knows, on ranks by chance, together cost at least the bound."""
    loads, topology = random_loads(rng, most=3), random_topology(rng, most_ranks=4)
    planner = Planner(loads, topology, batch_size=rng.choice([8, 256]))
    plan = best_plan(planner, SolveLimits(gap=1e-3, effort=3))
    assert plan.report is not None
    draw = np.random.default_rng(rng.randrange(2**32))
    on_ranks = [
        np.array([_rank_loads(planner, name, candidate, draw) for candidate in planner.candidates[name]])
        for name in loads
    ]
    costs = sum(options[draw.integers(len(options), size=5000)] for options in on_ranks)
    assert np.max(costs, axis=1).min() >= plan.report.bound_ms * (1 - 1e-9)


def _rank_loads(planner: Planner, name: str, candidate: Candidate, draw: np.random.Generator) -> list[float]:
    """(R,) what a table costs, its gangs anywhere, but those of several items on hosts of their own."""
    spots: list[Place] = []
    for gang in candidate.option.gangs:
        for _ in range(gang.count):
            taken = {rank for place in spots for rank in place} if len(gang.items) > 1 else set()
            places = [place for place in gang.places if taken.isdisjoint(place)] or gang.places
            spots.append(places[draw.integers(len(places))])
    layout = lay_out(name, planner.tables[name], candidate, spots, planner.topology.world_size)
    ranks, _ = priced_plan(planner.model, planner.tables, ShardingPlan(topology=planner.topology, tables=(layout,)))
    return [rank.ms for rank in ranks]


def test_an_option_of_a_thousand_times_the_cost_leaves_the_bound_exact() -> None:
    """Copies of the large table cost 1,700 ms: beside these HiGHS' tolerances were a thousandth of a good plan."""
    loads = {
        "large": TableLoad(num_embeddings=10**6, embedding_dim=128, poolings=(1.0, 5.0, 5.0), row_state_bytes=4),
        "tiny": TableLoad(num_embeddings=3, embedding_dim=4, poolings=(5.0, 1.0), pooled=False, row_state_bytes=4),
    }
    planner = Planner(loads, Topology(hosts=2, ranks_per_host=2), batch_size=256, device="cpu")
    large = cuts.column_wise("large", 10**6, 128, ranks=range(4))
    tiny = cuts.row_wise("tiny", 3, 4, ranks=range(1, 4))
    by_hand = ShardingPlan(topology=planner.topology, tables=(large, tiny))
    ranks, _ = priced_plan(planner.model, loads, by_hand)
    report = best_plan(planner, SolveLimits(gap=1e-3, effort=3)).report
    assert report is not None
    assert report.bound_ms <= max(rank.ms for rank in ranks)
    assert report.cost_ms == pytest.approx(max(rank.ms for rank in ranks), rel=1e-5)


def test_the_bound_knows_the_smaller_of_uneven_blocks() -> None:
    """Three rows on two ranks: the rank with one of them has time for another table."""
    loads = {"uneven": TableLoad(num_embeddings=3, embedding_dim=4, poolings=(100.0,))}
    blocks = Planner(loads, Topology(ranks_per_host=2), batch_size=256).candidates["uneven"]
    for candidate in (each for each in blocks if len(each.edges) == 3):
        small, large = sorted(item.load for gang in candidate.option.gangs for item in gang.items)
        assert small < 0.7 * large


@settings(max_examples=6, deadline=None)
@given(rng=randoms())
def test_is_a_function_of_its_arguments(rng: Random) -> None:
    loads, topology = random_loads(rng), random_topology(rng, most_ranks=4)
    plan = plan_tables(loads, topology, batch_size=64, limits=QUICK)
    assert plan_tables(dict(loads), topology, batch_size=64, limits=QUICK).fingerprint == plan.fingerprint
    turned = plan_tables(dict(reversed(loads.items())), topology, batch_size=64, limits=QUICK)
    assert turned.by_name == plan.by_name, "the order of the tables does not matter"


@settings(max_examples=3, deadline=None)
@given(rng=randoms())
def test_fits_memory_or_says_what_would_do(rng: Random) -> None:
    loads, topology = random_loads(rng), random_topology(rng, most_ranks=4)
    limit = rng.choice([1e5, 1e7, 5e8])
    held = Topology(hosts=topology.hosts, ranks_per_host=topology.ranks_per_host, machine=machine(limit))
    try:
        plan = plan_tables(loads, held, batch_size=16, limits=QUICK)
    except PlanError as error:
        assert "do not fit" in error.faults[0]
        assert any("on each rank" in remedy for remedy in error.remedies)
        return
    assert plan.report is not None
    assert max(plan.report.rank_bytes) <= limit * (1 + 1e-6)


@settings(max_examples=5, deadline=None)
@given(rng=randoms())
def test_ranks_of_different_memory_stay_within_it(rng: Random) -> None:
    loads, ranks = random_loads(rng), rng.randint(2, 4)
    memory = tuple(rng.choice([1e6, 1e8, 5e8]) for _ in range(ranks))
    topology = Topology(ranks_per_host=ranks, machine=machine(), rank_memory=memory)
    try:
        plan = plan_tables(loads, topology, batch_size=16, limits=QUICK)
    except PlanError as error:
        assert "do not fit" in error.faults[0]
        return
    assert plan.report is not None
    assert all(held <= most * (1 + 1e-6) for held, most in zip(plan.report.rank_bytes, memory, strict=True))
    assert set(plan.by_name) == set(loads)
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_the_larger_rank_takes_what_the_smaller_cannot() -> None:
    loads = {name: TableLoad(num_embeddings=10**6, embedding_dim=16) for name in ("a", "b", "c")}
    only = {"*": Constraint(cuts=("table_wise",))}
    topology = Topology(ranks_per_host=2, machine=machine(), rank_memory=(70e6, 150e6))
    plan = plan_tables(loads, topology, batch_size=1, constraints=only)
    assert sorted(table.shards[0].rank for table in plan.tables) == [0, 1, 1]
    with pytest.raises(PlanError, match=r"2 ranks of up to 0\.07 GiB have 0\.13 GiB"):
        plan_tables(loads, replace(topology, rank_memory=(70e6, 72e6)), batch_size=1, constraints=only)


@pytest.mark.parametrize("rows", [1000, 1001, 1023])
def test_row_blocks_on_all_hosts_are_priced_as_they_are_laid_out(rows: int) -> None:
    loads = {"t": TableLoad(num_embeddings=rows, embedding_dim=16, poolings=(3.0, 2.0), row_state_bytes=4)}
    topology = Topology(hosts=3, ranks_per_host=2)
    options = Planner(loads, topology, batch_size=64, constraints={"t": Constraint(cuts=("row_wise",))}).candidates["t"]
    whole = next(each for each in options if each.on_all)
    layout = lay_out("t", loads["t"], whole, (), 6)
    model = CostModel(profile=Profile.of_machine(preset("cpu")), topology=topology, batch_size=64)
    ranks, _ = priced_plan(model, loads, ShardingPlan(topology=topology, tables=(layout,)))
    assert min(rank.ms for rank in ranks) == pytest.approx(whole.option.everywhere.load)
    assert max(rank.bytes for rank in ranks) == pytest.approx(whole.option.everywhere.memory[0])


def test_of_thousands_of_tables_none_is_cut_into_the_smallest_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrec.planner.planner._MANY", 3)
    loads = {f"t{n}": TableLoad(num_embeddings=10**4 * (n + 1), embedding_dim=128) for n in range(40)}
    loads["large"] = TableLoad(num_embeddings=10**8, embedding_dim=128, poolings=(40.0,))
    planner = Planner(loads, Topology(ranks_per_host=8), batch_size=64)
    shards = {
        name: max(len(each.widths) * (len(each.edges) - 1) for each in candidates)
        for name, candidates in planner.candidates.items()
    }
    assert shards["large"] >= 8
    assert 1 <= shards["t0"] < 8
    plan = best_plan(planner, QUICK)
    assert plan.report is not None
    assert plan.report.gap < 0.1


def test_one_rank_holds_everything() -> None:
    plan = plan_tables({"a": TableLoad(num_embeddings=9, embedding_dim=8)}, Topology(), batch_size=4)
    assert plan.by_name["a"].cut == "table_wise"


def test_a_huge_table_is_cut_and_every_table_has_a_reason() -> None:
    loads = {
        "weekday": TableLoad(num_embeddings=7, embedding_dim=8),
        "user": TableLoad(num_embeddings=10**7, embedding_dim=64, poolings=(10.0,)),
        "city": TableLoad(num_embeddings=10**5, embedding_dim=64),
    }
    plan = plan_tables(loads, Topology(ranks_per_host=4, machine=machine(1.5e9)), batch_size=4096)
    assert len(plan.by_name["user"].ranks) > 1
    assert plan.report is not None
    reasons = {each.name: each.reason for each in plan.report.tables}
    assert all(reasons.values())


def test_equal_tables_are_spread_evenly() -> None:
    loads = {f"t{number}": TableLoad(num_embeddings=10**6, embedding_dim=64) for number in range(12)}
    plan = plan_tables(loads, Topology(hosts=2, ranks_per_host=2), batch_size=64)
    assert {plan.local_numel(rank) for rank in range(4)} == {3 * 64 * 10**6}


def test_what_does_not_fit_is_named_with_what_would_do() -> None:
    loads = {
        "big": TableLoad(num_embeddings=10**6, embedding_dim=64),
        "small": TableLoad(num_embeddings=5, embedding_dim=4),
    }
    topology = Topology(ranks_per_host=2, machine=machine(100e6))
    with pytest.raises(PlanError) as caught:
        plan_tables(loads, topology, batch_size=1)
    text = str(caught.value)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.remedies) == (text, caught.value.remedies)
    assert "'big' (0.24 GiB)" in text
    needed = re.search(r"- ([\d.]+) GiB on each rank", text)
    assert needed is not None
    enough = Topology(ranks_per_host=2, machine=machine(float(needed.group(1)) * 2**30))
    assert plan_tables(loads, enough, batch_size=1).by_name["big"].cut != "table_wise"
    ranks = re.search(r"- (\d+) ranks of ", text)
    assert ranks is not None
    plan_tables(loads, Topology(ranks_per_host=int(ranks.group(1)), machine=machine(100e6)), batch_size=1)


def test_the_constraint_to_relax_is_named() -> None:
    loads = {name: TableLoad(num_embeddings=10**6, embedding_dim=16) for name in ("a", "b")}
    limits = {"a": Constraint(cuts=("table_wise",)), "b": Constraint(ranks=(0, 1))}
    with pytest.raises(PlanError) as caught:
        plan_tables(loads, Topology(ranks_per_host=2, machine=machine(50e6)), batch_size=1, constraints=limits)
    assert "table 'a': its smallest shard takes" in str(caught.value)
    assert "allow row_wise" in str(caught.value)
    with pytest.raises(PlanError, match="- no constraint on 'a'"):
        plan_tables(
            loads,
            Topology(ranks_per_host=2, machine=machine(73e6)),
            batch_size=1,
            constraints={"a": Constraint(cuts=("data_parallel",))},
        )


def test_pinned_shards_stay() -> None:
    loads = {name: TableLoad(num_embeddings=1000, embedding_dim=16) for name in ("a", "b")}
    shards = (
        Shard(table="a", row_start=0, row_end=100, col_start=0, col_end=16, rank=2),
        Shard(table="a", row_start=100, row_end=1000, col_start=0, col_end=16, rank=0),
    )
    pinned = TableLayout(name="a", num_embeddings=1000, embedding_dim=16, shards=shards, cut="mine")
    plan = plan_tables(loads, Topology(ranks_per_host=3), batch_size=64, constraints={"a": Constraint(pinned=pinned)})
    assert plan.by_name["a"] == pinned
    with pytest.raises(ConfigError, match=r"is \(1000, 16\) and is pinned to a layout of \(1000, 8\)"):
        wrong = cuts.table_wise("a", 1000, 8, rank=0)
        plan_tables(loads, Topology(), batch_size=64, constraints={"a": Constraint(pinned=wrong)})
    with pytest.raises(ConfigError, match="a pinned table is laid out already"):
        Constraint(pinned=pinned, ranks=(1,))


@pytest.mark.parametrize("hosts", [1, 2])
def test_frequent_rows_make_shorter_blocks(hosts: int) -> None:
    """Nine tenths of the ids are in the first hundredth of the rows: blocks of equal rows would be unequal work."""
    topology = Topology(hosts=hosts, ranks_per_host=4)
    hot = Histogram(rows=(0, 10_000, 10**6), below=(0.0, 0.9, 1.0))
    limit = {"t": Constraint(cuts=("row_wise",))}

    def planned(histogram: Histogram | None) -> tuple[TableLayout, float]:
        loads = {
            "t": TableLoad(num_embeddings=10**6, embedding_dim=64, poolings=(50.0,), histogram=histogram),
            "u": TableLoad(num_embeddings=1000, embedding_dim=16),
        }
        found = plan_tables(loads, topology, batch_size=4096, constraints=limit)
        assert found.report is not None
        return found.by_name["t"], found.report.cost_ms

    even, even_ms = planned(None)
    skewed, skewed_ms = planned(hot)
    assert {shard.rows for shard in even.shards} == {10**6 // len(even.shards)}
    shares = [hot.share(shard.row_start, shard.row_end) for shard in skewed.shards]
    assert len(shares) > 1
    assert shares == pytest.approx([1 / len(shares)] * len(shares), abs=0.01)
    assert skewed_ms == pytest.approx(even_ms, rel=0.2)


def test_a_host_cut_needs_all_of_a_host() -> None:
    topology = Topology(hosts=2, ranks_per_host=2)
    loads = {"t": TableLoad(num_embeddings=100, embedding_dim=64)}
    for cut in ("table_row_wise", "table_column_wise"):
        limit = Constraint(cuts=(cut,), ranks=(0, 2, 3))
        assert plan_tables(loads, topology, batch_size=1, constraints={"t": limit}).by_name["t"].ranks == (2, 3)
        with pytest.raises(ConfigError, match=rf"table 't': .* only {cut}, which needs all the ranks of a host"):
            plan_tables(loads, topology, batch_size=1, constraints={"t": Constraint(cuts=(cut,), ranks=(0, 2))})
    grid = plan_tables(loads, topology, batch_size=1, constraints={"t": Constraint(cuts=("grid",))}).by_name["t"]
    assert all(len({shard.rank // 2 for shard in stripe.shards}) == 1 for stripe in grid.stripes())


@pytest.mark.parametrize("cut", ["column_wise", "grid", "table_column_wise"])
def test_a_cut_that_the_width_forbids(cut: str) -> None:
    loads = {"odd": TableLoad(num_embeddings=100, embedding_dim=10)}
    with pytest.raises(ConfigError, match=rf"table 'odd': .* only {cut}, which cannot cut 10 columns"):
        plan_tables(loads, Topology(ranks_per_host=2), batch_size=1, constraints={"odd": Constraint(cuts=(cut,))})
    assert plan_tables(loads, Topology(ranks_per_host=2), batch_size=1).by_name["odd"].embedding_dim == 10


@given(rng=randoms())
@settings(max_examples=10, deadline=None)
def test_any_plan_can_be_priced(rng: Random) -> None:
    loads, topology = random_loads(rng), random_topology(rng)
    shapes = {name: (load.num_embeddings, load.embedding_dim) for name, load in loads.items()}
    plan = random_plan(rng, shapes, topology)
    model = CostModel(profile=Profile.of_machine(preset("h100")), topology=topology, batch_size=32)
    ranks, tables = priced_plan(model, loads, plan)
    assert sum(rank.ms for rank in ranks) == pytest.approx(sum(table.ms for table in tables.values()))
    weights = sum(rank.memory[0] for rank in ranks)
    assert weights == pytest.approx(sum(plan.local_numel(rank) * 4 for rank in range(topology.world_size)))
