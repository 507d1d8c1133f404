from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.trainer.data import click_spec, hash_categories, open_click_data, write_criteo_tsv, write_parquet
from shardrec.trainer.data.write import _categories
from tests.trainer.data.raw import SMALL, SMALL_CONFIG, equal


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.tsv.xz", "a.parquet"])
def test_a_file_gives_the_batches_of_the_generator(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_rows = write_parquet if name.endswith("parquet") else write_criteo_tsv
    write_rows(path, 100, 7, config=SMALL_CONFIG)
    written = open_click_data(path, spec=click_spec(SMALL), holdout=0.0)
    generated = open_click_data(replace(SMALL_CONFIG, seed=7))
    for rank in range(2):
        pairs = zip(written.train_batches(rank, 2, 16), generated.train_batches(rank, 2, 16), strict=True)
        assert all(equal(left, right) for left, right in pairs)


@given(size=st.integers(2, 2**31 - 1), ids=st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=20))
def test_every_category_hashes_back(size: int, ids: list[int]) -> None:
    known = np.array([each % size for each in ids])[:, None]
    categories = _categories(known, np.array([size]))
    assert categories.max() < 2**32
    back = hash_categories(categories.astype(np.uint64), categories < 0, np.array([size], np.uint64))
    assert (back == known).all()


def test_the_same_rows_make_the_same_file(tmp_path: Path) -> None:
    for name in ("a.tsv.gz", "b.tsv.gz"):
        write_criteo_tsv(tmp_path / name, 50, config=SMALL_CONFIG)
    assert (tmp_path / "a.tsv.gz").read_bytes() == (tmp_path / "b.tsv.gz").read_bytes()


def test_longer_files_begin_alike(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "a.tsv", 20, config=SMALL_CONFIG)
    write_criteo_tsv(tmp_path / "b.tsv", 17_000, config=SMALL_CONFIG)
    text = (tmp_path / "b.tsv").read_bytes()
    assert text.startswith((tmp_path / "a.tsv").read_bytes())
    assert text.count(b"\n") == 17_000


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    for write_rows, name in ((write_criteo_tsv, "a.tsv"), (write_parquet, "a.parquet")):
        with pytest.raises(ConfigError, match="rows is 0"):
            write_rows(tmp_path / name, 0, config=SMALL_CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_suffixes_of_the_other_writer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.parquet has a suffix of Parquet: call write_parquet"):
        write_criteo_tsv(tmp_path / "a.parquet", 5, config=SMALL_CONFIG)
    with pytest.raises(ConfigError, match=r"a\.tsv has no suffix of Parquet: name it \.parquet"):
        write_parquet(tmp_path / "a.tsv", 5, config=SMALL_CONFIG)
