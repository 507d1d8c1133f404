"""``shardrec.DistributedModelParallel``: the codecs of TorchRec's sharders."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import CommOp, QuantizedCommCodecs
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from shardrec.errors import ConfigError
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.modules import DistributedModelParallel, shard
from tests.batches import random_bags
from tests.models import click_model
from tests.modules.clicks import CONFIGS, ROWS, mixed_plan
from tests.ranks import ranks

GPU = torch.device("cuda")  # for CPUs TorchRec's function replaces BF16 by FP16
POOLED = [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER]


def registry(forward: str, backward: str, ops: list[CommOp] | None = None, **options: Any) -> Any:
    config = QCommsConfig(forward_precision=CommType(forward), backward_precision=CommType(backward), **options)
    return get_qcomm_codecs_registry(config, ops, device=GPU)


class BagsAndSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.click = click_model(CONFIGS)
        tables = [EmbeddingConfig(name="s", num_embeddings=10, embedding_dim=4, feature_names=["s"])]
        self.sequences = EmbeddingCollection(tables=tables)


def formats_of(model: nn.Module, *sharders: Any) -> QuantizedComms:
    return DistributedModelParallel(model, device=torch.device("cpu"), sharders=sharders).context.options.comms


@pytest.mark.parametrize(("forward", "backward"), list(itertools.product(["fp32", "fp16", "bf16", "int8"], repeat=2)))
def test_codecs_are_the_formats_of_the_exchange(forward: str, backward: str) -> None:
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry(forward, backward))
    assert formats_of(click_model(CONFIGS), sharder) == QuantizedComms(output=forward, gradient=backward)  # type: ignore[arg-type]


def test_training_with_codecs_is_training_with_comms() -> None:
    def losses(model: nn.Module) -> list[float]:
        steps = []
        for step in range(3):
            bags = random_bags(Random(10 * step + dist.get_rank()), ROWS, 4)
            loss = model(torch.ones(4, 3), bags.kjt()).square().mean()
            loss.backward()
            steps.append(loss.item())
        return steps

    def rank_main() -> None:
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry("fp16", "bf16"))
        coded = losses(DistributedModelParallel(click_model(CONFIGS), plan=mixed_plan(2), sharders=[sharder]))
        comms = QuantizedComms(output="fp16", gradient="bf16")
        assert coded == losses(shard(click_model(CONFIGS), mixed_plan(2), comms=comms))
        assert coded != losses(shard(click_model(CONFIGS), mixed_plan(2)))

    ranks(2, rank_main)


def test_only_the_collectives_of_a_model_s_collections_count() -> None:
    bags = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry("fp16", "bf16", POOLED))
    rows = EmbeddingCollectionSharder(
        qcomm_codecs_registry=registry("fp16", "bf16", [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL])
    )
    expected = QuantizedComms(output="fp16", gradient="bf16")
    assert formats_of(click_model(CONFIGS), bags, EmbeddingCollectionSharder()) == expected
    assert formats_of(BagsAndSequences(), bags, rows) == expected


def test_codecs_that_differ_are_refused_by_name() -> None:
    bags = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry("fp16", "bf16"))
    words = (
        r"different codecs \(EmbeddingBagCollectionSharder, POOLED_EMBEDDINGS_ALL_TO_ALL: fp16 and bf16, .*"
        r"EmbeddingCollectionSharder, SEQUENCE_EMBEDDINGS_ALL_TO_ALL: fp32 and fp32\): give all of them the same$"
    )
    with pytest.raises(ConfigError, match=words):
        formats_of(BagsAndSequences(), bags, EmbeddingCollectionSharder())
    partial = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry("fp16", "fp16", POOLED[:1]))
    with pytest.raises(ConfigError, match=r"REDUCE_SCATTER: fp32 and fp32\): give all of them the same"):
        formats_of(click_model(CONFIGS), partial)


class Rounding:
    """A codec of a user's own."""


@pytest.mark.parametrize(
    ("codecs", "words"),
    [
        (registry("mx4", "bf16"), "mx4"),
        (registry("fp16", "fp8"), "fp8"),
        (registry("fp16", "fp16", backward_loss_scale=8.0), r"fp16 with loss scale 8\.0"),
        ({op.name: QuantizedCommCodecs(forward=Rounding()) for op in POOLED}, "Rounding"),
    ],
    ids=["mx4", "fp8", "loss scale", "own class"],
)
def test_formats_that_shardrec_does_not_have_are_refused_by_name(codecs: Any, words: str) -> None:
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    remedy = "choose from fp32, fp16, bf16, int8, without a loss scale"
    with pytest.raises(ConfigError, match=f"codecs of the formats {words} .*: {remedy}"):
        formats_of(click_model(CONFIGS), sharder)
