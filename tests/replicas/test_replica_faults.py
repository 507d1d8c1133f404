"""Replicas of a sharded group: options that do not fit are refused, and what fails in one fails in all."""

from __future__ import annotations

import contextlib
import os
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import script
from shardrec.errors import ConfigError, InputError, PeerError, PlanError
from shardrec.layout import Topology
from shardrec.modules import shard
from shardrec.replicas import Replicas
from tests.batches import Bags, joined
from tests.models import (
    ClickModel,
    click_model,
    collection,
)
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    SIZES,
    assert_tables_equal,
    mixed_plan,
)
from tests.modules.replicated import Steps, click_loss, copies_are_equal, replicated
from tests.plans import random_plan
from tests.ranks import ranks


def build(plan_ranks: int | None = 2, **kwargs: Any) -> None:
    model = click_model(CONFIGS)
    shard(model, None if plan_ranks is None else mixed_plan(plan_ranks), **kwargs)


MISFITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"replicas": Replicas(3)},
        ConfigError,
        r"Replicas\(3\) cannot share 4 rank\(s\) evenly. Give a divisor of 4 \(1, 2, 4\)",
    ),
    ({"replicas": Replicas(3), "plan_ranks": None}, ConfigError, r"Replicas\(3\) cannot share"),
    ({"replicas": Replicas(0)}, ConfigError, r"Replicas\(0\). There is at least one copy"),
    ({"replicas": Replicas(2, sync_every=0)}, ConfigError, "sync_every=0. Replicas are averaged after 1 step or more"),
    (
        {"replicas": Replicas(2), "plan_ranks": 4},
        PlanError,
        r"plan is for 4 ranks and each of the 2 replicas has 2 .* Plan for 2, with .*Topology\(ranks_per_host=2\)",
    ),
]


def test_options_that_do_not_fit() -> None:
    """On all ranks, or on one of them: all raise."""

    def rank_main() -> None:
        for kwargs, error, words in MISFITS:
            with pytest.raises(error, match=words):
                build(**kwargs)
            with pytest.raises(error, match=f"rank 3: .*{words}" if dist.get_rank() != 3 else words):
                build(**(kwargs if dist.get_rank() == 3 else {"replicas": Replicas(2)}))
        build(replicas=Replicas(2))

    ranks(4, rank_main)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_ask_for_different_replicas(replicas: int) -> None:
    odd: list[tuple[dict[str, Any], str]] = [
        ({"replicas": Replicas(4), "plan_ranks": 1}, r"rank 2: replicas=Replicas\(count=4, sync_every=1"),
        ({"replicas": Replicas(replicas, sync_every=5)}, "rank 2: .* sync_every=5"),
        ({"replicas": Replicas(replicas, sync_optimizer=False)}, "rank 2: .* sync_optimizer=False"),
        ({"plan_ranks": 4}, "rank 2: replicas=None"),
    ]
    asked = {"replicas": Replicas(replicas), "plan_ranks": 4 // replicas}

    def rank_main() -> None:
        for kwargs, words in odd:
            with pytest.raises(ConfigError, match="the ranks ask for different replicas.*\n.*\n.*\n  " + words):
                build(**(kwargs if dist.get_rank() == 2 else asked))

    ranks(4, rank_main)


def test_plans_that_differ_between_replicas() -> None:
    def rank_main() -> None:
        inside = random_plan(Random(dist.get_rank() // 3), SIZES, Topology(ranks_per_host=2))
        with pytest.raises(PlanError, match=r"the plan of rank\(s\) 3 differs"):
            shard(click_model(CONFIGS), inside, replicas=Replicas(2))

    ranks(4, rank_main)


def test_the_default_plan_is_for_a_replica() -> None:
    def rank_main() -> tuple[int, int]:
        topology = shard(click_model(CONFIGS), replicas=Replicas(2)).plan.topology
        return topology.hosts, topology.ranks_per_host

    assert ranks(4, rank_main, hosts=2) == [(1, 2)] * 4
    assert ranks(4, rank_main, hosts=4) == [(2, 1)] * 4


def test_options_name_every_fault() -> None:
    assert len(Replicas(3, sync_every=-1).faults(4)) == 2
    assert Replicas(2, sync_every=7).faults(4) == []


def spoiled(bags: Bags) -> Bags:
    ids = {**bags.ids, "tag": [[999] for _ in range(bags.size)]}
    return Bags(keys=bags.keys, size=bags.size, ids=ids)


@pytest.mark.some(1)
@pytest.mark.parametrize("accumulating", [False, True])
def test_a_bad_batch_fails_in_every_replica(accumulating: bool) -> None:
    """At the same step, with the guilty ranks' own numbers; no weight has changed and training goes on."""

    def rank_main() -> list[tuple[tuple[int, ...], str]]:
        rank, found = dist.get_rank(), []
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=Replicas(2))
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


class Scriptable(nn.Module):
    """The forward of a :class:`ClickModel`, as TorchScript reads it."""

    def __init__(self, model: ClickModel) -> None:
        super().__init__()
        self.sparse, self.bottom, self.top = model.sparse, model.bottom, model.top

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        assert isinstance(features, KeyedJaggedTensor)  # names that only annotations have do not travel to ranks
        pooled = self.sparse(features)
        hidden = torch.relu(self.bottom(dense))
        logits: Tensor = self.top(torch.cat([hidden, pooled.values()], dim=1)).squeeze(1)
        return logits


@pytest.mark.parametrize("size", [1, 2])
def test_a_bad_batch_of_a_live_script_fails_in_every_replica(size: int) -> None:
    """In the forward of the replica that has it, and in the backward of the others."""

    def rank_main() -> None:
        rank = dist.get_rank()
        model = replicated(Scriptable(click_model(CONFIGS)), mixed_plan(size), replicas=Replicas(2))
        program, reference, steps = script(model), Scriptable(click_model(CONFIGS)), Steps(ROWS)

        def good() -> None:
            bags, dense, labels = steps.draw()
            click_loss(program, dense[steps.mine], bags[rank], labels[steps.mine]).backward()
            click_loss(reference, dense, joined(bags), labels).backward()

        for guilty in range(2 * size):
            good()
            model.sync_replicas()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            bags, dense, labels = steps.draw()
            mine = spoiled(bags[rank]) if rank == guilty else bags[rank]
            with pytest.raises(Exception, match=f"rank {guilty}: feature 'tag' of table 'sparse.tags': id 999"):
                click_loss(program, dense[steps.mine], mine, labels[steps.mine]).backward()
            assert all(map(torch.equal, model.parameters(), before))
        good()
        good()
        model.sync_replicas()
        assert_tables_equal(model.module, reference, "after")

    ranks(2 * size, rank_main)


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
        model = replicated(
            FailsLate(collection(CONFIGS, optimizers="sgd"), pooled=32), mixed_plan(2), replicas=Replicas(2)
        )
        bags, dense, _ = Steps(ROWS).draw()
        batch = dense[:3], bags[0].kjt()
        model(*batch).sum().backward()
        model.module.guilty = (2,)
        with pytest.raises(KeyError if dist.get_rank() == 2 else InputError) as caught:
            model(*batch)
        model.module.guilty = ()
        model(*batch).sum().backward()
        return str(caught.value)

    told = "rank 2: the model's forward failed: KeyError: 'no such column'"
    assert ranks(4, rank_main) == [told, told, "'no such column'", told]


def test_ranks_in_different_steps() -> None:
    """A replica that left out a batch, or is inside no_sync while others are not, is told before any waits."""

    def rank_main() -> str:
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=Replicas(2, sync_every=9))
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
        model = replicated(click_model(CONFIGS), mixed_plan(2), replicas=Replicas(2))
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


@pytest.mark.parametrize("scripted", [False, True])
def test_a_bad_evaluation_between_a_forward_and_its_backward_is_its_replicas_own(scripted: bool) -> None:
    def rank_main() -> None:
        model, rank = (
            replicated(Scriptable(click_model(CONFIGS)), mixed_plan(1), replicas=Replicas(2)),
            dist.get_rank(),
        )
        program, steps = script(model) if scripted else model, Steps(ROWS)
        for _ in range(2):
            bags, dense, _ = steps.draw()
            loss = program(dense[steps.mine], bags[rank].kjt()).sum()
            if rank == 1:
                features = bags[rank].kjt()
                features.values().fill_(10**6)
                with torch.no_grad(), pytest.raises(InputError, match="is outside"):
                    model(dense[steps.mine], features)
            loss.backward()

    ranks(2, rank_main)


def test_a_table_that_is_frozen_in_one_replica_is_averaged_in_all() -> None:
    """A collective of other sizes would end the processes."""

    def rank_main() -> None:
        model = replicated(click_model(CONFIGS, optimizer="none"), mixed_plan(1), replicas=Replicas(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if dist.get_rank():
            next(iter(model.named_tables().values())).requires_grad_(False)
        steps = Steps(ROWS)
        for _ in range(2):
            bags, dense, labels = steps.draw()
            click_loss(model, dense[steps.mine], bags[dist.get_rank()], labels[steps.mine]).backward()
            optimizer.step()
        model.sync_replicas()
        assert copies_are_equal(model)

    ranks(2, rank_main)


def test_a_scripted_forward_without_a_backward_is_forgotten_by_a_sync() -> None:
    def rank_main() -> None:
        model = replicated(Scriptable(click_model(CONFIGS)), mixed_plan(1), replicas=Replicas(2))
        program, steps = script(model), Steps(ROWS)
        for has_backward in (False, True, True):
            bags, dense, _ = steps.draw()
            loss = program(dense[steps.mine], bags[dist.get_rank()].kjt()).sum()
            assert model.steps_since_sync == 1
            if has_backward:
                loss.backward()
            else:
                model.sync_replicas()

    ranks(2, rank_main)
