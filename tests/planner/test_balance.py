"""The balanced planner: every table once, the same plan every time, within the user's limits."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import COLUMN_UNIT, Topology
from shardrec.planner.balance import TableSize, balanced_plan
from shardrec.planner.constraint import CUTS, Constraint
from tests.plans import random_topology, randoms


def random_sizes(rng: Random) -> dict[str, TableSize]:
    return {
        f"t{number}": TableSize(
            num_embeddings=rng.choice([1, 3, 50, 1000, 10**6]),
            embedding_dim=COLUMN_UNIT * rng.choice([1, 2, 8, 32]),
            features=rng.randint(1, 3),
        )
        for number in range(rng.randint(1, 8))
    }


def random_constraints(rng: Random, names: list[str], topology: Topology) -> dict[str, Constraint]:
    found = {}
    for name in rng.sample(names, rng.randint(0, len(names))):
        cuts = tuple(rng.sample(CUTS, rng.randint(0, 3)))
        ranks = tuple(rng.sample(range(topology.world_size), rng.randint(0, topology.world_size)))
        found[name] = Constraint(cuts=cuts, ranks=() if set(cuts) == {"data_parallel"} else ranks)
    return found


@given(rng=randoms())
def test_covers_every_table_within_the_constraints(rng: Random) -> None:
    sizes, topology = random_sizes(rng), random_topology(rng)
    constraints = random_constraints(rng, sorted(sizes), topology)
    hosts = [set(topology.host_ranks(host)) for host in range(topology.hosts)]
    try:
        plan = balanced_plan(sizes, topology, batch_size=64, constraints=constraints)
    except ConfigError as error:
        assert any(
            limit.ranks
            and set(limit.cuts) <= {"table_row_wise", "table_column_wise", "grid", "data_parallel"}
            and not any(host <= set(limit.ranks) for host in hosts)
            and repr(name) in str(error)
            for name, limit in constraints.items()
        ), error
        return
    assert plan.topology == topology
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in plan.tables] == [
        (name, size.num_embeddings, size.embedding_dim) for name, size in sizes.items()
    ]
    for name, limit in constraints.items():
        layout = plan.by_name[name]
        if limit.cuts:
            assert layout.cut in limit.cuts
        if limit.ranks:
            assert not layout.replicated
            assert set(layout.ranks) <= set(limit.ranks)


@given(rng=randoms())
def test_is_a_function_of_its_arguments(rng: Random) -> None:
    sizes, topology = random_sizes(rng), random_topology(rng)
    plan = balanced_plan(sizes, topology, batch_size=64)
    again = balanced_plan(dict(sizes), topology, batch_size=64)
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    turned = balanced_plan(dict(reversed(sizes.items())), topology, batch_size=64)
    assert turned.by_name == plan.by_name, "the order of the tables does not matter"


@given(rng=randoms())
def test_one_rank_holds_everything(rng: Random) -> None:
    plan = balanced_plan(random_sizes(rng), Topology(), batch_size=64)
    assert {table.cut for table in plan.tables} == {"table_wise"}


def test_small_tables_are_replicated_and_large_ones_cut() -> None:
    sizes = {
        "weekday": TableSize(num_embeddings=7, embedding_dim=8),
        "user": TableSize(num_embeddings=10**7, embedding_dim=64),
        "city": TableSize(num_embeddings=10**4, embedding_dim=64),
    }
    plan = balanced_plan(sizes, Topology(ranks_per_host=4), batch_size=64)
    assert plan.by_name["weekday"].replicated
    assert plan.by_name["user"].ranks == (0, 1, 2, 3)
    assert plan.by_name["city"].cut == "table_wise"


def test_equal_tables_are_spread_evenly() -> None:
    sizes = {f"t{number}": TableSize(num_embeddings=10**4, embedding_dim=64) for number in range(12)}
    plan = balanced_plan(sizes, Topology(hosts=2, ranks_per_host=2), batch_size=64)
    assert {plan.local_numel(rank) for rank in range(4)} == {3 * 64 * 10**4}


def test_a_host_cut_needs_all_of_a_host() -> None:
    topology = Topology(hosts=2, ranks_per_host=2)
    sizes = {"t": TableSize(num_embeddings=100, embedding_dim=64)}
    constraint = Constraint(cuts=("table_row_wise",), ranks=(0, 2, 3))
    plan = balanced_plan(sizes, topology, batch_size=1, constraints={"t": constraint})
    assert plan.by_name["t"].ranks == (2, 3)
    with pytest.raises(ConfigError, match=r"table 't': .* only table_row_wise, which needs all the ranks of a host"):
        balanced_plan(
            sizes, topology, batch_size=1, constraints={"t": Constraint(cuts=("table_row_wise",), ranks=(0, 2))}
        )


def test_a_cut_that_the_width_forbids() -> None:
    sizes = {"odd": TableSize(num_embeddings=100, embedding_dim=10)}
    for cut in ("column_wise", "grid", "table_column_wise"):
        with pytest.raises(ConfigError, match=rf"table 'odd': .* only {cut}, which cannot cut 10 columns"):
            balanced_plan(sizes, Topology(ranks_per_host=2), batch_size=1, constraints={"odd": Constraint(cuts=(cut,))})
    with pytest.raises(PlanError, match="round embedding_dim 10 up to 12"):
        balanced_plan(sizes, Topology(ranks_per_host=2), batch_size=1)


def test_a_constraint_that_leaves_nothing() -> None:
    sizes = {"t": TableSize(num_embeddings=100, embedding_dim=64)}
    with pytest.raises(ConfigError, match="on every rank; leave ranks empty"):
        balanced_plan(
            sizes,
            Topology(ranks_per_host=2),
            batch_size=1,
            constraints={"t": Constraint(cuts=("data_parallel",), ranks=(0,))},
        )
