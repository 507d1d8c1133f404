"""How many hot rows, and which: by frequency, by the costs, and as asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.presets import preset
from shardrec.planner import Constraint, TableLoad, plan_tables
from shardrec.planner.cost import CostModel, Frequencies, Growth, Histogram, Profile
from shardrec.planner.cost.frequencies import apart
from shardrec.planner.price import predicted_ms

ROWS, BATCH = 10_000, 1024
TWO = Topology(hosts=2, ranks_per_host=1, machine=preset("cpu"))


def zipf_table(*, pooled: bool, exponent: float = 1.2, pooling: float = 8.0) -> TableLoad:
    rng = np.random.default_rng(0)
    weights = np.arange(1, ROWS + 1) ** -exponent
    ids = rng.permutation(ROWS)[rng.choice(ROWS, 100_000, p=weights / weights.sum())]
    distinct = [len(np.unique(ids[:count])) for count in (8192, 100_000)]
    power = float(np.log(distinct[1] / distinct[0]) / np.log(100_000 / 8192))
    return TableLoad(
        num_embeddings=ROWS,
        embedding_dim=64,
        poolings=(pooling,),
        pooled=pooled,
        growth=Growth(scale=distinct[1] / 100_000**power, power=power),
        histogram=Histogram.of_ids(ids, ROWS),
        frequencies=Frequencies.of_ids(ids, ROWS),
    )


def test_the_rows_that_come_most() -> None:
    found = Frequencies.of_ids(np.array([5, 3, 3, 9, 9, 9, 7, 7, 12, -1]), 12)
    assert found.rows.tolist() == [9, 3, 7, 5] and found.counts.tolist() == [3, 2, 2, 1]
    assert [found.hottest(count) for count in (0, 1, 2, 9)] == [(), (9,), (3, 9), (3, 7, 9)]
    assert found.share_of([3, 4, 9]).tolist() == [0.25, 0.0, 0.375]
    assert found.without([9]).rows.tolist() == [3, 7, 5]


@pytest.mark.parametrize("pooled", [True, False])
def test_two_tables_of_one(pooled: bool) -> None:
    """All the ids are in one or in the other; of distinct ones, as many as come."""
    table, ids = zipf_table(pooled=pooled), 8.0 * BATCH
    assert table.frequencies is not None
    for count in (1, 64, 1024):
        hot_rows = table.frequencies.hottest(count)
        others, copies = apart(table, hot_rows, ids)
        share = float(table.frequencies.share_of(hot_rows).sum())
        assert others.ids_per_sample == pytest.approx(table.ids_per_sample * (1 - share))
        assert copies.num_embeddings == len(hot_rows)
        hit = float((1 - (1 - table.frequencies.share_of(hot_rows)) ** ids).sum())
        assert others.distinct(ids * (1 - share)) == pytest.approx(table.distinct(ids) - hit, rel=0.01)
        wanted = share * table.ids_per_sample if pooled else hit / BATCH
        assert copies.ids_per_sample == pytest.approx(wanted)
    everything, _ = apart(replace(table, frequencies=None, histogram=None), range(ROWS), ids)
    assert 0 < everything.ids_per_sample < 1e-4


def test_auto_is_never_worse_and_says_what_it_costs() -> None:
    """Long bags gain. Bags of one id do not, nor do rows for each distinct id, which travel once as they are."""
    for table, gains in (
        (zipf_table(pooled=True, pooling=100.0), True),
        (zipf_table(pooled=True, pooling=1.0), False),
        (zipf_table(pooled=False), False),
    ):
        options = {"batch_size": BATCH}
        limit = Constraint(cuts=("row_wise",))
        plain = plan_tables({"t": table}, TWO, constraints={"t": limit}, **options)  # type: ignore[arg-type]
        auto = plan_tables({"t": table}, TWO, constraints={"t": replace(limit, hot_rows="auto")}, **options)  # type: ignore[arg-type]
        assert plain.report is not None and auto.report is not None
        assert not plain.by_name["t"].hot_rows
        assert bool(auto.by_name["t"].hot_rows) == gains
        assert auto.report.cost_ms <= plain.report.cost_ms * 1.005
        assert (auto.report.cost_ms < 0.97 * plain.report.cost_ms) == gains
        assert auto.report.bound_ms <= auto.report.cost_ms
        assert ("hot rows" in auto.report.tables[0].cut) == gains


def test_sequences_that_send_all_ids_gain_by_hot_rows() -> None:
    """They save a row for each id. The price is that of what is sent: rows for all ids, or for distinct ones."""
    distinct = zipf_table(pooled=False)
    every = replace(distinct, dedup=False)
    limit = Constraint(cuts=("row_wise",), hot_rows="auto")
    plans = {
        table.dedup: plan_tables({"t": table}, TWO, constraints={"t": limit}, batch_size=BATCH)
        for table in (distinct, every)
    }
    assert plans[False].by_name["t"].hot_rows and not plans[True].by_name["t"].hot_rows
    model = CostModel(profile=Profile.of_machine(preset("cpu")), topology=TWO, batch_size=BATCH)
    whole = {"rows": ROWS, "cols": 64, "share": 1.0}
    sent = [model.shard(table, **whole).times[2] for table in (distinct, every)]
    assert sent[1] / sent[0] == pytest.approx(8 * BATCH / distinct.distinct(8 * BATCH))
    assert every.frequencies is not None
    hot_rows = every.frequencies.hottest(64)
    share = float(every.frequencies.share_of(hot_rows).sum())
    others, copies = apart(every, hot_rows, 8.0 * BATCH)
    assert copies.ids_per_sample == pytest.approx(8 * share)
    assert model.shard(others, **whole).times[2] == pytest.approx((1 - share) * sent[1])


@pytest.mark.parametrize("dear", ["cut_id_ns", "replica_byte_ns", "replica_out_byte_ns", "reduce_byte_ns", "shard_us"])
def test_auto_goes_by_what_hot_rows_cost(dear: str) -> None:
    """Ids told apart, sums added, a dense gradient, its all-reduce, a lookup: where one is dear, there are none."""
    profile, table = Profile.of_machine(preset("cpu")), zipf_table(pooled=True, pooling=100.0)
    limit = {"t": Constraint(cuts=("row_wise",), hot_rows="auto")}
    cheap, none = (
        plan_tables({"t": table}, TWO, constraints=limit, batch_size=BATCH, profile=profile.scaled(**{dear: factor}))
        for factor in (1.0, 200.0)
    )
    assert cheap.by_name["t"].hot_rows and not none.by_name["t"].hot_rows


def test_a_number_is_what_one_gets() -> None:
    table = zipf_table(pooled=True, pooling=1.0)
    found = plan_tables({"t": table, "u": table}, TWO, constraints={"t": Constraint(hot_rows=100)})
    assert table.frequencies is not None
    assert found.by_name["t"].hot_rows == table.frequencies.hottest(100)
    assert not found.by_name["t"].replicated and not found.by_name["u"].hot_rows
    pinned = plan_tables({"t": table}, TWO, constraints={"t": Constraint(pinned=found.by_name["t"])})
    assert pinned.by_name["t"] == found.by_name["t"]


def test_more_hot_rows_take_more_off_the_owner() -> None:
    """Of a table on one rank, in a profile where nothing but lookups costs."""
    table = zipf_table(pooled=True)
    profile = Profile.of_machine(preset("cpu"))
    layout = cuts.table_wise("t", ROWS, 64, rank=0)
    model = CostModel(profile=profile, topology=TWO, batch_size=BATCH)
    assert table.frequencies is not None
    shares = [model.with_hot_rows(table, table.frequencies.hottest(count))[0].ids_per_sample for count in (1, 16, 256)]
    assert shares == sorted(shares, reverse=True)
    plan = ShardingPlan(topology=TWO, tables=(layout,))
    assert predicted_ms(model, {"t": table}, plan.with_hot_rows({"t": range(3)})) > 0


def test_what_cannot_be_is_said() -> None:
    table = zipf_table(pooled=True)
    for hot_rows in (-1, "many"):
        with pytest.raises(ConfigError, match="give a number of rows, at least 0, or 'auto'"):
            Constraint(hot_rows=hot_rows)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"table 't' is to have hot rows and nothing tells .* sample_batches"):
        plan_tables({"t": replace(table, frequencies=None)}, TWO, constraints={"t": Constraint(hot_rows="auto")})
    with pytest.raises(ConfigError, match=r"table 't' .* optimizer in backward .* and has none"):
        plan_tables({"t": replace(table, fused=False)}, TWO, constraints={"t": Constraint(hot_rows=4)})
    found = plan_tables({"t": replace(table, fused=False)}, TWO, constraints={"t": Constraint(hot_rows="auto")})
    assert not found.by_name["t"].hot_rows


def test_the_page_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hot_rows.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    torch.manual_seed(0)
    exec(block, {})
