from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.trainer.data import ClickBatch, open_click_data
from tests.trainer.data.raw import SMALL, SMALL_CONFIG, equal


@pytest.fixture(scope="module")
def batch() -> ClickBatch:
    return next(open_click_data(SMALL_CONFIG).train_batches(0, 1, 6))


def test_shapes_and_types(batch: ClickBatch) -> None:
    assert batch.size == 6
    assert (batch.dense.shape, batch.dense.dtype) == ((6, 2), torch.float32)
    assert (batch.labels.shape, batch.labels.dtype) == ((6,), torch.float32)
    assert batch.sparse.keys() == list(SMALL.sparse_names)
    assert batch.sparse.stride() == 6
    assert (batch.sparse.values().dtype, batch.sparse.lengths().dtype) == (torch.int64, torch.int64)


def test_to_moves_every_tensor(batch: ClickBatch) -> None:
    moved = batch.to("meta")
    assert moved.size == batch.size
    assert {moved.dense.device.type, moved.labels.device.type, moved.sparse.values().device.type} == {"meta"}
    assert equal(batch.to(torch.device("cpu"), non_blocking=True), batch)


def test_pin_memory_keeps_the_contents(batch: ClickBatch) -> None:
    pinned = batch.pin_memory()
    assert equal(pinned, batch)
    assert pinned.dense.is_pinned() == torch.accelerator.is_available()


def test_an_embedding_bag_collection_takes_it(batch: ClickBatch) -> None:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(SMALL.sparse_names, SMALL.num_embeddings, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables)
    pooled = collection(batch.sparse)["b"]
    expected = collection.embedding_bags["t_b"].weight[batch.sparse["b"].values()]
    torch.testing.assert_close(pooled, expected)
