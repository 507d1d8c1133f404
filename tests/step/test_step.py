"""Two threads in one model: refused, for the ranks' exchanges match by their order."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.models import ClickModel, click_model
from tests.modules.faults import CONFIGS, ROWS


class Slow(ClickModel):
    """Another thread calls it while it is in its forward."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = super().forward(dense, features)
        self.meanwhile()
        return logits


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    model = click_model(CONFIGS)
    model.__class__ = Slow
    tables = [cuts.table_wise(f"sparse.{one.name}", one.num_embeddings, one.embedding_dim, rank=0) for one in CONFIGS]
    sharded = shard(model, ShardingPlan(topology=Topology(), tables=tuple(tables)))
    keys = list(ROWS)
    inputs = (
        torch.ones(1, 3),
        KeyedJaggedTensor(keys=keys, values=torch.ones(len(keys)).long(), lengths=torch.ones(len(keys)).long()),
    )
    errors: list[BaseException] = []

    def call() -> None:
        try:
            sharded.sparse(inputs[1])
        except ConfigError as error:
            errors.append(error)

    def meanwhile() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    model.meanwhile = meanwhile
    first = sharded(*inputs)
    assert "rank 0: two threads call sharded modules of one model concurrently" in str(errors[0])
    model.meanwhile = lambda: None
    call()
    assert len(errors) == 1
    assert torch.equal(first, sharded(*inputs))
