"""Pooled rows are written into the windows of shared memory, and these come back without the garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import native
from shardrec.exchange.shared.shared_memory import SharedCollectives
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.models import collection
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not native.has_kernels(), reason="lookups write in place by the C++ operators only")

BATCH, DIM = 2000, 16


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "none"])
def test_a_training_loop_takes_the_same_memory_again(optimizer: str) -> None:
    def rank_main() -> None:
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=DIM, feature_names=[name]) for name in "abc"
        ]
        layouts = (
            cuts.table_wise("a", 50, DIM, rank=0),
            cuts.row_wise("b", 50, DIM, ranks=range(2)),
            cuts.column_wise("c", 50, DIM, ranks=range(2)),
        )
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=layouts)
        sharded = shard(collection(configs, optimizers=optimizer), plan, device=torch.device("cpu"))
        collectives = sharded.context.collectives
        assert isinstance(collectives, SharedCollectives)
        batch = KeyedJaggedTensor(
            keys=list("abc"), values=torch.arange(3 * BATCH) % 50, lengths=torch.ones(3 * BATCH, dtype=torch.int32)
        )
        gc.collect()
        gc.disable()
        try:
            lent = []
            for _ in range(8):
                sharded(batch).values().sum().backward()
                lent.append(collectives.arena.lent_bytes)
        finally:
            gc.enable()
        # Rows and gradients of a step, and what the peer has not said that it is done with.
        step = 2 * BATCH * 3 * DIM * 4
        assert max(lent) <= 3 * step, lent

    ranks(2, rank_main)
