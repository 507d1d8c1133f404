"""Replicas of a sharded group: alike after a sync, the unsharded model's steps where they must be, failing together."""

from __future__ import annotations

import contextlib
import math
import os
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from shardrec import load_checkpoint, save_checkpoint
from shardrec.errors import ConfigError, InputError, PeerError, PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ReplicatedModel, ShardedModel, shard
from shardrec.modules.replicas import Averager, ReplicaOptions, make_groups, replica_ranks, stream_buckets
from tests.batches import Bags, joined, random_bags
from tests.collective_counts import CountCollectives
from tests.models import (
    ClickModel,
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
    SIZES,
    assert_dense_equal,
    assert_tables_equal,
    dense_parameters,
    mixed_plan,
)
from tests.modules.parity import local_part
from tests.plans import random_plan
from tests.ranks import ranks


def replicated(model: nn.Module, *args: Any, **kwargs: Any) -> ReplicatedModel:
    made = shard(model, *args, **kwargs)
    assert isinstance(made, ReplicatedModel)
    return made


def copies_of(model: ReplicatedModel) -> list[list[Tensor]]:
    """This rank's table parameters and fused states, as each replica has them."""
    mine = [one.clone() for one in (*model._weights(frozen=True), *model._states())]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    place = model.replica_groups.ranks[model.replica_groups.replica].index(dist.get_rank())
    return [everyone[row[place]] for row in model.replica_groups.ranks]


def copies_are_equal(model: ReplicatedModel) -> bool:
    """To the last bit, on every rank."""
    first, *others = copies_of(model)
    alike = all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))
    dist.all_reduce(flag := torch.tensor(int(alike)), dist.ReduceOp.MIN)
    return bool(flag)


class Steps:
    """Batches of every rank, alike on every rank."""

    def __init__(self, rows: dict[str, int] | Any, seed: int = 0, size: int = 3) -> None:
        self.rng, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.rows, self.size, self.world = rows, size, dist.get_world_size()
        self.mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)

    def bags(self) -> list[Bags]:
        return [random_bags(self.rng, self.rows, self.size, shuffled=False) for _ in range(self.world)]

    def draw(self) -> tuple[list[Bags], Tensor, Tensor]:
        dense = torch.randn(self.size * self.world, 3, generator=self.generator)
        labels = torch.randint(0, 2, (self.size * self.world,), generator=self.generator).float()
        return self.bags(), dense, labels


def click_loss(model: nn.Module, dense: Tensor, bags: Bags, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(dense, bags.kjt()), labels)


# --- The unsharded model's steps


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_sgd_is_the_unsharded_model_on_the_global_batch(replicas: int) -> None:
    """Averaging the results of one SGD step is the step of the averaged gradients."""

    def rank_main() -> None:
        size = dist.get_world_size() // replicas
        for seed in range(4):
            rng = Random(seed)
            configs = random_configs(rng) if seed else CONFIGS
            inside = mixed_plan(size) if not seed else None
            if inside is None:
                inside = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=size))
            model = replicated(click_model(configs), inside, replicas=replicas)
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
        model = replicated(click_model(CONFIGS, optimizer="none"), mixed_plan(2), replicas=2)
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


@pytest.mark.parametrize(
    ("optimizer", "sync_optimizer"),
    [("sgd", False), ("adagrad", True), ("adagrad", False), ("rowwise_adagrad", True), ("adam", True)],
)
def test_copies_drift_and_meet_every_third_step(optimizer: str, sync_optimizer: bool) -> None:
    """Against each replica's own unsharded training, averaged by hand after steps 3 and 6."""

    def rank_main() -> None:
        model = replicated(
            collection(CONFIGS, optimizers=optimizer),
            random_plan(Random(5), table_sizes(CONFIGS), Topology(ranks_per_host=2)),
            replicas=2,
            sync_every=3,
            sync_optimizer=sync_optimizer,
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
        model = replicated(module, cut, replicas=2, sync_every=2)
        equal = []
        for bags in (Steps({"a": 9}, seed).bags() for seed in range(3)):
            rows = model(bags[dist.get_rank()].kjt())["a"].values()
            equal.append(copies_are_equal(model))
            rows.square().sum().backward()
        assert equal == [True, False, True]

    ranks(4, rank_main)


# --- When a step is counted


def test_accumulated_forwards_are_one_step_and_evaluations_none() -> None:
    def rank_main() -> None:
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=2, sync_every=2)
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


def test_first_values_are_those_of_replica_0() -> None:
    def rank_main() -> None:
        seed = dist.get_rank() // 2
        model = replicated(click_model(CONFIGS, seed=seed), mixed_plan(2), replicas=2)
        assert copies_are_equal(model)
        assert_tables_equal(model.module, click_model(CONFIGS, seed=0), "first values")

    ranks(4, rank_main)


# --- Collectives


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20))
def test_buckets_are_full_and_cover_everything_in_order(sizes: list[int], most: int) -> None:
    buckets = stream_buckets(sizes, most)
    assert len(buckets) == math.ceil(sum(sizes) / most)
    filled = [sum(span.end - span.start for span in bucket) for bucket in buckets]
    assert all(count == most for count in filled[:-1])
    assert all(0 < count <= most for count in filled)
    elements = [(span.tensor, at) for bucket in buckets for span in bucket for at in range(span.start, span.end)]
    assert elements == [(number, at) for number, size in enumerate(sizes) for at in range(size)]


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


@pytest.mark.parametrize(("sync_optimizer", "optimizer"), [(True, "adagrad"), (False, "adagrad"), (True, "adam")])
def test_collectives_of_a_step(optimizer: str, sync_optimizer: bool) -> None:
    """A small all-to-all at the end of each training forward; one all-reduce for all tables and states when due."""

    def rank_main() -> None:
        model = replicated(
            collection([*CONFIGS], optimizers=optimizer),
            random_plan(Random(5), table_sizes(CONFIGS), Topology(ranks_per_host=2)),
            replicas=2,
            sync_every=2,
            sync_optimizer=sync_optimizer,
        )
        assert any(True for _ in model._weights(frozen=False))
        steps = Steps(ROWS)
        for step in range(5):
            features = steps.bags()[dist.get_rank()].kjt()
            with CountCollectives() as forward:
                pooled = model(features)
                pooled.wait()
            due = {"all_reduce": 1} if step in (2, 4) else {}
            assert forward == {"all_to_all": 4, **due}, f"step {step}: {dict(forward)}"
            with CountCollectives() as backward:
                pooled.values().sum().backward()
            assert backward["all_to_all"] == 1
            with CountCollectives() as evaluation, torch.no_grad():
                model(features).wait()
            assert evaluation == {"all_to_all": 3}

    ranks(4, rank_main)


@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (4, 4), (4, 1), (8, 2)])
def test_replicas_are_neighbouring_ranks(world: int, replicas: int) -> None:
    rows = replica_ranks(world, replicas)
    assert [rank for row in rows for rank in row] == list(range(world))
    assert {len(row) for row in rows} == {world // replicas}


def test_one_rank_alone_is_one_replica() -> None:
    model = replicated(click_model(CONFIGS), mixed_plan(1), replicas=1, sync_every=2)
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
        groups = make_groups(part, 2, torch.device("cpu"))
        assert groups.inside is None
        assert groups.replica == dist.get_rank() - 1
        assert dist.get_process_group_ranks(groups.peers) == [1, 2]
        assert groups.peers._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=37)
        model = replicated(click_model(CONFIGS), mixed_plan(1), group=part, replicas=2)
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


# --- What is refused


def build(plan_ranks: int | None = 2, **kwargs: Any) -> None:
    model = click_model(CONFIGS)
    shard(model, None if plan_ranks is None else mixed_plan(plan_ranks), **kwargs)


MISFITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"replicas": 3}, ConfigError, r"replicas=3 cannot share 4 rank\(s\) evenly; give a divisor of 4 \(1, 2, 4\)"),
    ({"replicas": 3, "plan_ranks": None}, ConfigError, "replicas=3 cannot share"),
    ({"replicas": 0}, ConfigError, "replicas=0; there is at least one copy"),
    ({"replicas": 2, "sync_every": 0}, ConfigError, "sync_every=0; replicas are averaged after 1 step or more"),
    ({"sync_every": 2, "plan_ranks": 4}, ConfigError, "sync_every=2 without replicas"),
    (
        {"replicas": 2, "plan_ranks": 4},
        PlanError,
        r"plan is for 4 ranks and each of the 2 replicas has 2 .* plan for 2, with .*Topology\(ranks_per_host=2\)",
    ),
]


def test_options_that_do_not_fit() -> None:
    """On all ranks, or on one of them: all raise."""

    def rank_main() -> None:
        for kwargs, error, words in MISFITS:
            with pytest.raises(error, match=words):
                build(**kwargs)
            with pytest.raises(error, match=f"rank 3: .*{words}" if dist.get_rank() != 3 else words):
                build(**(kwargs if dist.get_rank() == 3 else {"replicas": 2}))
        build(replicas=2)

    ranks(4, rank_main)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_ask_for_different_replicas(replicas: int) -> None:
    odd: list[tuple[dict[str, Any], str]] = [
        ({"replicas": 4, "plan_ranks": 1}, "rank 2: replicas=4, sync_every=1"),
        ({"replicas": replicas, "sync_every": 5}, "rank 2: .* sync_every=5"),
        ({"replicas": replicas, "sync_optimizer": False}, "rank 2: .* sync_optimizer=False"),
        ({"plan_ranks": 4}, "rank 2: replicas=None"),
    ]

    def rank_main() -> None:
        for kwargs, words in odd:
            with pytest.raises(ConfigError, match="the ranks ask for different replicas.*\n.*\n.*\n  " + words):
                build(**(kwargs if dist.get_rank() == 2 else {"replicas": replicas, "plan_ranks": 4 // replicas}))

    ranks(4, rank_main)


def test_plans_that_differ_between_replicas() -> None:
    def rank_main() -> None:
        inside = random_plan(Random(dist.get_rank() // 3), SIZES, Topology(ranks_per_host=2))
        with pytest.raises(PlanError, match=r"the plan of rank\(s\) 3 differs"):
            shard(click_model(CONFIGS), inside, replicas=2)

    ranks(4, rank_main)


def test_the_default_plan_is_for_a_replica() -> None:
    def rank_main() -> tuple[int, int]:
        topology = shard(click_model(CONFIGS), replicas=2).plan.topology
        return topology.hosts, topology.ranks_per_host

    assert ranks(4, rank_main, hosts=2) == [(1, 2)] * 4
    assert ranks(4, rank_main, hosts=4) == [(2, 1)] * 4


def test_options_name_every_fault() -> None:
    assert len(ReplicaOptions(replicas=3, sync_every=-1).faults(4)) == 2
    assert ReplicaOptions(replicas=2, sync_every=7).faults(4) == []


# --- Failing together


def spoiled(bags: Bags) -> Bags:
    ids = {**bags.ids, "tag": [[999] for _ in range(bags.size)]}
    return Bags(keys=bags.keys, size=bags.size, ids=ids)


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_bad_batch_fails_in_every_replica(accumulating: bool) -> None:
    """At the same step, with the guilty ranks' own numbers; no weight has changed and training goes on."""

    def rank_main() -> list[tuple[tuple[int, ...], str]]:
        rank, found = dist.get_rank(), []
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=2)
        reference = click_model(CONFIGS)
        steps = Steps(ROWS)

        def good() -> None:
            bags, dense, labels = steps.draw()
            click_loss(model, dense[steps.mine], bags[rank], labels[steps.mine]).backward()
            click_loss(reference, dense, joined(bags), labels).backward()

        for guilty in [(1,), (2,), (0, 3), (0, 1, 2, 3)]:
            good()
            model.sync_replicas()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            bags, dense, _ = steps.draw()
            features = (spoiled(bags[rank]) if rank in guilty else bags[rank]).kjt()
            with (
                pytest.raises(InputError) as caught,
                model.no_sync() if accumulating else contextlib.nullcontext(),
            ):
                model(dense[steps.mine], features)
            assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
            found.append((guilty, str(caught.value)))
        good()
        good()
        model.sync_replicas()
        assert_tables_equal(model.module, reference, "after")
        return found

    first, *others = ranks(4, rank_main)
    assert others == [first] * 3
    for guilty, text in first:
        for rank in range(4):
            assert (f"rank {rank}: feature 'tag' of table 'sparse.tags': id 999" in text) == (rank in guilty), text


class FailsLate(ClickModel):
    """Raises on some ranks, after the last header."""

    guilty: tuple[int, ...] = ()

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        logits = super().forward(dense, features)
        if dist.get_rank() in self.guilty:
            raise KeyError("no such column")
        return logits


def test_an_error_after_the_last_header() -> None:
    def rank_main() -> str:
        model = replicated(FailsLate(collection(CONFIGS, optimizers="sgd"), pooled=32), mixed_plan(2), replicas=2)
        bags, dense, _ = Steps(ROWS).draw()
        batch = dense[:3], bags[0].kjt()
        model(*batch).sum().backward()
        model.module.guilty = (2,)
        with pytest.raises(InputError) as caught:
            model(*batch)
        assert isinstance(caught.value.__cause__, KeyError) == (dist.get_rank() == 2)
        model.module.guilty = ()
        model(*batch).sum().backward()
        return str(caught.value)

    assert ranks(4, rank_main) == ["rank 2: the model's forward failed: KeyError: 'no such column'"] * 4


def test_ranks_in_different_steps() -> None:
    """A replica that left out a batch, or is inside no_sync while others are not, is told before any waits."""

    def rank_main() -> str:
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=2, sync_every=9)
        bags, dense, _ = Steps(ROWS).draw()
        accumulate = dist.get_rank() >= 2
        with (
            pytest.raises(InputError) as caught,
            model.no_sync() if accumulate else contextlib.nullcontext(),
        ):
            model(dense[:3], bags[0].kjt())
        return str(caught.value)

    text = ranks(4, rank_main)[0]
    assert "rank 1: 0 step(s) since the last sync, outside no_sync" in text
    assert "rank 2: 0 step(s) since the last sync, inside no_sync" in text


def test_a_rank_that_is_gone() -> None:
    """Its replica and its peers notice; as they end, those notice who waited for them. No one needs the timeout."""

    def rank_main() -> None:
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=2)
        bags, dense, _ = Steps(ROWS).draw()
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                os._exit(3)
            try:
                model(dense[:3], bags[0].kjt()).sum().backward()
            except PeerError as error:
                os._exit(7 if "start all the ranks again" in str(error) else 8)

    results = ranks(4, rank_main, expect_death=range(4), timeout=30.0)
    codes = [result.code for result in results]
    assert codes == [7, 3, 7, 7]


# --- Checkpoints


def checkpoint_model(optimizer: str, size: int, **kwargs: Any) -> ShardedModel:
    model = click_model(CONFIGS, optimizer=optimizer)
    inside = random_plan(Random(8), SIZES, Topology(ranks_per_host=size))
    return shard(model, inside, **kwargs)


def train_on(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Tensor:
    """Steps with the same batch on every rank, so that they do not depend on the number of ranks."""
    rng, losses = Random(seed), []
    for _ in range(steps):
        bags = random_bags(rng, ROWS, 4, shuffled=False)
        loss = click_loss(model, torch.ones(4, 3), bags, torch.tensor([0.0, 1.0, 1.0, 0.0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def dense_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")], lr=0.02)


@pytest.mark.parametrize(("optimizer", "sync_optimizer"), [("adagrad", True), ("adam", False), ("none", True)])
def test_a_checkpoint_of_drifted_replicas_loads_anywhere(tmp_path: Path, optimizer: str, sync_optimizer: bool) -> None:
    def save_main() -> tuple[Tensor, dict[str, Tensor]]:
        model = checkpoint_model(optimizer, 2, replicas=2, sync_every=9, sync_optimizer=sync_optimizer)
        assert isinstance(model, ReplicatedModel)
        adam = dense_adam(model)
        train_on(model, adam, 2, seed=1)
        drift = train_on(model, adam, 2, seed=2 + model.replica_groups.replica)
        assert drift.isfinite().all()
        save_checkpoint(tmp_path / "ckpt", model, adam, extra={"step": 4})
        assert model.steps_since_sync == 0
        whole = collection(CONFIGS)
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(
            gathered,
            [
                (name, place, parameter.detach())
                for name, table in model.module.sparse.tables().items()
                for place, parameter in table.locals.items()
            ],
        )
        for name, place, values in (entry for entries in gathered[:2] for entry in entries):
            local_part(whole.embedding_bags[name].weight.detach(), place).copy_(values)
        return train_on(model, adam, 2, seed=7), {name: one.detach() for name, one in whole.named_parameters()}

    # The second loss also depends on the states, as far as replica 0 has them.
    def load_main(size: int, **kwargs: Any) -> tuple[Tensor, bool]:
        model = checkpoint_model(optimizer, size, **kwargs)
        adam = dense_adam(model)
        train_on(model, adam, 1, seed=5)
        assert load_checkpoint(tmp_path / "ckpt", model, adam) == {"step": 4}
        alike = not isinstance(model, ReplicatedModel) or (copies_are_equal(model) and not model.steps_since_sync)
        whole = unsharded(tables)
        assert_tables_equal(model.module, whole, "loaded", atol=0.0)
        return train_on(model, adam, 2, seed=7), alike

    def unsharded(values: dict[str, Tensor]) -> nn.Module:
        model = click_model(CONFIGS)
        model.sparse.load_state_dict(values)
        return model

    expected, tables = ranks(4, save_main)[0]
    for world, size, kwargs in ((1, 1, {}), (2, 2, {}), (4, 1, {"replicas": 4}), (4, 2, {"replicas": 2})):
        for losses, alike in ranks(world, load_main, size, **kwargs):
            assert alike
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_a_state_dict_is_saved_once_per_shard(tmp_path: Path) -> None:
    """torch.distributed.checkpoint over all the ranks, as users call it themselves."""

    def rank_main() -> None:
        model = checkpoint_model("adagrad", 2, replicas=2, sync_every=9)
        assert isinstance(model, ReplicatedModel)
        train_on(model, dense_adam(model), 2, seed=dist.get_rank() // 2)
        model.sync_replicas()
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
        saved = [one.clone() for one in model._weights(frozen=True)]
        for weight in model._weights(frozen=True):
            weight.zero_()
        target = model.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / "dcp")
        model.load_state_dict(target)
        assert all(torch.equal(one, two) for one, two in zip(saved, model._weights(frozen=True), strict=True))

    ranks(4, rank_main)
    written = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    listed = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().storage_data
    assert written == sum(entry.length for entry in listed.values())
