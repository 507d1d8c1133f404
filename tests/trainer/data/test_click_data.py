from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError
from shardrec.trainer.data import (
    ClickBatch,
    ClickData,
    FileClickData,
    SyntheticClickData,
    criteo_schema,
    open_click_data,
)
from tests.trainer.data.raw import SCHEMA, SMALL, SMALL_CONFIG, SPEC, equal, lines, write


def rows_in(data: ClickData) -> int:
    """Typed with the protocol, so that the type checker sees both kinds satisfy it."""
    return sum(batch.size for batch in data.train_batches(0, 1, 16)) + sum(
        batch.size for batch in data.holdout_batches(0, 1, 4096)
    )


def test_both_kinds_have_one_interface(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tsv", lines(40))
    files, synthetic = open_click_data(str(path), spec=SPEC), open_click_data(SMALL_CONFIG)
    assert isinstance(files, FileClickData)
    assert isinstance(synthetic, SyntheticClickData)
    assert (rows_in(files), rows_in(synthetic)) == (40, 20_100)
    assert (files.schema, synthetic.schema) == (SCHEMA, SMALL_CONFIG.schema)
    assert (files.train_rows, synthetic.train_rows) == (37, 100)
    assert files.describe()
    assert synthetic.describe()


def test_a_file_has_criteos_schema_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tsv", lines(1))
    assert open_click_data([path]).schema == criteo_schema()


def test_options_of_files_do_not_go_with_generated_data() -> None:
    with pytest.raises(ConfigError, match="holdout, spec given with a SyntheticConfig: set its own fields instead"):
        open_click_data(SMALL_CONFIG, spec=SPEC, holdout=0.1)


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
