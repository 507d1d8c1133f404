"""Raw rows of the Criteo Kaggle challenge as Parquet files, in parts to train, choose and test on. See README.md."""

from __future__ import annotations

import argparse
import gzip
import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from shardrec.errors import ConfigError, DataError

__all__ = ["COLUMNS", "main", "prepare"]

COLUMNS = ("Label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27)))
"""The column names of a raw line, as in the published ``x4`` split of the same rows."""

_TYPES = {name: pa.string() if name.startswith("C") else pa.int64() for name in COLUMNS}
_SCHEMA = pa.schema(list(_TYPES.items()))
_BLOCK_BYTES = 1 << 26
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def prepare(
    files: Sequence[Path], out: Path, *, parts: int, shuffled: bool = False, test: Sequence[Path] = (), seed: int = 0
) -> dict[str, int]:
    """Write ``out/part_0.parquet``, ``part_1.parquet``, ... and, of ``test``, ``out/test.parquet``.

    Args:
        files: raw rows, tab separated, plain or ``.gz`` or ``.xz``, read in this order as one stream.
        out: folder, without Parquet files in it.
        parts: number of parts.
        shuffled: draw each row's part at random. Otherwise the parts are consecutive, with equally many rows.
        test: files for ``test.parquet``. With any, a row that occurs again in them or in ``files`` is written once, in
            the test part if it is there. This keeps all rows in memory: it is for samples.
        seed: of the random parts.

    Returns:
        Rows of each file written, by its name.

    Raises:
        ConfigError: fewer than one part, or a folder with Parquet files.
        DataError: a file that cannot be read, or a row that does not have Criteo's columns.
    """
    if parts < 1:
        raise ConfigError(f"parts is {parts}: give at least 1")
    if any(out.glob("*.parquet")):
        raise ConfigError(f"{out} has Parquet files already: delete them, or give another folder")
    out.mkdir(parents=True, exist_ok=True)
    names = [f"part_{number}" for number in range(parts)] + (["test"] if test else [])
    counts = dict.fromkeys(names, 0)
    seen: set[bytes] | None = set() if test else None
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(pq.ParquetWriter(out / f"{name}.partial", _SCHEMA, compression="zstd"))
            for name in names
        }

        def write(name: str, lines: Sequence[bytes], where: str) -> None:
            if lines:
                writers[name].write_table(_parsed(lines, where))
                counts[name] += len(lines)

        for where, lines in _blocks(test, seen):
            write("test", lines, where)
        total = 0 if shuffled else sum(len(lines) for _, lines in _blocks(files, None if seen is None else set(seen)))
        draws, before = np.random.default_rng(seed), 0
        for where, lines in _blocks(files, seen):
            rows = np.arange(before, before + len(lines))
            place = (draws.random(len(lines)) * parts).astype(np.int64) if shuffled else rows * parts // max(total, 1)
            for number in np.unique(place).tolist():
                write(f"part_{number}", [lines[row] for row in np.flatnonzero(place == number)], where)
            before += len(lines)
    for name in names:
        (out / f"{name}.partial").rename(out / f"{name}.parquet")
    return counts


def _blocks(files: Iterable[Path], seen: set[bytes] | None) -> Iterator[tuple[str, list[bytes]]]:
    """Whole lines, some at a time, and the name of their file.

    Lines in ``seen`` are left out, new lines are added to it.
    """
    for path in files:
        try:
            with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
                while lines := stream.readlines(_BLOCK_BYTES):
                    if seen is not None:
                        fresh = {line.rstrip(b"\r\n"): line for line in lines}
                        lines = [line for key, line in fresh.items() if key not in seen]
                        seen.update(fresh)
                    yield str(path), lines
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"{path} cannot be read ({error}): give a file of raw rows, whole") from error


def _parsed(lines: Sequence[bytes], where: str) -> pa.Table:
    try:
        return csv.read_csv(
            pa.BufferReader(b"".join(lines)),
            read_options=csv.ReadOptions(column_names=list(COLUMNS)),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=csv.ConvertOptions(column_types=_TYPES, null_values=[""], strings_can_be_null=True),
        )
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{where}: {error}: raw rows have {len(COLUMNS)} columns between tabs, without a header: a label, 13 whole "
            "numbers and 26 categories"
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, write the parts, and say how many rows each has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="raw rows, such as train.txt, also .gz, .xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--parts", type=int, default=7, help="7: the days of train.txt, which is in the order of time")
    parser.add_argument("--shuffled", action="store_true", help="draw each row's part at random")
    parser.add_argument("--test", type=Path, nargs="+", default=[], help="files for test.parquet, with repeated rows")
    parser.add_argument("--seed", type=int, default=0, help="of the random parts")
    given = parser.parse_args(arguments)
    counts = prepare(
        given.files, given.out, parts=given.parts, shuffled=given.shuffled, test=given.test, seed=given.seed
    )
    for name, count in counts.items():
        print(f"{given.out / name}.parquet: {count:,} rows")


if __name__ == "__main__":
    main()
