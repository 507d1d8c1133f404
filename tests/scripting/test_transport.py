"""Live programs exchange as their model does; portable ones over the process group, which their files name."""

from __future__ import annotations

import copy
import gc
import os
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardrec
from shardrec._torchscript import quiet
from shardrec.exchange.shared import handshake
from shardrec.exchange.transport import Transport
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from tests.batches import Bags, random_bags
from tests.collective_counts import CollectiveOperators
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import RankDied, ranks
from tests.scripting.lookups import reload
from tests.scripting.scorers import Scorer


def scorer(transport: Transport | None = None) -> tuple[ShardedModel, Bags]:
    """A model with every cut in it, and a batch for this rank."""
    rng = Random(0)
    configs = random_configs(rng, most=4)
    pooled = sum(config.embedding_dim * len(config.feature_names) for config in configs)
    plan = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=dist.get_world_size()))
    model = shard(Scorer(collection(configs, optimizers="adagrad"), pooled), plan, transport=transport)
    return model, random_bags(Random(dist.get_rank()), feature_rows(configs), 3)


def names(program: Any) -> set[str]:
    """The groups that a program's modules name."""
    return {module.group_name for module in program.modules() if hasattr(module, "group_name")}


def trained(run: Any, model: ShardedModel, bags: Bags) -> list[Tensor]:
    """Outputs of three steps, and the weights after them."""
    steps = []
    for _ in range(3):
        scores = run(bags.kjt())
        scores.square().sum().backward()
        steps.append(scores.detach())
    return [*steps, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.slow
def test_two_hosts_of_two_ranks_are_alike_too() -> None:
    def on_two_hosts() -> list[Tensor]:
        real = handshake.host_identity
        handshake.host_identity = lambda: f"{real()} {dist.get_rank() // 2}"
        try:
            model, bags = scorer()
        finally:
            handshake.host_identity = real
        assert len(model.context.collectives.far) == 2  # type: ignore[attr-defined]
        return trained(shardrec.script(model), model, bags)

    def rank_main() -> None:
        plain, bags = scorer("group")
        expected = trained(shardrec.script(plain), plain, bags)
        assert all(torch.equal(*pair) for pair in zip(on_two_hosts(), expected, strict=True))

    ranks(4, rank_main)


def test_a_portable_program_names_the_process_group() -> None:
    def rank_main() -> None:
        model, bags = scorer()
        scripted = shardrec.script(model.eval())
        features = bags.kjt()
        with torch.no_grad(), quiet():
            expected = model(features)
            # To load a program takes seconds: rank 1 runs the first one again with rank 0's.
            loaded = scripted if dist.get_rank() else reload(scripted)
            for program in (scripted, copy.deepcopy(scripted), loaded, torch.jit.freeze(scripted)):
                assert names(program) <= {model.context.collectives.group_name}
                with CollectiveOperators() as called:
                    torch.testing.assert_close(program(features), expected)
                assert called == {"c10d::alltoall_base_": 3}, "header, payload, output"

    ranks(2, rank_main)


def test_a_scripted_model_outlives_the_sharded_one() -> None:
    def rank_main() -> None:
        model, bags = scorer()
        scripted = shardrec.script(model)
        with torch.no_grad():
            expected = scripted(bags.kjt())
            del model
            assert torch.equal(scripted(bags.kjt()), expected)

    ranks(2, rank_main)


def test_a_rank_that_dies_ends_the_others_steps() -> None:
    def rank_main() -> str:
        model, bags = scorer()
        scripted = shardrec.script(model)
        scripted(bags.kjt()).sum().backward()
        scores = scripted(bags.kjt())
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(3)
        words = r"the \S+ exchange (failed, because rank 1's process \d+ has ended|cannot be made after a failure)"
        with pytest.raises(shardrec.PeerError, match=words):
            scores.sum().backward()
        with pytest.raises(RuntimeError, match=words):
            scripted(bags.kjt())
        return "told"

    # Without the death it would take the group's time limit, which comes after this one.
    told, died = ranks(2, rank_main, expect_death={1}, timeout=90)
    assert told == "told"
    assert isinstance(died, RankDied)


def test_a_live_program_goes_back_twice_and_is_given_back() -> None:
    def rank_main() -> None:
        (one, bags), (two, _) = scorer(), scorer()
        scripted = shardrec.script(one)
        for run in (two, scripted):
            loss = run(bags.kjt()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close(list(one.parameters()), list(two.parameters()))
        kept: Any = next(one for one in scripted.modules() if hasattr(one, "program")).program._kept
        del loss, run
        assert not kept
        scripted(bags.kjt())
        with torch.no_grad():
            scripted(bags.kjt())
        gc.collect()
        assert not kept, "nobody goes back through these"

    ranks(2, rank_main)


def test_a_live_program_says_so_when_it_is_saved() -> None:
    def rank_main() -> None:
        model, _ = scorer()
        scripted = shardrec.script(model.eval(), portable=False)
        for use in (reload, copy.deepcopy, torch.jit.freeze):
            with (
                quiet(),
                pytest.raises(torch.jit.Error, match="neither saved, copied nor frozen: call eval"),
            ):
                use(scripted)  # type: ignore[operator]

    ranks(2, rank_main)
