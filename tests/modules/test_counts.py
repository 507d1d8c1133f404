"""The collectives of a step: header and ids, output and gradient, one all-to-all each, whatever the plan.

On several hosts there is one more each way, inside hosts, if the plan cuts rows over ranks of one host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.layout import ShardingPlan
from shardrec.modules import shard
from tests.batches import random_bags
from tests.collective_counts import CountCollectives
from tests.models import OPTIMIZERS, click_model, collection, feature_rows, random_configs, table_sizes
from tests.plans import CUTS, cut_plan, random_plan, sums_inside_hosts, topologies_of
from tests.ranks import ranks

STEPS = 2


def whole_row_groups(optimizers: Sequence[str], plan: ShardingPlan) -> int:
    """Groups of tables that exchange the squares of rows: rowwise Adagrad on tables cut by columns."""
    cut = [len(layout.stripes()) > 1 for layout in plan.tables]
    return int(any(one == "rowwise_adagrad" and by_columns for one, by_columns in zip(optimizers, cut, strict=True)))


def count_click_steps(configs: list[EmbeddingBagConfig], plan: ShardingPlan, optimizer: str, rng: Random) -> None:
    """Steps of a whole model, with uneven and empty batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = shard(click_model(configs, optimizer=optimizer), plan)
    extra = whole_row_groups([optimizer] * len(configs), plan)
    inside = int(sums_inside_hosts(plan))
    for step in range(STEPS):
        sizes = [rng.choice([0, 1, 3]) for _ in range(world_size)]
        bags = [random_bags(rng, feature_rows(configs), size) for size in sizes]
        dense = torch.randn(sizes[rank], 3)
        with CountCollectives() as forward:
            loss = model(dense, bags[rank].kjt()).sum()
        with CountCollectives() as backward:
            loss.backward()
        assert forward == {"all_to_all": 2 + inside}, f"step {step}: forward {dict(forward)}"
        # Where every table is replicated, nothing is asked for its gradients.
        gradients = 1 if any(not layout.replicated for layout in plan.tables) else 0
        expected = Counter(all_to_all=gradients + inside + extra, all_reduce=1)
        assert Counter(backward) == +expected, f"step {step}: {dict(backward)}"
        with CountCollectives() as evaluation, torch.no_grad():
            model(dense, bags[rank].kjt())
        assert evaluation == {"all_to_all": 2 + inside}


@pytest.mark.some(3)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("cut", sorted(CUTS))
def test_every_cut(cut: str, world_size: int) -> None:
    def rank_main() -> None:
        rng = Random(cut)
        configs = random_configs(rng)
        plan = cut_plan(cut, rng, table_sizes(configs, "sparse"), rng.choice(topologies_of(world_size)))
        count_click_steps(configs, plan, "adagrad" if world_size == 2 else "rowwise_adagrad", rng)

    ranks(world_size, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_random_mixtures(world_size: int) -> None:
    def rank_main() -> None:
        for seed in range(4):
            rng = Random(seed)
            configs = random_configs(rng, most=6)
            plan = random_plan(rng, table_sizes(configs, "sparse"), rng.choice(topologies_of(world_size)))
            count_click_steps(configs, plan, rng.choice(["sgd", "rowwise_adagrad", "adam", "none"]), rng)

    ranks(world_size, rank_main)


def test_mixed_optimizers_add_no_exchange() -> None:
    """Each optimizer is a kernel of its own, and all of them share one exchange."""

    def rank_main() -> None:
        for seed in range(12):
            rng = Random(seed)
            configs = random_configs(rng)
            optimizers = [rng.choice(sorted(OPTIMIZERS)) for _ in configs]
            if len(set(optimizers)) < 2:
                continue
            plan = random_plan(rng, table_sizes(configs), topologies_of(2)[0])
            model = shard(collection(configs, optimizers=optimizers), plan)
            bags = [random_bags(rng, feature_rows(configs), 3) for _ in range(2)]
            with CountCollectives() as counts:
                model(bags[dist.get_rank()].kjt()).values().sum().backward()
            replicas = int(any(layout.replicated for layout in plan.tables))
            assert counts["all_to_all"] == 3 + whole_row_groups(optimizers, plan)
            assert counts.total() == counts["all_to_all"] + replicas, dict(counts)
            assert counts["all_reduce"] == replicas

    ranks(2, rank_main)


def test_one_rank_exchanges_nothing() -> None:
    def rank_main() -> None:
        for seed in range(5):
            rng = Random(seed)
            configs = random_configs(rng)
            plan = random_plan(rng, table_sizes(configs, "sparse"), topologies_of(1)[0])
            model = shard(click_model(configs, optimizer="rowwise_adagrad"), plan)
            with CountCollectives() as counts:
                model(torch.randn(3, 3), random_bags(rng, feature_rows(configs), 3).kjt()).sum().backward()
            assert counts == {}

    ranks(1, rank_main)


@pytest.mark.parametrize("world_size", [2, 4])
def test_outside_the_models_forward_each_collection_exchanges_by_itself(world_size: int) -> None:
    def rank_main() -> None:
        rng = Random(5)
        configs = random_configs(rng)
        tables = {**table_sizes(configs, "0"), **table_sizes(configs, "1")}
        plan = random_plan(rng, tables, topologies_of(world_size)[0])
        model = shard(nn.ModuleList([collection(configs, optimizers="adagrad") for _ in range(2)]), plan)
        features = random_bags(rng, feature_rows(configs), 3).kjt()
        with CountCollectives() as counts:
            first, second = (one(features) for one in model.module.children())
        assert counts == {"all_to_all": 4}
        with CountCollectives() as counts:
            (first.values().sum() + second.values().sum()).backward()
        assert counts["all_to_all"] == 2

    ranks(world_size, rank_main)
