"""A backward that computes a forward with dynamic ids again reads the rows of the forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec import DynamicIds
from shardrec.errors import ConfigError
from shardrec.pipeline import Pipeline
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 6, 4


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a"])
        config.init_fn = partial(nn.init.constant_, val=0.25)
        self.bags = EmbeddingBagCollection(tables=[config])

    def forward(self, features: KeyedJaggedTensor, scale: Tensor | None = None) -> Tensor:
        pooled: Tensor = self.bags(features).values()
        return pooled if scale is None else pooled * scale


def sharded(options: DynamicIds, *, fused: bool = True) -> Any:
    model = Pooled()
    if fused:
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    return shardrec.shard(model, dynamic_ids={"bags.t": options})


def features(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


ADMITS = DynamicIds(evict="never", admit_after=2, fallback_rows=1)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_are_those_of_the_forward_though_ids_were_admitted_since(count: int) -> None:
    def run() -> None:
        def trained(*, again: bool) -> tuple[list[Tensor], Any]:
            model, scale, values = sharded(ADMITS), torch.ones((), requires_grad=True), []
            for ids in ((7, 8, 7), (8, 9, 9), (7, 9, 11)):
                outputs = []
                for order in (ids, ids[:2], ids[1:]):  # three forwards, of which the later ones admit ids
                    batch = features(*order)
                    outputs.append(
                        checkpoint(model, batch, scale, use_reentrant=True) if again else model(batch, scale)
                    )
                sum((number + 1) * output.sum() for number, output in enumerate(outputs)).backward()  # type: ignore[union-attr]
                values += [output.detach() for output in outputs]
            return values, model.id_stats()

        (with_it, stats), (without, expected) = trained(again=True), trained(again=False)
        for value, other in zip(with_it, without, strict=True):
            torch.testing.assert_close(value, other)
        assert stats == expected

    ranks(count, run)


def test_an_error_if_rows_were_given_to_other_ids_since() -> None:
    model, scale = sharded(DynamicIds(evict="lru")), torch.ones((), requires_grad=True)
    outputs = [checkpoint(model, features(*ids), scale, use_reentrant=True) for ids in ((1, 2, 3), (4, 5, 6), (7, 8))]
    with pytest.raises(ConfigError, match=r"'bags.t' had rows that later forwards gave to other ids. Call torch"):
        sum(output.sum() for output in outputs).backward()
    checkpoint(model, features(7, 8), scale, use_reentrant=True).sum().backward()


def test_a_forward_in_evaluation_is_computed_again() -> None:
    model, scale = sharded(DynamicIds(evict="lru")), torch.ones((), requires_grad=True)
    model(features(1, 2))
    model.eval()
    before = model(features(1, 5)).detach()
    checkpoint(model, features(1, 5), scale, use_reentrant=True).sum().backward()
    torch.testing.assert_close(model(features(1, 5)), before - torch.tensor([[0.5], [0.0]]))


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_pipeline(mode: str) -> None:
    def trained(checkpoint: str) -> list[Any]:
        model, values = sharded(ADMITS, fused=False), []
        torch.manual_seed(3)
        pipeline = Pipeline(nn.Sequential(model, nn.Linear(DIM, 1)), [1, 1], chunks=2, checkpoint=checkpoint)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = pipeline.step(features(1, 2, 1, 3), torch.zeros(4, 1), loss_fn=nn.functional.mse_loss)
            optimizer.step()
            values.append(float(loss))
        return [*values, model.id_stats()]

    assert trained(mode) == trained("never")


def test_bad_ids_of_a_pipeline_are_counted_once() -> None:
    model = shardrec.shard(Pooled(), on_bad_id="wrap")
    pipeline = Pipeline(nn.Sequential(model, nn.Linear(DIM, 1)), [1, 1], chunks=2, checkpoint="always")
    pipeline.step(features(101, 2, 101, 3), torch.zeros(4, 1), loss_fn=nn.functional.mse_loss)
    assert model.bad_ids() == {"a": 2}
