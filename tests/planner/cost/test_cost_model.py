"""The cost model: what it charges for bytes on links is what the exchange sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given, settings

from benchmarks.harness.volume import CollectionTraffic, header_columns, step_volume, uniform_traffic
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.presets import preset
from shardrec.planner import Constraint, TableLoad
from shardrec.planner.cost import CostModel, Histogram, Profile
from shardrec.planner.cut_option import lay_out
from shardrec.planner.cut_options import CandidateMaker
from shardrec.planner.price import predicted_ms, priced_plan
from shardrec.planner.solve.problem import Place
from tests.plans import random_plan, random_topology, randoms

BATCH = 16


def links_only(inside: float, abroad: float) -> Profile:
    """Nanoseconds per byte on the links; nothing else costs anything."""
    profile = Profile.of_machine(preset("h100"))
    free = {each.name: 0.0 for each in fields(Profile) if each.name.endswith(("_ns", "_us"))}
    return replace(profile, **{**free, "exchange_byte_ns": inside, "host_exchange_byte_ns": abroad})


def charged(plan: ShardingPlan, loads: Mapping[str, TableLoad], inside: float, abroad: float) -> float:
    """Bytes: what all ranks together are charged, at a nanosecond a byte."""
    model = CostModel(profile=links_only(inside, abroad), topology=plan.topology, batch_size=BATCH)
    return sum(rank.ms for rank in priced_plan(model, loads, plan)[0]) * 1e6


def sent(plan: ShardingPlan, loads: Mapping[str, TableLoad]) -> tuple[float, float]:
    """Bytes that the formula of the exchange says are sent inside hosts and between them, without the header."""
    world = plan.world_size
    tables = [
        uniform_traffic(
            table,
            [BATCH * loads[table.name].ids_per_sample] * world,
            lookups=loads[table.name].features,
            whole_rows=loads[table.name].whole_row_state,
        )
        for table in plan.tables
    ]
    traffic = CollectionTraffic(tables=tables, batch_sizes=[BATCH] * world)
    volume = step_volume([traffic], plan.topology, columns=header_columns([1]))
    abroad = volume.sent(abroad=True) - volume.sent(exchange="header", abroad=True)
    return volume.sent() - volume.sent(exchange="header") - abroad, abroad


@given(rng=randoms())
def test_bytes_on_links_are_those_that_the_exchange_sends(rng: Random) -> None:
    topology = random_topology(rng)
    loads = {
        f"t{number}": TableLoad(
            num_embeddings=rng.choice([24, 240]), embedding_dim=16, poolings=(2.0,) * rng.randint(1, 2)
        )
        for number in range(rng.randint(1, 3))
    }
    plan = random_plan(rng, {name: (load.num_embeddings, load.embedding_dim) for name, load in loads.items()}, topology)
    inside, abroad = sent(plan, loads)
    assert charged(plan, loads, 1.0, 0.0) == pytest.approx(inside)
    assert charged(plan, loads, 0.0, 1.0) == pytest.approx(abroad)


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (2, 2)])
def test_stripes_tell_each_other_their_norms(hosts: int, per_host: int) -> None:
    topology = Topology(hosts=hosts, ranks_per_host=per_host)
    load = TableLoad(num_embeddings=5000, embedding_dim=16, row_state_bytes=4, whole_row_state=True)
    plan = ShardingPlan(topology=topology, tables=(cuts.column_wise("t", 5000, 16, ranks=range(4)),))
    inside, abroad = sent(plan, {"t": load})
    assert charged(plan, {"t": load}, 1.0, 0.0) == pytest.approx(inside, rel=1e-3)
    assert charged(plan, {"t": load}, 0.0, 1.0) == pytest.approx(abroad, rel=1e-3)


@settings(max_examples=15, deadline=None)
@given(rng=randoms())
def test_every_candidate_costs_what_its_layout_does(rng: Random) -> None:
    """On its best places, a candidate's option puts on each rank what the layout is priced at.

    Of blocks that are nearly alike, it has the load of the least and the bytes of the largest, so that the bound is one
    and the plan fits.
    """
    topology = rng.choice(
        [Topology(ranks_per_host=4), Topology(hosts=3, ranks_per_host=2), Topology(hosts=3, ranks_per_host=6)]
    )
    rows = rng.choice([720, 7200, 1, 5, 40, 1001, 100_003])
    load = TableLoad(
        num_embeddings=rows,
        embedding_dim=rng.choice([16, 64]),
        histogram=Histogram(rows=(0, 31, 90, rows), below=(0.0, 0.3, 0.8, 1.0))
        if rows > 90 and rng.random() < 0.5
        else None,
        poolings=(rng.choice([1.0, 7.0]),),
        pooled=rng.random() < 0.8,
        row_state_bytes=4,
        whole_row_state=rng.random() < 0.5,
    )
    model = CostModel(profile=Profile.of_machine(preset("h100")), topology=topology, batch_size=BATCH)
    for candidate in CandidateMaker(model).candidates("t", load, Constraint()):
        places: list[Place] = []
        for gang in candidate.option.gangs:
            # Patterns of one table on hosts of their own: on one host they would share a sum, which costs less.
            spots = list({place[0] // topology.ranks_per_host: place for place in gang.places}.values())
            if len(gang.items) == 1 or gang.count > len(spots):
                spots = list(gang.places)
            places += [spots[number % len(spots)] for number in range(len(places), len(places) + gang.count)]
        loads = [candidate.option.everywhere.load] * topology.world_size
        memory = [candidate.option.everywhere.memory[0]] * topology.world_size
        spot = iter(places)
        for gang in candidate.option.gangs:
            for _ in range(gang.count):
                for rank, item in zip(next(spot), gang.items, strict=True):
                    loads[rank] += item.load
                    memory[rank] += item.memory[0]
        layout = lay_out("t", load, candidate, places, topology.world_size)
        plan = ShardingPlan(topology=topology, tables=(layout,))
        ranks, _ = priced_plan(model, {"t": load}, plan)
        assert [rank.ms for rank in ranks] == pytest.approx(loads, rel=1e-3), candidate.option.label
        assert [rank.bytes for rank in ranks] == pytest.approx(memory, rel=1e-3), candidate.option.label
        for rank, least, most in zip(ranks, loads, memory, strict=True):
            assert rank.ms >= least * (1 - 1e-9), candidate.option.label
            assert rank.bytes <= most * (1 + 1e-9), candidate.option.label


def test_a_step_pays_for_the_collectives_it_makes() -> None:
    profile = replace(links_only(0.0, 0.0), forward_us=600.0, backward_us=400.0, exchange_us=100.0)
    topology = Topology(ranks_per_host=2)
    model = CostModel(profile=profile, topology=topology, batch_size=BATCH)
    loads = {"t": TableLoad(num_embeddings=10, embedding_dim=8, row_state_bytes=4, whole_row_state=True)}
    for layout, took in (
        (cuts.table_wise("t", 10, 8, rank=0), 1.4),
        (cuts.row_wise("t", 10, 8, ranks=range(2)), 1.4),
        (cuts.column_wise("t", 10, 8, ranks=range(2)), 1.5),  # mean squares of whole rows
        (cuts.data_parallel("t", 10, 8), 1.5),
    ):
        plan = ShardingPlan(topology=topology, tables=(layout,))
        assert predicted_ms(model, loads, plan) == pytest.approx(took)
    alone = CostModel(profile=profile, topology=Topology(), batch_size=BATCH)
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", 10, 8, rank=0),))
    assert predicted_ms(alone, loads, plan) == pytest.approx(1.0)


def test_16_bit_rows_pay_for_decoding() -> None:
    profile = replace(links_only(0.0, 0.0), decode_ns=2.0)
    model = CostModel(profile=profile, topology=Topology(), batch_size=BATCH)
    whole = TableLoad(num_embeddings=1000, embedding_dim=8)
    half = replace(whole, weight_bytes=2)
    charges = [model.shard(load, rows=1000, cols=8, share=1.0).ms * 1e6 for load in (whole, half)]
    assert charges == [0.0, pytest.approx(2.0 * (8 * half.distinct(BATCH) + 2 * BATCH))]


def test_a_table_without_an_optimizer_in_backward_holds_a_gradient_of_its_size() -> None:
    model = CostModel(profile=links_only(0.0, 0.0), topology=Topology(), batch_size=BATCH)
    fused = TableLoad(num_embeddings=1000, embedding_dim=8, state_bytes=4)
    held = [model.shard(load, rows=1000, cols=8, share=1.0).bytes for load in (fused, replace(fused, fused=False))]
    assert held[1] - held[0] == 1000 * 8 * 4
