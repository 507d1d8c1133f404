"""Scripted models exchange through shared memory where eager ones do, and their files name the process group."""

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
from shardrec.serve import share_memory
from tests.batches import Bags, random_bags
from tests.collective_counts import CollectiveOperators, CountCollectives
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import RankDied, ranks
from tests.scripting.lookups import reload
from tests.scripting.scorers import Scorer

SHARED = "shardrec::all_to_all"


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


def through_shared_memory(run: Any, *args: Any) -> tuple[int, int]:
    """All-to-alls of a call: through shared memory, and of any kind."""
    with CollectiveOperators() as called:
        run(*args)
    assert called == called.all_to_alls()
    return called[SHARED], called.total()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_transports_are_alike_to_the_last_bit(world_size: int) -> None:
    """Through shared memory and the process group, portable and not."""

    def rank_main() -> None:
        found: dict[bool, list[list[Tensor]]] = {True: [], False: []}
        for transport in ("auto", "group"):
            for portable in (True, False):
                model, bags = scorer(transport)  # type: ignore[arg-type]
                scripted = shardrec.script(model, portable=portable)
                found[portable].append(trained(scripted, model, bags))
                if portable:
                    inside, all_of_them = through_shared_memory(scripted, bags.kjt())
                    assert all_of_them == 3, "header, payload, output"
                    assert inside == (3 if transport == "auto" else 0)
                else:
                    with CountCollectives() as counts:
                        scripted(bags.kjt()).sum().backward()
                    assert counts == {"all_to_all": 4}, "header, payload, output, gradient"
        for near, far in found.values():
            assert all(torch.equal(*pair) for pair in zip(near, far, strict=True))
        torch.testing.assert_close(found[True], found[False])

    ranks(world_size, rank_main)


def test_two_hosts_of_two_ranks_are_alike_too() -> None:
    def near(portable: bool) -> list[Tensor]:
        real = handshake.host_identity
        handshake.host_identity = lambda: f"{real()} {dist.get_rank() // 2}"
        try:
            model, bags = scorer()
        finally:
            handshake.host_identity = real
        assert len(model.context.collectives.far) == 2  # type: ignore[attr-defined]
        return trained(shardrec.script(model, portable=portable), model, bags)

    def rank_main() -> None:
        for portable in (True, False):
            plain, bags = scorer("group")
            expected = trained(shardrec.script(plain, portable=portable), plain, bags)
            assert all(torch.equal(*pair) for pair in zip(near(portable), expected, strict=True))

    ranks(4, rank_main)


def test_the_environment_rules_scripted_models_too() -> None:
    def rank_main() -> None:
        os.environ["SHARDREC_TRANSPORT"] = "group"
        model, _ = scorer()
        assert names(shardrec.script(model)) == {model.context.collectives.group_name}

    ranks(2, rank_main)


def test_a_file_names_the_process_group() -> None:
    def rank_main() -> None:
        model, bags = scorer()
        plain = model.context.collectives.group_name
        scripted = shardrec.script(model)
        assert names(scripted) == {model.context.collectives.operator_group}
        assert names(scripted) != {plain}
        with quiet():
            assert names(copy.deepcopy(scripted)) == {plain}
            assert through_shared_memory(torch.jit.freeze(shardrec.script(model.eval())), bags.kjt()) == (0, 3)
        loaded = reload(scripted)
        assert names(loaded) == names(reload(loaded)) == {plain}
        features = bags.kjt()
        with torch.no_grad():
            assert torch.equal(loaded(features), scripted(features))
        assert through_shared_memory(loaded, features) == (0, 3)
        assert share_memory(loaded) is loaded
        assert through_shared_memory(loaded, features) == (3, 3)
        connected = names(loaded)
        assert connected.isdisjoint({plain} | names(scripted)), "it has connections of its own"
        assert names(share_memory(loaded)) == connected, "once is enough"
        with torch.no_grad():
            assert torch.equal(loaded(features), scripted(features))
        assert names(reload(loaded)) == {plain}
        assert names(share_memory(reload(loaded), transport="group")) == {plain}

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


def test_share_memory_refuses_what_it_cannot_change() -> None:
    with pytest.raises(shardrec.ConfigError, match=r"takes a loaded program, not int"):
        share_memory(3)  # type: ignore[type-var]

    def rank_main() -> None:
        model, _ = scorer()
        loaded: Any = reload(shardrec.script(model))
        loaded.sparse.input.process_group.group_name = "another"
        with pytest.raises(shardrec.ConfigError, match="over the process group 'another', which this process has not"):
            share_memory(loaded)

    ranks(2, rank_main)


@pytest.mark.parametrize("portable", [True, False])
def test_a_rank_that_dies_ends_the_others_steps(portable: bool) -> None:
    def rank_main() -> str:
        model, bags = scorer()
        scripted = shardrec.script(model, portable=portable)
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


def test_what_is_not_portable_goes_back_twice_and_is_given_back() -> None:
    def rank_main() -> None:
        (one, bags), (two, _) = scorer(), scorer()
        scripted = shardrec.script(one, portable=False)
        for run in (shardrec.script(two), scripted):
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


def test_what_is_not_portable_says_so_when_it_is_saved() -> None:
    def rank_main() -> None:
        model, _ = scorer()
        scripted = shardrec.script(model.eval(), portable=False)
        for use in (reload, copy.deepcopy, torch.jit.freeze):
            with (
                quiet(),
                pytest.raises(torch.jit.Error, match="neither saved, copied nor frozen: script it again with"),
            ):
                use(scripted)  # type: ignore[operator]

    ranks(2, rank_main)
