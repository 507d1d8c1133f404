"""A small schema, and raw lines for it, for the tests of the readers."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardrec.trainer.data import (
    ClickBatch,
    ClickSchema,
    Feature,
    FeatureSpec,
    FileClickData,
    Label,
    SyntheticConfig,
    click_spec,
    open_click_data,
)
from shardrec.trainer.data.vocabulary import count_vocabularies

SCHEMA = ClickSchema(dense_names=("int_1", "int_2"), sparse_names=("cat_1", "cat_2"), num_embeddings=(11, 1000))
SPEC = click_spec(SCHEMA)
LINES = FeatureSpec(
    label=Label(column="label", above=0),
    group="qid",
    features=(Feature(name="x", kind="weighted", column="ids", weights="values", rows=1000, ids="number"),),
)
SMALL = ClickSchema(
    dense_names=("x", "y"), sparse_names=("a", "b", "c", "d"), num_embeddings=(30, 200, 40, 5)
)  # fmt: skip
SMALL_CONFIG = SyntheticConfig(rows=100, holdout_rows=20_000, schema=SMALL, pairs=1)


def line(number: int) -> bytes:
    """A good line that can be told from all others by its first integer."""
    return b"%d\t%d\t\t%08x\t" % (number % 2, number, number * 2654435761 % 2**32)


def lines(count: int) -> bytes:
    """``count`` good lines."""
    return b"".join(line(number) + b"\n" for number in range(count))


def write(path: Path, text: bytes) -> Path:
    """Writes ``text``, compressed by the suffix of ``path``."""
    if path.suffix == ".gz":
        text = gzip.compress(text)
    elif path.suffix == ".xz":
        text = lzma.compress(text)
    path.write_bytes(text)
    return path


def damage(path: Path, group: int, column: int) -> None:
    """Writes zeros over the end of a Parquet file's column chunk."""
    import pyarrow.parquet as pq

    chunk = pq.read_metadata(path).row_group(group).column(column)
    with path.open("r+b") as file:
        file.seek((chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size * 2 // 3)
        file.write(bytes(chunk.total_compressed_size // 3))


def equal(left: ClickBatch, right: ClickBatch) -> bool:
    """Whether two batches are the same, bit for bit."""
    return (
        left.labels.equal(right.labels)
        and left.dense.equal(right.dense)
        and left.sparse.keys() == right.sparse.keys()
        and left.sparse.values().equal(right.sparse.values())
        and left.sparse.lengths().equal(right.sparse.lengths())
    )


def first_integers(batches: Sequence[ClickBatch]) -> list[int]:
    """What stood in ``int_1`` of each row (``exp(x) - 3``), from 0 to some thousands."""
    return [round(value) for batch in batches for value in (batch.dense[:, 0].double().exp() - 3).tolist()]


def read(path: Path, spec: FeatureSpec, **options: Any) -> ClickBatch:
    (batch,) = open_click_data(path, spec, holdout=0.0, **options).train_batches(0, 1, 10_000)
    return batch


def vocabularies(paths: Sequence[Path], spec: FeatureSpec, **options: Any) -> dict[str, list[str]]:
    """The vocabularies from data of some files."""
    data = FileClickData(paths, spec, holdout=0.0)
    data.count()
    return count_vocabularies(data.files, data.spec, **options)


def spread(number: int) -> int:
    """SplitMix64's finalizer, in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number % 2**64 ^ number % 2**64 >> shift) * factor
    return number % 2**64 ^ number % 2**64 >> 31
