"""Replicas of a sharded group: alike after a sync, and the unsharded model's steps where they must be."""

from __future__ import annotations

import math
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.replicas import Replicas, ReplicatedModel
from shardrec.replicas.replicas import Averager, replica_ranks, stream_buckets
from tests.batches import Bags, joined, random_bags
from tests.collective_counts import CountCollectives
from tests.models import (
    apply_optimizer_in_backward,
    click_model,
    collection,
    feature_rows,
    random_configs,
    table_sizes,
)
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    assert_dense_equal,
    assert_tables_equal,
    dense_parameters,
    mixed_plan,
)
from tests.modules.replicated import Steps, click_loss, copies_are_equal, replicated
from tests.modules.tables import local_part
from tests.plans import random_plan
from tests.ranks import ranks


@pytest.mark.some(1)
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_sgd_is_the_unsharded_model_on_the_global_batch(replicas: int) -> None:
    """Averaging the results of one SGD step is the step of the averaged gradients."""

    def rank_main() -> None:
        size = dist.get_world_size() // replicas
        for seed in range(2):
            rng = Random(seed)
            configs = random_configs(rng) if seed else CONFIGS
            inside = mixed_plan(size) if not seed else None
            if inside is None:
                inside = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=size))
            model = replicated(click_model(configs), inside, replicas=Replicas(replicas))
            reference = click_model(configs)
            optimizers = [torch.optim.Adam(dense_parameters(one), lr=0.05) for one in (model, reference)]
            steps = Steps(feature_rows(configs), seed)
            for step in range(4):
                bags, dense, labels = steps.draw()
                mine, rank = steps.mine, dist.get_rank()
                logits = model(dense[mine], bags[rank].kjt())
                expected = reference(dense, joined(bags).kjt())
                assert torch.allclose(logits, expected[mine], atol=1e-5), f"seed {seed}, step {step}"
                nn.functional.binary_cross_entropy_with_logits(logits, labels[mine]).backward()
                nn.functional.binary_cross_entropy_with_logits(expected, labels).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            model.sync_replicas()
            assert copies_are_equal(model)
            assert_tables_equal(model.module, reference, f"seed {seed}")
            assert_dense_equal(model, reference, f"seed {seed}")

    ranks(4, rank_main)


def test_tables_with_an_ordinary_optimizer() -> None:
    """They are updated after backward, which the sync at the next forward waits for."""

    def rank_main() -> None:
        model = replicated(click_model(CONFIGS, optimizer="none"), mixed_plan(2), replicas=Replicas(2))
        reference = click_model(CONFIGS, optimizer="none")
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference)]
        steps = Steps(ROWS)
        for _ in range(3):
            bags, dense, labels = steps.draw()
            click_loss(model, dense[steps.mine], bags[dist.get_rank()], labels[steps.mine]).backward()
            click_loss(reference, dense, joined(bags), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not copies_are_equal(model)
        model.sync_replicas()
        assert_tables_equal(model.module, reference, "tables")
        assert_dense_equal(model, reference, "dense")

    ranks(4, rank_main)


class Twins:
    """The unsharded tables of each replica, trained on its batches and averaged when it is due: what must come out."""

    def __init__(self, optimizer: str, replicas: int) -> None:
        self.copies = [collection(CONFIGS, optimizers=optimizer, reference=True) for _ in range(replicas)]

    def step(self, bags: list[Bags], factors: Tensor) -> None:
        share = len(bags) // len(self.copies)
        for replica, copy in enumerate(self.copies):
            part = slice(replica * share, (replica + 1) * share)
            pooled = copy(joined(bags[part]).kjt()).values()
            ((pooled * factors[: pooled.size(0)]).sum() / share).backward()

    @torch.no_grad()
    def average(self, *, states: bool) -> None:
        for parameters in zip(*(copy.parameters() for copy in self.copies), strict=True):
            groups: list[list[Tensor]] = [list(parameters)]
            if states:
                entries = [state_of(parameter) for parameter in parameters]
                groups += [[entry[key] for entry in entries] for key in entries[0]]
            for tensors in groups:
                mean = torch.stack([one.float() for one in tensors]).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)


def state_of(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer states of an unsharded table that has been trained; counts of steps aside."""
    state = parameter._in_backward_optimizers[0].state[parameter]  # type: ignore[attr-defined]
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("optimizer", "sync_optimizer"),
    [("sgd", False), ("adagrad", True), ("adagrad", False), ("rowwise_adagrad", True), ("adam", True)],
)
def test_copies_drift_and_meet_every_third_step(optimizer: str, sync_optimizer: bool) -> None:
    """Against each replica's own unsharded training, averaged by hand after steps 3 and 6."""

    def rank_main() -> None:
        model = replicated(
            collection(CONFIGS, optimizers=optimizer),
            random_plan(Random(3), table_sizes(CONFIGS), Topology(ranks_per_host=2)),
            replicas=Replicas(2, sync_every=3, sync_optimizer=sync_optimizer),
        )
        twins, steps = Twins(optimizer, 2), Steps(ROWS)
        equal = []
        for step in range(7):
            bags = steps.bags()
            pooled = model(bags[dist.get_rank()].kjt()).values()
            if step in (3, 6):
                twins.average(states=sync_optimizer)
            equal.append(copies_are_equal(model))
            factors = torch.randn(2 * steps.size, pooled.size(1), generator=steps.generator)
            inside = dist.get_rank() % 2 * steps.size
            (pooled * factors[inside : inside + steps.size]).sum().backward()
            twins.step(bags, factors)
            assert_tables_equal(model.module, twins.copies[model.replica_groups.replica], f"step {step}", atol=1e-4)
        alike = sync_optimizer or optimizer == "sgd"
        assert equal == [True, False, False, alike, False, False, alike]
        model.sync_replicas()
        twins.average(states=sync_optimizer)
        assert copies_are_equal(model) == alike
        assert_tables_equal(model.module, twins.copies[0], "at the end", atol=1e-4)
        assert_states_equal(model, twins.copies[model.replica_groups.replica])

    ranks(4, rank_main)


def assert_states_equal(model: ReplicatedModel, reference: nn.Module) -> None:
    names = {"sum": ("sum", "momentum"), "exp_avg": ("m",), "exp_avg_sq": ("v",)}
    bags = reference.embedding_bags
    for name, fused in model.module.fused_optimizers().items():
        expected = state_of(bags[name].weight)
        for state in fused.states:
            whole = next(expected[key] for key in names[state] if key in expected)
            for place, part in model.module.fused_state(name, state).items():
                other = whole if place is None or part.dim() == 2 else whole.view(-1)[place.row_start : place.row_end]
                other = local_part(other, place) if part.dim() == 2 else other.view(-1)
                assert torch.allclose(part, other, atol=1e-4), f"{name} {state} {place}"


def test_sequence_collections() -> None:
    def rank_main() -> None:
        configs = [EmbeddingConfig(name="s", num_embeddings=9, embedding_dim=8, feature_names=["a"])]
        torch.manual_seed(0)
        module = EmbeddingCollection(tables=configs)
        apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
        cut = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.row_wise("s", 9, 8, ranks=[1, 0]),))
        model = replicated(module, cut, replicas=Replicas(2, sync_every=2))
        equal = []
        for bags in (Steps({"a": 9}, seed).bags() for seed in range(3)):
            rows = model(bags[dist.get_rank()].kjt())["a"].values()
            equal.append(copies_are_equal(model))
            rows.square().sum().backward()
        assert equal == [True, False, True]

    ranks(4, rank_main)


def test_accumulated_forwards_are_one_step_and_evaluations_none() -> None:
    def rank_main() -> None:
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=Replicas(2, sync_every=2))
        steps = Steps(ROWS)

        def micro() -> None:
            bags, dense, labels = steps.draw()
            click_loss(model, dense[steps.mine], bags[dist.get_rank()], labels[steps.mine]).backward()

        def evaluate(times: int) -> None:
            bags, dense, labels = steps.draw()
            model.eval()
            with torch.no_grad():
                for _ in range(times):
                    click_loss(model, dense[steps.mine], bags[dist.get_rank()], labels[steps.mine])
            model.train()

        for step in range(1, 3):
            with model.no_sync():
                micro()
                micro()
            micro()
            # A replica's evaluations are its own: another may make more of them.
            evaluate(times=1 + model.replica_groups.replica)
            assert model.steps_since_sync == step
            assert not copies_are_equal(model)
        with model.no_sync():
            micro()
        assert model.steps_since_sync == 0
        micro()
        assert model.steps_since_sync == 1
        model.sync_replicas()
        assert model.steps_since_sync == 0
        assert copies_are_equal(model)

    ranks(4, rank_main)


class Normed(nn.Module):
    """Its buffers change in each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = click_model(CONFIGS)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.clicks(self.norm(dense), features)
        return logits


@pytest.mark.parametrize("size", [1, 2])
def test_evaluations_of_a_replica_broadcast_buffers_inside_it(size: int) -> None:
    def rank_main() -> list[Tensor]:
        model = replicated(Normed(), mixed_plan(size, "clicks.sparse"), replicas=Replicas(2))
        steps, means = Steps(ROWS), []

        def forward() -> Tensor:
            bags, dense, labels = steps.draw()
            rank = dist.get_rank()
            loss = click_loss(model, dense[steps.mine] + rank, bags[rank], labels[steps.mine])
            means.append(model.norm.running_mean.clone())
            return loss

        forward().backward()
        model.eval()
        with torch.no_grad():
            for _ in range(1 + 2 * model.replica_groups.replica):
                forward()
        means = means[:2]
        model.sync_replicas()
        means.append(model.norm.running_mean.clone())
        model.train().zero_grad()
        forward().backward()
        assert model.norm.weight.grad is not None
        return [*means[:3], model.norm.weight.grad]

    trained, evaluated, synced, gradients = zip(*ranks(2 * size, rank_main), strict=True)
    assert len({tuple(mean.tolist()) for mean in trained}) == 2 * size, "each rank has had its own batch"
    for rank in range(2 * size):
        assert torch.equal(evaluated[rank], trained[rank // size * size]), "that of the replica's first rank"
        assert torch.equal(synced[rank], trained[0])
        assert torch.equal(gradients[rank], gradients[0])


def test_first_values_are_those_of_replica_0() -> None:
    def rank_main() -> None:
        seed = dist.get_rank() // 2
        model = replicated(click_model(CONFIGS, seed=seed), mixed_plan(2), replicas=Replicas(2))
        assert copies_are_equal(model)
        assert_tables_equal(model.module, click_model(CONFIGS, seed=0), "first values")

    ranks(4, rank_main)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20))
def test_buckets_are_full_and_cover_everything_in_order(sizes: list[int], most: int) -> None:
    whole = torch.arange(sum(sizes))
    buckets = list(stream_buckets(whole.split(sizes), most))
    assert len(buckets) == math.ceil(sum(sizes) / most)
    filled = [sum(part.numel() for part in bucket) for bucket in buckets]
    assert all(count == most for count in filled[:-1])
    assert all(0 < count <= most for count in filled)
    parts = [part for bucket in buckets for part in bucket]
    assert all(part.numel() for part in parts)
    assert torch.equal(torch.cat([whole[:0], *parts]), whole)
    assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)


def test_means_in_few_collectives() -> None:
    """One all-reduce per dtype and bucket, in place; a value that all hold alike stays what it is."""

    def rank_main() -> None:
        rank = dist.get_rank()
        for bucket_bytes in (4, 12, 28, 1000):
            shapes = [(3, 4), (5,), (0, 4), (2, 2), (1, 4)]
            dtypes = [torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16]
            tensors = [
                torch.arange(math.prod(shape)).view(shape).to(dtype) + 4 * rank
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            tensors[3].fill_(60000.0)  # the sum of two is no float16
            expected = [tensor + 4 * (0.5 - rank) for tensor in tensors[:3]]
            with CountCollectives() as counts:
                Averager(dist.group.WORLD, bucket_bytes=bucket_bytes).average(tensors)  # type: ignore[arg-type]
            sizes = [17 * 4, 4 * 2, 4 * 2]
            assert counts == {"all_reduce": sum(math.ceil(size / bucket_bytes) for size in sizes)}
            for tensor, mean in zip(tensors, expected, strict=False):
                assert torch.equal(tensor, mean)
            assert torch.equal(tensors[3], torch.full((2, 2), 60000.0, dtype=torch.float16))
            assert torch.equal(tensors[4], torch.tensor([[2.0, 3.0, 4.0, 5.0]], dtype=torch.bfloat16))

    ranks(2, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize(("sync_optimizer", "optimizer"), [(True, "adagrad"), (False, "adagrad"), (True, "adam")])
def test_collectives_of_a_step(optimizer: str, sync_optimizer: bool) -> None:
    """A small all-to-all at the end of each training forward; one all-reduce for all tables and states when due."""

    def rank_main() -> None:
        model = replicated(
            collection([*CONFIGS], optimizers=optimizer),
            random_plan(Random(3), table_sizes(CONFIGS), Topology(ranks_per_host=2)),
            replicas=Replicas(2, sync_every=2, sync_optimizer=sync_optimizer),
        )
        assert any(True for _ in model._weights())
        steps = Steps(ROWS)
        for step in range(5):
            features = steps.bags()[dist.get_rank()].kjt()
            with CountCollectives() as forward:
                pooled = model(features)
                pooled.wait()
            due = {"all_reduce": 1} if step in (2, 4) else {}
            assert forward == {"all_to_all": 3, **due}, f"step {step}: {dict(forward)}"
            with CountCollectives() as backward:
                pooled.values().sum().backward()
            assert backward["all_to_all"] == 1
            with CountCollectives() as evaluation, torch.no_grad():
                model(features).wait()
            assert evaluation == {"all_to_all": 2}

    ranks(4, rank_main)


@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (4, 4), (4, 1), (8, 2)])
def test_replicas_are_neighbouring_ranks(world: int, replicas: int) -> None:
    rows = replica_ranks(world, replicas)
    assert [rank for row in rows for rank in row] == list(range(world))
    assert {len(row) for row in rows} == {world // replicas}


def test_one_rank_alone_is_one_replica() -> None:
    model = replicated(click_model(CONFIGS), mixed_plan(1), replicas=Replicas(1, sync_every=2))
    for _ in range(3):
        model(torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt()).sum().backward()
    model.sync_replicas()
    assert type(shard(click_model(CONFIGS), mixed_plan(1))) is ShardedModel


def test_in_a_part_of_the_world() -> None:
    """The ranks outside of the group take no part in making the replicas' groups, whose timeout is the group's."""

    def rank_main() -> None:
        part = dist.new_group([1, 2], timeout=timedelta(seconds=37))
        if dist.get_rank() not in (1, 2):
            return
        groups = Replicas(2).make_groups(part, torch.device("cpu"))
        assert groups.within is None
        assert groups.replica == dist.get_rank() - 1
        assert dist.get_process_group_ranks(groups.across) == [1, 2]
        assert groups.across._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=37)
        model = replicated(click_model(CONFIGS), mixed_plan(1), group=part, replicas=Replicas(2))
        reference = click_model(CONFIGS)
        rng = Random(0)
        for _ in range(2):
            bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(2)]
            dense = torch.ones(2, 3)
            model(dense, bags[groups.replica].kjt()).mean().backward()
            reference(torch.ones(4, 3), joined(bags).kjt()).mean().backward()
        model.sync_replicas()
        assert_tables_equal(model.module, reference, "tables")

    ranks(3, rank_main)


@pytest.mark.parametrize("every", [1, 2])
def test_averages_of_rows_are_the_means_of_the_copies(every: int) -> None:
    decay = 0.5

    def rank_main() -> None:
        torch.manual_seed(0)
        module = click_model(CONFIGS)
        model = replicated(module, mixed_plan(1), replicas=Replicas(2, sync_every=every), update="step")
        steps, total, weight = Steps(ROWS), [], 0.0
        collections = model.sharded_collections
        optimizers = [rows for collection in collections for rows in collection.keep_averages(decay)]
        for _ in range(5):
            bags, dense, labels = steps.draw()
            click_loss(model, dense[steps.mine], bags[dist.get_rank()], labels[steps.mine]).backward()
            model.fused_optimizer.step()
            values = [weights.to(torch.float32, copy=True) for rows in optimizers for weights, _ in rows.averages()]
            total = [sum_ * decay + value for sum_, value in zip(total or [0.0] * len(values), values, strict=True)]
            weight = weight * decay + 1
        model.sync_replicas()
        found = [average for rows in optimizers for _, average in rows.averages()]
        for average, sum_ in zip(found, total, strict=True):
            dist.all_reduce(sum_)  # over the copies
            torch.testing.assert_close(average, sum_ / (2 * weight), rtol=1e-5, atol=1e-6)

    ranks(2, rank_main)
