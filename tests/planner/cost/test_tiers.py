"""Tables in the host's memory: what they cost, how often a cache misses, and when the planner chooses one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.presets import preset
from shardrec.planner import Constraint, CostModel, Profile, TableLoad, plan, plan_tables
from shardrec.planner.describe import sampled_features
from shardrec.planner.price import priced_plan
from shardrec.planner.report.content import content
from tests.models import collection
from tests.plans import randoms

WAYS = 32
GPU = replace(preset("h100"), device_memory=2**28)
BIG = TableLoad(num_embeddings=10**6, embedding_dim=128, row_state_bytes=4, leaves_device=True)
"""512 MB, which is twice the device's memory."""


class Cache:
    """Sets of 32 rows, of which the one that was not used for the longest time makes room, as in fbgemm's kernel: the
    rows of a batch do not drive each other out.

    Args:
        rows: that it has room for.
    """

    def __init__(self, rows: int) -> None:
        self.rows = np.full((rows // WAYS, WAYS), -1, np.int64)
        self.used = np.zeros_like(self.rows)
        self.batches = 0

    def misses(self, ids: NDArray[np.int64]) -> int:
        """Look up a batch; returns how many distinct rows were missing."""
        self.batches += 1
        rows = np.unique(ids)
        sets = _hashed(rows) % len(self.rows)
        hits = self.rows[sets] == rows[:, None]
        found = hits.any(axis=1)
        self.used[sets[found], hits.argmax(axis=1)[found]] = self.batches
        order = np.argsort(sets[~found], kind="stable")
        missing, sets = rows[~found][order], sets[~found][order]
        number = np.arange(len(sets)) - np.searchsorted(sets, sets)  # among those of its set
        placed = number < WAYS
        oldest = np.argsort(self.used, axis=1, kind="stable")
        here, ways = sets[placed], oldest[sets[placed], number[placed]]
        free = self.used[here, ways] < self.batches
        self.rows[here[free], ways[free]] = missing[placed][free]
        self.used[here[free], ways[free]] = self.batches
        return len(missing)


def _hashed(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(33)).astype(np.int64)


def zipf(exponent: float, rows: int, batch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Batches of ids by Zipf's law, in an order of rows that is not that of frequency."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1) ** -exponent
    below, places = np.cumsum(weights) / weights.sum(), rng.permutation(rows)
    while True:
        yield places[np.searchsorted(below, rng.random(batch)).clip(max=rows - 1)]


@settings(max_examples=8)
@given(rng=randoms())
def test_misses_are_those_of_a_cache_of_32_ways(rng: Random) -> None:
    """Within 12% of the batch's distinct rows, if the sample has as many distinct rows as the cache has room for; a
    larger cache is told to miss more than it does."""
    exponent, rows, batch = rng.uniform(0.4, 1.3), rng.choice([5_000, 20_000]), rng.choice([1024, 4096])
    batches = zipf(exponent, rows, batch, rng.randrange(100))
    sample = [next(batches) for _ in range(8)]
    features = [
        KeyedJaggedTensor(["a"], values=torch.from_numpy(ids), lengths=torch.ones(batch, dtype=torch.int32))
        for ids in sample
    ]
    load = TableLoad(num_embeddings=rows, embedding_dim=8, growth=sampled_features(features)["a"].growth)
    distinct, known = np.mean([len(np.unique(ids)) for ids in sample]), len(np.unique(np.concatenate(sample)))
    for part in (0.02, 0.1, 0.3):
        room = -(-int(part * rows) // WAYS) * WAYS
        cache = Cache(room)
        counts = [cache.misses(next(batches)) for _ in range(6 + 3 * rows // batch)]
        measured = np.mean(counts[len(counts) // 2 :])
        expected = load.misses(batch, 1.0, rows, room)
        assert expected >= measured - 0.12 * distinct, (exponent, rows, batch, part)
        if room <= known:
            assert expected <= measured + 0.12 * distinct, (exponent, rows, batch, part)


def test_misses_of_even_ids() -> None:
    load = TableLoad(num_embeddings=1000, embedding_dim=8)
    assert load.misses(100, 1.0, 1000, 1000) == 0
    assert load.misses(0, 0.0, 1000, 10) == 0
    # Nine of ten rows are not in a cache of a tenth of them.
    assert load.misses(100, 1.0, 1000, 100) == pytest.approx(0.9 * load.distinct(100), rel=1e-3)
    # A block of half the rows with half the ids misses half as often.
    assert 2 * load.misses(50, 0.5, 500, 50) == pytest.approx(load.misses(100, 1.0, 1000, 100), rel=1e-3)


def test_memory_and_the_link() -> None:
    topology = Topology(machine=GPU)
    model = CostModel(profile=Profile.of_machine(GPU), topology=topology, batch_size=1000)
    load = replace(BIG, state_bytes=4)

    def priced(**placed: object) -> tuple[float, float, float, float]:
        layout = replace(cuts.table_wise("t", 10**6, 128, rank=0), **placed)  # type: ignore[arg-type]
        (cost,), _ = priced_plan(model, {"t": load}, ShardingPlan(topology=topology, tables=(layout,)))
        return *cost.memory[:2], cost.host_bytes, cost.ms

    weights, states, host, fast = priced()
    assert (weights, states, host) == (512e6, 516e6, 0)
    weights, states, host, slow = priced(tier="cached", load_factor=0.1)
    assert (weights, states, host) == (10**5 * (512 + 16) + 4e6, 4e6, 1024e6)
    _, _, _, slower = priced(tier="host")
    missed, distinct = load.misses(1000, 1.0, 10**6, 10**5), load.distinct(1000)
    byte_ms = model.profile.memory_link_byte_ns * 1e-6
    assert slow - fast == pytest.approx((2 * missed + 2 * distinct) * 512 * byte_ms)
    assert slower - fast == pytest.approx((1000 + 4 * distinct) * 512 * byte_ms)


def test_a_table_that_fits_nowhere_gets_a_cache() -> None:
    loads = {"big": BIG, "small": replace(BIG, num_embeddings=10**4)}
    made = plan_tables(loads, Topology(ranks_per_host=1, machine=GPU), batch_size=256)
    assert (made.by_name["big"].tier, made.by_name["small"].tier) == ("cached", "device")
    assert made.report is not None and made.report.host_bytes == (512e6,)
    assert max(made.report.rank_bytes) <= GPU.device_memory
    assert ShardingPlan.from_json(made.to_json()) == made
    shown = content(made)
    assert "cached 0." in str(shown.columns) and "GiB in the host's memory per rank: 0: 0.477" in shown.facts
    # On more ranks there is room for it.
    roomy = plan_tables(loads, Topology(ranks_per_host=4, machine=GPU), batch_size=256)
    assert {one.tier for one in roomy.tables} == {"device"}
    with pytest.raises(PlanError, match="the tables do not fit"):
        plan_tables({"big": replace(BIG, leaves_device=False)}, Topology(machine=GPU), batch_size=256)


def test_constraints_on_tiers() -> None:
    loads = {"t": replace(BIG, num_embeddings=1000)}

    def planned(machine: str = "h100", **limit: object) -> tuple[str, float]:
        constraint = Constraint(**limit)  # type: ignore[arg-type]
        topology = Topology(ranks_per_host=2, machine=preset(machine))
        layout = plan_tables(loads, topology, batch_size=64, constraints={"t": constraint}).by_name["t"]
        return layout.tier, layout.load_factor

    assert planned() == ("device", 0)
    assert planned(tiers=("cached",))[0] == "cached"
    assert planned(tiers=("cached",), load_factor=0.2) == ("cached", 0.2)
    assert planned(tiers=("host",)) == ("host", 0)
    assert planned(tiers=("cached", "device")) == ("device", 0)
    for match, limit in (
        ("no tier 'ssd'", {"tiers": ("ssd",)}),
        (r"load_factor is 2", {"tiers": ("cached",), "load_factor": 2.0}),
        ("a data_parallel table is in tier 'device'", {"tiers": ("host",), "cuts": ("data_parallel",)}),
        ("and a CPU has no tiers", {"tiers": ("host",), "machine": "cpu"}),
    ):
        with pytest.raises(ConfigError, match=match):
            planned(**limit)  # type: ignore[arg-type]


def test_models_say_which_tables_may_leave_the_device() -> None:
    configs = [
        EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16, feature_names=["a"]),
    ]
    for optimizer, tier in (("rowwise_adagrad", "cached"), ("adam", "cached"), ("none", "")):
        model, limit = collection(configs, optimizers=optimizer), {"t": Constraint(tiers=("cached",))}
        if tier:
            made = plan(model, Topology(machine=preset("h100")), constraints=limit)
            assert made.by_name["t"].tier == tier
        else:
            with pytest.raises(ConfigError, match="no kernel of fbgemm"):
                plan(model, Topology(machine=preset("h100")), constraints=limit)
