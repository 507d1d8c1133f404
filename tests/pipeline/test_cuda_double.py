"""Pipelines on CUDA, on tensors that only say that they are there: streams of their own, and one wait a step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch
from tests.batches import Bags, random_bags
from tests.cuda_double import INTERPRETS_TRITON, cuda_double, cuda_is_there
from tests.models import click_model, feature_rows
from tests.modules import clicks
from tests.modules.clicks import CONFIGS, dense_parameters, mixed_plan

HEADER = "step/id_exchange.py"


@pytest.mark.some(1)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_pipeline_waits_between_its_streams(depth: int) -> None:
    """The next batch is copied, and its ids are exchanged, on streams of their own."""
    batches = []
    for step in range(5):
        sparse = random_bags(Random(step), feature_rows(CONFIGS), 3, shuffled=False).kjt()
        batches.append(replace(clicks.batch(step, 0), dense=torch.rand(3, 3), sparse=sparse, labels=torch.ones(3)))

    def steps(device: str) -> TrainPipeline:
        model = shard(click_model(CONFIGS), mixed_plan(1), device=device)
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1, foreach=False)
        return TrainPipeline(model, optimizer, batches, loss_fn=clicks.loss_fn, depth=depth)

    expected = [float(loss) for loss in steps("cpu")]
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        pipeline = steps("cuda:0")
        losses = [float(next(pipeline))]
        double.waits.clear()
        later = [loss.detach() for loss in pipeline]
        assert [one.partition(":")[0] for one in double.waits] == [HEADER] * (4 - (depth > 0)), double.waits
        assert {stream.priority for stream in double.streams} == {-1}
        losses += map(float, later)
        assert losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not INTERPRETS_TRITON, reason="needs Triton and TRITON_INTERPRET=1")
def test_a_pipeline_finds_dynamic_ids_ahead() -> None:
    """On the stream that exchanges ids: no step looks its ids up again, unless some had no row."""
    rng, batches = Random(0), []
    for step in range(6):
        ids = {key: [[rng.randrange(6 + 3 * step) for _ in range(3)] for _ in range(3)] for key in ("f", "g")}
        if step > 3:
            ids = {key: [[0]] * 3 for key in ids}
        sparse = Bags(keys=("f", "g"), size=3, ids=ids).kjt()
        batches.append(ClickBatch(dense=torch.rand(3, 3), sparse=sparse, labels=torch.ones(3)))
    config = EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=8, feature_names=["f", "g"])
    plan = ShardingPlan(topology=Topology(), tables=(cuts.row_wise("sparse.t", 12, 8, ranks=[0, 0]),))
    options = DynamicIds(evict="lru", fallback_rows=1)

    def steps(device: str) -> tuple[ShardedModel, TrainPipeline]:
        model = shard(
            click_model([config], optimizer="adagrad"), plan, device=device, dynamic_ids={"sparse.t": options}
        )
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1, foreach=False)
        return model, TrainPipeline(model, optimizer, batches, loss_fn=clicks.loss_fn, depth=1)

    model, pipeline = steps("cpu")
    expected = [float(loss.detach()) for loss in pipeline]
    counts = model.id_stats()["sparse.t"]
    assert counts["evictions"] and counts["fallbacks"]
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model, pipeline = steps("cuda:0")
        losses, finds = [], []
        for loss in pipeline:
            losses.append(loss.detach())
            finds.append(double.operators["find"])
        # Once for the step, once more where ids had no row, and once for the next step. The last ids are known.
        assert finds == [3, 5, 7, 9, 11, 11]
        assert [float(loss) for loss in losses] == pytest.approx(expected, abs=1e-4)
        assert model.id_stats()["sparse.t"] == counts
