"""Writers: generated rows as Criteo text or Parquet files, for examples, tests and benchmarks.

The rows are the training rows of :class:`~shardrec.trainer.data.SyntheticClickData`, undone to raw columns: a file that
is read back with the same schema gives the same batches, bit for bit. A category is written as a number that hashes
back to its id, chosen among all of them by a hash, so that the text looks (and compresses) like real data.
"""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardrec import ConfigError
from shardrec.files import replacing
from shardrec.trainer.data.planted import RandomStream, SyntheticConfig
from shardrec.trainer.data.synthetic import SyntheticClickData

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 16_384
_PARQUET = (".parquet", ".pq")


def write_criteo_tsv(
    path: str | os.PathLike[str], rows: int, seed: int = 0, *, config: SyntheticConfig | None = None
) -> None:
    """Writes generated rows in Criteo's text format.

    The file appears under its name when it is complete.

    Args:
        path: the file. ``.gz`` and ``.xz`` are compressed.
        rows: number of rows.
        seed: replaces the configuration's.
        config: schema and difficulty. The defaults of :class:`SyntheticConfig` without it.

    Raises:
        ConfigError: fewer than 1 row, a bad seed, or a suffix of Parquet.
    """
    from pyarrow import csv

    path = Path(path)
    if path.suffix.lower() in _PARQUET:
        raise ConfigError(f"path {path} has a suffix of Parquet: call write_parquet, or give .tsv, .tsv.gz or .tsv.xz")
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    schema, blocks = _blocks(rows, seed, config)
    with (
        replacing(path) as temporary,
        temporary.open("wb") as file,
        _packed(file, path.suffix) as packed,
        csv.CSVWriter(packed, schema, write_options=options) as writer,
    ):
        for block in blocks:
            writer.write_table(block)


def write_parquet(
    path: str | os.PathLike[str], rows: int, seed: int = 0, *, config: SyntheticConfig | None = None
) -> None:
    """Writes generated rows as Parquet: ``label`` int8, dense columns int64, categories as hexadecimal strings.

    The file appears under its name when it is complete.

    Args:
        path: the file, ``.parquet`` or ``.pq``.
        rows: number of rows.
        seed: replaces the configuration's.
        config: schema and difficulty. The defaults of :class:`SyntheticConfig` without it.

    Raises:
        ConfigError: fewer than 1 row, a bad seed, or another suffix.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    if path.suffix.lower() not in _PARQUET:
        raise ConfigError(f"path {path} has no suffix of Parquet: name it .parquet, which the reader goes by")
    schema, blocks = _blocks(rows, seed, config)
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for block in blocks:
            writer.write_table(block)


def _blocks(rows: int, seed: int, config: SyntheticConfig | None) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The columns, and the rows as tables of them."""
    import pyarrow as pa

    config = replace(config or SyntheticConfig(), rows=rows, seed=seed)
    dense, sparse = config.schema.dense_names, config.schema.sparse_names
    fields = [("label", pa.int8()), *((name, pa.int64()) for name in dense), *((name, pa.string()) for name in sparse)]
    schema = pa.schema(fields)

    def blocks() -> Iterator[pa.Table]:
        model = SyntheticClickData(config).model
        feature = np.arange(len(dense))
        for start in range(0, rows, _ROWS_AT_ONCE):
            planted = model.rows(RandomStream.TRAIN, start, min(start + _ROWS_AT_ONCE, rows))
            counts = model.dense_raw[feature, planted.quantiles]
            missing = model.dense_missing[feature, planted.quantiles]
            categories = _categories(planted.ids, np.array(config.schema.num_embeddings))
            columns = [pa.array(planted.labels.astype(np.int8))]
            columns += [pa.array(counts[:, f], mask=missing[:, f]) for f in range(len(dense))]
            columns += [
                pa.array([f"{value:08x}" if value >= 0 else None for value in categories[:, f].tolist()], pa.string())
                for f in range(len(sparse))
            ]
            yield pa.Table.from_arrays(columns, schema=schema)

    return schema, blocks()


def _categories(ids: NDArray[np.int64], num_embeddings: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 32-bit number per id (N, F) that ``hash_categories`` maps back to it; -1 for the missing category 0."""
    modulus = num_embeddings - 1
    choices = (2**32 - ids) // modulus + 1
    mixed = (ids * 0x9E3779B1 + np.arange(ids.shape[1]) * 0x85EBCA77) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed ^= mixed >> 13
    return np.where(ids == 0, -1, ids - 1 + modulus * (mixed % choices))


def _packed(file: IO[bytes], suffix: str) -> gzip.GzipFile | lzma.LZMAFile | nullcontext[IO[bytes]]:
    """A stream that compresses into a file by the suffix of its name."""
    if suffix == ".gz":
        # no name and no time in the header: the same rows make the same file
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
    return lzma.open(file, "wb", preset=1) if suffix == ".xz" else nullcontext(file)
