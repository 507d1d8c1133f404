"""Sharded embedding bags in TorchScript: outputs, gradients and training steps of the eager model on 1, 2, 4 ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import shardrec
from shardrec._torchscript import quiet
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.layout import Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.batches import Bags, random_bags
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import ranks, run_without_shardrec
from tests.scripting.scorers import FromTensors, Scorer


def test_a_rank_without_tables_makes_every_exchange_of_a_frozen_program() -> None:
    """Freezing lets TorchScript see that such a rank has no use for the weights that come."""

    def rank_main() -> None:
        config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
        layout = cuts.table_wise("sparse.t", 9, 8, rank=0)
        plan = shardrec.ShardingPlan(topology=Topology(ranks_per_host=2), tables=(layout,))
        model = shard(Scorer(collection([config], weighted=True), 8), plan).eval()
        with quiet():
            frozen = torch.jit.freeze(shardrec.script(model))
        features = random_bags(Random(dist.get_rank()), feature_rows([config]), 3, weighted=True).kjt()
        with torch.no_grad():
            for _ in range(3):
                assert torch.allclose(frozen(features), model(features))

    ranks(2, rank_main)


def scorer(world_size: int, optimizer: str = "rowwise_adagrad") -> tuple[ShardedModel, Bags, dict[str, int]]:
    """A model with every cut in it, and a batch for this rank."""
    rng = Random(0)
    configs = random_configs(rng, most=4)
    pooled = sum(config.embedding_dim * len(config.feature_names) for config in configs)
    plan = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=world_size))
    model = shard(Scorer(collection(configs, optimizers=optimizer), pooled), plan)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return model, random_bags(Random(rank), feature_rows(configs), 3), feature_rows(configs)


def test_a_bad_batch_stops_all_ranks_with_a_reason() -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        model, good, rows = scorer(2, "sgd")
        scripted = shardrec.script(model.eval())
        key = good.keys[0]
        bad_ids = Bags(keys=good.keys, size=3, ids={**good.ids, key: [[rows[key]], [], []]})
        lacking = Bags(keys=good.keys[1:], size=3, ids=good.ids)
        for bad, words in [
            (bad_ids.kjt(), "rank 1: an id is outside its table"),
            (lacking.kjt(), "rank 1: the input lacks a feature"),
        ]:
            with pytest.raises(torch.jit.Error, match=words):
                scripted(bad if rank == 1 else good.kjt())
            assert torch.allclose(scripted(good.kjt()), model(good.kjt()), atol=1e-6)

    ranks(2, rank_main)


def test_quantized_comms_are_refused() -> None:
    def rank_main() -> None:
        configs = random_configs(Random(1))
        plan = random_plan(Random(1), table_sizes(configs), Topology(ranks_per_host=2))
        model = shard(collection(configs), plan, comms=QuantizedComms(output="fp16"))
        with pytest.raises(shardrec.ConfigError, match="A program that runs without shardrec exchanges fp32"):
            shardrec.script(model.eval())

    ranks(2, rank_main)


LOADED = """
import sys
import torch, fbgemm_gpu
import torch.distributed as dist
assert "shardrec" not in sys.modules and "torchrec" not in sys.modules
model = torch.jit.load(f"{folder}/model{rank}.pt")
keys, values, lengths = torch.load(f"{folder}/batch{rank}.pt")
output = model.from_tensors(keys, values, lengths)
group = dist.new_group([0, 1])
given = 0
for module in model.modules():
    if hasattr(module, "group_name"):
        assert module.group_name != group.group_name
        module.group_name = group.group_name
        given += 1
assert given == 1
assert torch.equal(model.from_tensors(keys, values, lengths), output)
torch.save(output, f"{folder}/output{rank}.pt")
"""


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rowwise_adagrad", "none"))]
)
@pytest.mark.slow
def test_saved_and_loaded_by_processes_that_know_torch_and_fbgemm_only(tmp_path: Path, optimizer: str) -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        model, bags, _ = scorer(2, optimizer)
        features = bags.kjt()
        for _ in range(2):
            model(features).square().sum().backward()
        with torch.no_grad():
            expected = model.eval()(features)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(shardrec.script(FromTensors(model).eval()), tmp_path / f"model{rank}.pt")
        torch.save((features.keys(), features.values(), features.lengths()), tmp_path / f"batch{rank}.pt")
        torch.save(expected, tmp_path / f"expected{rank}.pt")

    ranks(2, rank_main)
    run_without_shardrec(2, LOADED, folder=str(tmp_path))
    for rank in range(2):
        found, expected = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("output", "expected"))
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_learning_rate_set_later_reaches_the_scripted_model() -> None:
    def rank_main() -> None:
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
            model, bags, _ = scorer(1, optimizer)
            scripted = shardrec.script(model)
            features = bags.kjt()
            for group in model.fused_optimizer.param_groups:
                group["lr"] = 0.0
            model.fused_optimizer.push()
            before = {name: one.detach().clone() for name, one in model.module.sparse.named_parameters()}  # type: ignore[union-attr]
            scripted(features).square().sum().backward()
            for name, one in model.module.sparse.named_parameters():  # type: ignore[union-attr]
                assert torch.equal(one, before[name]), (optimizer, name)

    ranks(1, rank_main)


def test_a_program_keeps_the_dense_parameters_that_an_assignment_replaces() -> None:
    """As one of torch. Its tables are the model's."""
    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
    model = shard(Scorer(collection([config], weighted=True), 8))
    program = shardrec.script(model)
    features = random_bags(Random(0), feature_rows([config]), 3, weighted=True).kjt()
    before = model(features).detach()
    values = {name: value * 2 for name, value in model.state_dict().items() if "sparse" not in name}
    model.load_state_dict(values, strict=False, assign=True)
    assert torch.equal(program(features), before)
    again = shardrec.script(model)(features)
    assert torch.equal(again, model(features)) and not torch.equal(again, before)
