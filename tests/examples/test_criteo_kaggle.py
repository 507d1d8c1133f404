"""The Criteo example: raw rows in parts, and its own settings on generated rows and on the sample of real ones."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv

from examples.criteo_kaggle import prepare as example
from examples.criteo_kaggle.prepare import COLUMNS, prepare
from shardrec.errors import ConfigError, DataError
from shardrec.trainer.cli import main
from shardrec.trainer.data import FileClickData, criteo_schema, load_spec, write_criteo_tsv
from shardrec.trainer.run import load_config
from tests.ranks import ranks

FOLDER = Path(example.__file__).parent
SPEC = FOLDER / "features.yaml"
SAMPLE = Path(os.environ.get("SHARDREC_DATA", "../shared/data"), "criteo_raw_sample").resolve()


def line(number: int) -> bytes:
    """A row that can be told from all others, with something missing."""
    counts = [str(number), "", *(str(number % (3 + place)) for place in range(11))]
    return "\t".join([str(number % 2), *counts, "", *(f"{number * 31 + place:08x}" for place in range(25))]).encode()


def raw(path: Path, numbers: list[int], end: bytes = b"\n") -> Path:
    text = b"\n".join(map(line, numbers)) + end * bool(numbers)
    packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text))
    return path


def numbers_in(path: Path) -> list[int]:
    return pq.read_table(path)["I1"].to_pylist()


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    parts=st.integers(1, 5),
    shuffled=st.booleans(),
    block=st.integers(1, 2000),
)
def test_every_row_is_in_one_part(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], parts: int, shuffled: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    files, first = [], 0
    for place, size in enumerate(sizes):
        suffix = (".tsv", ".tsv.gz", ".tsv.xz")[place]
        end = b"" if place == 1 else b"\n"  # a file may end without a line feed
        files.append(raw(folder / f"rows_{place}{suffix}", list(range(first, first + size)), end))
        first += size
    found = []
    for place, size_of_block in enumerate((1 << 26, block)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(example, "_BLOCK_BYTES", size_of_block)
            counts = prepare(files, folder / str(place), parts=parts, shuffled=shuffled)
        found.append([numbers_in(folder / str(place) / f"part_{number}.parquet") for number in range(parts)])
        assert [counts[f"part_{number}"] for number in range(parts)] == list(map(len, found[-1]))
    assert found[0] == found[1], "blocks make no difference"
    everything = [number for part in found[0] for number in part]
    assert sorted(everything) == list(range(first))
    if not shuffled:
        assert everything == list(range(first))
        assert max(map(len, found[0])) - min(map(len, found[0])) <= 1


def test_what_cannot_be_prepared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = raw(tmp_path / "good.tsv", [1, 2, 3])
    short = tmp_path / "short.tsv"
    short.write_bytes(line(1) + b"\n0\t1\n")
    text = tmp_path / "text.tsv"
    text.write_bytes(line(1).replace(b"1", b"one", 1) + b"\n")
    cut = tmp_path / "cut.tsv.xz"
    cut.write_bytes(lzma.compress(line(1))[:-9])
    for path, words in (
        (short, r"short\.tsv: .*Expected 40 columns, got 2.*raw rows have 40 columns between tabs"),
        (text, r"text\.tsv: .*a label, 13 whole numbers and 26 categories"),
        (cut, r"cut\.tsv\.xz cannot be read"),
        (tmp_path / "none.txt", r"none\.txt cannot be read"),
    ):
        with pytest.raises(DataError, match=words):
            prepare([good, path], tmp_path / "out", parts=1)
        assert not list((tmp_path / "out").glob("*.parquet")), "no half of the rows is taken for all"
    example.main([str(good), "--out", str(tmp_path / "out"), "--parts", "3"])
    assert f"{tmp_path}/out/part_2.parquet: 1 rows" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has Parquet files already"):
        prepare([good], tmp_path / "out", parts=1)
    with pytest.raises(ConfigError, match="parts is 0"):
        prepare([good], tmp_path / "other", parts=0)


def test_the_spec_reads_the_parts_and_the_published_split_alike(tmp_path: Path) -> None:
    """The split's files are CSV with a header line of the same names."""
    spec = load_spec(SPEC)
    assert {one.source for one in spec.features} == set(COLUMNS[1:])
    assert len(spec.dense) == 13
    sizes = {one.name: one.num_embeddings for one in spec.sparse if one.coding == "hexadecimal"}
    assert list(sizes) == [f"C{number}" for number in range(1, 27)]
    for distinct, size in zip(criteo_schema(max_embeddings=1_000_000).num_embeddings, sizes.values(), strict=True):
        assert size >= min(distinct, 1_000_000), "fewer rows than values, and than what hashing is for"
    write_criteo_tsv(tmp_path / "raw.tsv", 300)
    prepare([tmp_path / "raw.tsv"], tmp_path / "rows", parts=1)
    table = pq.read_table(tmp_path / "rows" / "part_0.parquet")
    assert table.schema.names == list(COLUMNS)
    csv.write_csv(table, tmp_path / "train.csv", csv.WriteOptions(quoting_style="none"))
    batches = [
        next(FileClickData([path], spec, holdout=0.0).train_batches(0, 1, 300))
        for path in (tmp_path / "rows" / "part_0.parquet", tmp_path / "train.csv")
    ]
    assert torch.equal(batches[0].dense, batches[1].dense)
    assert torch.equal(batches[0].sparse.values(), batches[1].sparse.values())
    assert torch.equal(batches[0].labels, batches[1].labels)
    missing = torch.tensor([value is None for value in table["I1"].to_pylist()])
    assert missing.any()
    assert torch.equal(batches[0].sparse["I1_bucket"].values() == 0, missing)


def trained(folder: Path, config: Path, *flags: str) -> dict[str, float]:
    """The final metrics of a run of two ranks with the example's own settings; paths are those of a checkout."""

    def train(folder: Path) -> None:
        os.chdir(folder)
        sys.argv = ["shardrec", "train", str(config), *flags]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0

    (folder / "examples").symlink_to(FOLDER.parent)
    ranks(2, train, folder)
    out = folder / load_config(config).output.out  # type: ignore[operator]
    found: dict[str, float] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["final"]
    return found


@pytest.mark.slow
def test_the_settings_of_the_full_set_train(tmp_path: Path) -> None:
    """On generated rows in its layout: few, so in small steps, and in small tables, as all are saved."""
    write_criteo_tsv(tmp_path / "train.txt", 7000)
    out = tmp_path / "runs" / "criteo_kaggle" / "rows"
    assert set(prepare([tmp_path / "train.txt"], out, parts=7).values()) == {1000}
    small = re.sub(r"rows: [\d_]+", "rows: 1000", SPEC.read_text(encoding="utf-8"))
    (tmp_path / "small.yaml").write_text(small, encoding="utf-8")
    flags = ("--features", "small.yaml", "--global-batch-size", "128", "--lr", "2e-3")
    found = trained(tmp_path, FOLDER / "run.yaml", *flags)
    assert found["rows"] == 1000
    assert found["normalized_entropy"] < 1
    assert found["auc"] > 0.6


@pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"there is no {SAMPLE}: SHARDREC_DATA names the folder of data")
@pytest.mark.slow
def test_the_sample_does_better_than_a_constant(tmp_path: Path) -> None:
    files = [SAMPLE / f"{name}.tsv.xz" for name in ("kaggle_head", "x4_valid_sample")]
    out = tmp_path / "runs" / "criteo_sample" / "rows"
    counts = prepare(files, out, parts=5, shuffled=True, test=[SAMPLE / "x4_test_sample.tsv.xz"])
    assert counts["test"] == 3999
    assert sum(counts.values()) == 9617
    found = trained(tmp_path, FOLDER / "sample.yaml", "--checkpoint", "none")
    assert found["rows"] == 3999
    assert found["normalized_entropy"] < 1
