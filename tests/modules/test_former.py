"""Former parameters of ``shardrec.shard``: each still works, with a warning that names the record that has it now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrec
from shardrec.errors import ConfigError
from shardrec.modules import Replicas, ReplicatedModel, Servers, ShardedModel
from shardrec.modules.deprecated import records_of
from tests.models import click_model
from tests.modules.clicks import CONFIGS, mixed_plan
from tests.ranks import ranks

REPLICAS = r"shard\(\) takes replicas=shardrec\.Replicas\(count, sync_every=\.\.\., sync_optimizer=\.\.\.\), not "
SERVERS = r"shard\(\) takes servers=shardrec\.Servers\(names, staleness=\.\.\., timeout_s=\.\.\.\), not "

FORMER: list[tuple[dict[str, Any], Replicas | None, Servers | None, str]] = [
    ({"replicas": 2}, Replicas(2), None, REPLICAS + "a number"),
    ({"replicas": 2, "sync_every": 4}, Replicas(2, sync_every=4), None, REPLICAS + "sync_every"),
    ({"replicas": 1, "sync_optimizer": False}, Replicas(1, sync_optimizer=False), None, REPLICAS + "sync_optimizer"),
    ({"sync_every": 1}, None, None, REPLICAS + "sync_every"),
    ({"servers": ["a", "b"]}, None, Servers(["a", "b"]), SERVERS + "a number or a list"),
    ({"servers": ["a"], "staleness": 1}, None, Servers(["a"], staleness=1), SERVERS + "staleness"),
    ({"servers": ["a"], "timeout_s": 5.0}, None, Servers(["a"], timeout_s=5.0), SERVERS + "timeout_s"),
    ({"staleness": 3}, None, None, SERVERS + "staleness"),
]


@pytest.mark.parametrize(("given", "replicas", "servers", "words"), FORMER)
def test_each_becomes_a_record(
    given: dict[str, Any], replicas: Replicas | None, servers: Servers | None, words: str
) -> None:
    former = dict(given)
    with pytest.warns(DeprecationWarning, match=words):
        assert records_of(former.pop("replicas", None), former.pop("servers", None), former) == (replicas, servers)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_records_are_taken_without_a_warning() -> None:
    assert records_of(None, None, {}) == (None, None)
    assert records_of(Replicas(2), Servers(["a"]), {}) == (Replicas(2), Servers(["a"]))


def test_what_never_was_and_what_is_said_twice() -> None:
    model = click_model(CONFIGS)
    with pytest.raises(TypeError, match=r"shard\(\) got an unexpected keyword argument 'replica'"):
        shardrec.shard(model, mixed_plan(1), replica=2)
    with pytest.raises(TypeError, match="'sync_every'"):
        shardrec.shard(model, mixed_plan(1), replicas=Replicas(1), sync_every=2)
    with pytest.raises(TypeError, match="'timeout_s'"):
        shardrec.shard(model, mixed_plan(1), servers=Servers(["a"]), timeout_s=2.0)
    with pytest.raises(ConfigError, match=r"'sync_every': 2.* without replicas"):
        shardrec.shard(model, mixed_plan(1), sync_every=2)


def test_a_model_of_former_parameters_has_its_replicas() -> None:
    def rank_main() -> Replicas:
        former: dict[str, Any] = {"replicas": 2, "sync_every": 3}
        with pytest.warns(DeprecationWarning, match=REPLICAS) as warned:
            model = shardrec.shard(click_model(CONFIGS), mixed_plan(1), **former)
        assert warned[0].filename == __file__
        assert isinstance(model, ReplicatedModel)
        assert dist.get_world_size() == 2
        return model.replica_options

    assert ranks(2, rank_main) == [Replicas(2, sync_every=3)] * 2


def test_servers_that_cannot_be() -> None:
    for names, options, words in [
        ([], {}, "names of Servers is"),
        (["a", ["b", "a"]], {}, "each once"),
        ([[], "a"], {}, "a server for each rank"),
        (["a"], {"staleness": -1}, "staleness=-1"),
        (["a"], {"timeout_s": 0.0}, r"timeout_s=0\.0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Servers(names, **options)  # type: ignore[arg-type]


def test_dense_parameters_are_what_an_ordinary_optimizer_trains() -> None:
    def rank_main() -> tuple[set[str], set[str]]:
        model: ShardedModel = shardrec.shard(click_model(CONFIGS), mixed_plan(2))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {names[id(parameter)] for parameter in model.dense_parameters()}, set(model.fused_optimizer.params)

    dense = {name for name, _ in click_model(CONFIGS).named_parameters() if "embedding_bags" not in name}
    for own, fused in ranks(2, rank_main):
        assert own == dense
        assert "sparse.embedding_bags.tags.weight" in fused, "the replicated table has a fused optimizer, too"
    plain = shardrec.shard(click_model(CONFIGS, optimizer="none"), mixed_plan(1))
    assert set(map(id, plain.dense_parameters())) == set(map(id, plain.parameters()))
    torch.optim.Adam(plain.dense_parameters())
