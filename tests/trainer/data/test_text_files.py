"""Text files by pyarrow's rules, encodings, empty files, Hive's partitions, and memory."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import Feature, FeatureSpec, FileClickData, Label, batch_of_request, formats, open_click_data
from shardrec.trainer.data.convert import convert, counted
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.data.tables import check_file, read_blocks
from tests.trainer.data.raw import read

SPEC = FeatureSpec(features=(Feature(name="user", kind="id", rows=10**6), Feature(name="price", kind="dense")))
values = st.text(st.sampled_from('ab"\n, é1'), max_size=6)


def columns_of(path: Path, spec: FeatureSpec, folder: Path) -> dict[str, list[str | None]]:
    """The columns of a file as they are converted, with numbers as they are written."""
    info = counted(check_file(str(path), spec), spec, folder)
    tables = [
        pa.table(block.table) for group in range(len(info.groups)) for block in read_blocks(info, spec, group=group)
    ]
    values = {name: [value for table in tables for value in table[name].to_pylist()] for name in spec.sources}
    return {name: [None if value is None else str(value) for value in column] for name, column in values.items()}


@given(
    rows=st.lists(st.tuples(st.sampled_from("01"), values, values), min_size=1, max_size=8),
    block=st.sampled_from([300, 1 << 20]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "utf-16"]),
    end=st.sampled_from(["\n", "\r\n"]),
    blanks=st.integers(0, 2),
)
def test_fields_are_those_that_python_reads(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, str]],
    block: int,
    encoding: str,
    end: str,
    blanks: int,
) -> None:
    folder, names = tmp_path_factory.mktemp("text"), ["label", 'the "user", all', "price"]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([names, *rows])
    data = (text.getvalue() + end * blanks).encode(encoding)
    (folder / "rows.csv").write_bytes(data)
    settings = {"encoding": "utf-8" if encoding == "utf-8-sig" else encoding, "missing": ()}
    features = (Feature(name="user", column=names[1], kind="id", rows=99), Feature(name="price", kind="dense"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block)
        found = columns_of(folder / "rows.csv", FeatureSpec(features=features, **settings), folder)
    _, *records = [record for record in csv.reader(io.StringIO(data.decode(encoding), newline="")) if record]
    expected = {name: [record[place] or None for record in records] for place, name in enumerate(names)}
    assert found == {name: expected[name] for name in ("label", "price", names[1])}


def test_spaces_after_delimiters(tmp_path: Path) -> None:
    """They are dropped before values where they are before names."""
    (tmp_path / "a.csv").write_text("label, user, price\n1, a b , 2\n0,c, 3\n")
    assert columns_of(tmp_path / "a.csv", SPEC, tmp_path)["user"] == ["a b ", "c"]
    (tmp_path / "b.csv").write_text("label,user,price\n1, a,2\n")
    assert columns_of(tmp_path / "b.csv", SPEC, tmp_path)["user"] == [" a"]


def test_encodings_that_are_not_those_of_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("label,user,price\n1,a,2\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"a\.csv is UTF-16: set encoding: utf-16 in the spec"):
        open_click_data(path, SPEC)
    path.write_bytes("label,user,price,café\n1,a,2,3\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv: the names of its columns are not utf-8: set encoding: NAME"):
        open_click_data(path, SPEC)
    assert read(path, SPEC.model_copy(update={"encoding": "latin-1"})).size == 1
    with pytest.raises(DataError, match=r"a\.csv: the file has another encoding"):
        path.write_bytes("label,user,price\n1,é,2\n".encode("latin-1"))
        read(path, SPEC.model_copy(update={"encoding": "ascii"}))
    with pytest.raises(ConfigError, match="there is no encoding 'latin-0'"):
        parse_spec("encoding: latin-0\nfeatures:\n  - {name: user, kind: id, rows: 9}\n", "spec")


def test_numbers_with_decimal_commas_and_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("label;user;price\ntrue;a,b;1,5\nFalse;7;-2\n")
    batch = read(path, SPEC.model_copy(update={"delimiter": ";", "decimal": ","}))
    assert batch.labels.tolist() == [1, 0]
    assert batch.dense.squeeze(1).tolist() == [1.5, -2]
    ids = batch_of_request([{"user": "a,b", "price": 0}, {"user": 7, "price": 0}], SPEC).sparse.values()
    assert batch.sparse.values().equal(ids)


def test_an_empty_file_among_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,user,price\n1,a,2\n")
    (tmp_path / "b.csv").write_bytes(b"")
    (tmp_path / "c.csv").write_text("label,user,price\n")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"b\.csv is empty, and is left out"):
        assert read(tmp_path, SPEC).size == 1
    with (
        pytest.warns(UserWarning, match="is left out"),
        pytest.raises(DataError, match=r"b\.csv is empty: copy or write"),
    ):
        open_click_data(tmp_path / "b.csv", SPEC)


@given(
    days=st.lists(
        st.sampled_from(["2026-11-28", "7", "7.0", "a b", "__HIVE_DEFAULT_PARTITION__"]), min_size=1, max_size=3
    ),
    kind=st.sampled_from(["parquet", "csv"]),
)
def test_hives_partitions(tmp_path_factory: pytest.TempPathFactory, days: list[str], kind: str) -> None:
    """As the same values in columns of the files."""
    root, spec = (
        tmp_path_factory.mktemp("hive"),
        FeatureSpec(
            label=Label(column="clicked"),
            features=(Feature(name="day", kind="id", rows=10**6), Feature(name="user", kind="id", rows=10**6)),
        ),
    )
    rows = {"day": [], "clicked": [], "user": []}
    for number, day in enumerate(days):
        folder = root / "table" / f"year={number:03}" / f"day={day if day.startswith('__') else quote(day)}"
        folder.mkdir(parents=True)
        users = [f"u{number}", f"u{number + 1}"]
        if kind == "parquet":
            pq.write_table(pa.table({"clicked": [0, 1], "user": users}), folder / "part.parquet")
        else:
            (folder / "part.csv").write_text("clicked,user\n0,{}\n1,{}\n".format(*users))
        (folder / ".part.crc").write_bytes(b"x")
        rows["day"] += [None if day.startswith("__") else day] * 2
        rows["clicked"] += [0, 1]
        rows["user"] += users
    pq.write_table(pa.table(rows), root / "rows.parquet")
    found, expected = (
        open_click_data(path, spec, holdout=0.0, streams=1) for path in (root / "table", root / "rows.parquet")
    )
    (left,), (right,) = (data.train_batches(0, 1, 100) for data in (found, expected))
    assert left.sparse.values().equal(right.sparse.values())
    assert left.labels.equal(right.labels)
    assert found.spec == expected.spec


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "a.csv", []

    def counting(source: str, *args: object, **options: object) -> int:
        made.append(source)
        return convert(source, *args, **options)

    def converted(spec: FeatureSpec = SPEC) -> int:
        data = FileClickData([path], spec, holdout=0.0, folder=tmp_path / "rows")
        assert sum(batch.size for batch in data.train_batches(0, 1, 9)) == data.train_rows
        return len(made)

    monkeypatch.setattr("shardrec.trainer.data.convert.convert", counting)
    path.write_text("label,user,price\n1,a,2\n")
    assert [converted(), converted()] == [1, 1]
    assert converted(SPEC.model_copy(update={"decimal": ","})) == 2
    path.write_text("label,user,price\n1,a,2\n0,b,3\n")
    assert converted() == 3
    os.utime(path, (time.time(), 1))
    assert converted() == 4


CELLS = [
    "7",
    "7.0",
    "07",
    "-0",
    "0",
    "-12",
    "0x1f",
    "1.5",
    "1e3",
    "",
    "NA",
    "a",
    "2026-11-28",
    "true",
    "99999999999999999999",
]


@given(
    cells=st.lists(st.sampled_from(CELLS), min_size=1, max_size=12),
    first=st.integers(0, 9).map(lambda count: ["7", "1234567"] * count),
    feature=st.sampled_from(
        [
            {"kind": "id", "rows": 10**6},
            {"kind": "id", "rows": 10**6, "ids": "number"},
            {"kind": "id", "rows": 10**6, "ids": "hexadecimal"},
            {"kind": "id", "rows": 10**6, "dynamic_ids": {}},
            {"kind": "id", "vocabulary": ["7", "a", "0"]},
            {"kind": "id", "boundaries": [1.25, 7]},
            {"kind": "multi_hot", "rows": 10**6},
            {"kind": "dense", "transform": "log"},
        ]
    ),
    other=st.sampled_from([{"kind": "id", "rows": 9, "column": "x"}, {"kind": "id", "rows": 9, "column": "label"}]),
    more=st.sampled_from([{}, {"group": "x"}, {"event_time": "x"}, {"label": {"column": "x", "above": 1}}]),
    rows=st.integers(1, 5),
)
def test_numbers_in_a_converted_file_are_what_their_texts_are(
    tmp_path_factory: pytest.TempPathFactory,
    cells: list[str],
    first: list[str],
    feature: dict[str, object],
    other: dict[str, object],
    more: dict[str, object],
    rows: int,
) -> None:
    """Also where a text follows on numbers that are written already."""
    folder, cells = tmp_path_factory.mktemp("numbers"), [*first, *cells]
    (folder / "rows.csv").write_text("label,x\n" + "".join(f"1,{cell}\n" for cell in cells))
    pq.write_table(pa.table({"label": [1] * len(cells), "x": cells}), folder / "rows.parquet", row_group_size=rows)
    spec = FeatureSpec.model_validate({"features": [{"name": "x", **feature}, {"name": "y", **other}], **more})
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", 40)
        patch.setattr("shardrec.trainer.data.convert.convert", partial(convert, group_rows=rows))
        for name in ("rows.csv", "rows.parquet"):
            data = FileClickData([folder / name], spec, holdout=0.0, on_bad_row="skip", needs_rows=False, streams=1)
            (*batches,) = data.train_batches(0, 1, 100)
            tensors = [(batch.labels, batch.dense, batch.sparse.values(), batch.groups) for batch in batches]
            found.append(([*map(str, tensors)], data.skipped, data.spec, data.latest))
    assert found[0] == found[1]


def test_missing_values_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,user,price\n1,NA,2\n0,,nan\nbroken\n1,b,\n")
    data = FileClickData([tmp_path / "a.csv"], SPEC, holdout=0.0, on_bad_row="skip")
    data.count()
    assert "missing values: price 2, user 2" in data.describe()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "npz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    program = f"""
import gzip, resource, sys
import numpy as np
from pathlib import Path
from shardrec.trainer.data import Feature, FeatureSpec, formats
from shardrec.trainer.data.convert import convert
formats._BLOCK_BYTES = 1 << 18  # so that a small file has many
path, rows = Path({str(tmp_path)!r}, "rows.{suffix}"), int(sys.argv[1])
kind = "multi_hot" if path.suffix == ".libsvm" else "id"
spec = FeatureSpec(features=(Feature(name="f", column="ids" if kind != "id" else "user", kind=kind, rows=99),))
if path.suffix == ".npz":
    np.savez(path, label=np.zeros(rows, np.int8), user=np.lib.stride_tricks.as_strided(np.zeros(1, int), (rows,), (0,)))
else:
    line = b"1 5:0.5 7:1\\n" if kind != "id" else b"1,user of a name,0.25\\n"
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(b"label,user,price\\n" * (kind == "id"))
        for first in range(0, rows, 10_000):
            file.write(line * 10_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(str(path), spec, path.with_suffix(".parquet"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = {}
    for rows in (500_000, 3_500_000):
        done = subprocess.run([sys.executable, "-c", program, str(rows)], capture_output=True, text=True, check=True)
        grown[rows] = int(done.stdout)
    assert grown[3_500_000] < grown[500_000] + 32_000, grown  # KiB; the larger text has 60 MiB more


LIMIT = 256 << 20
"""Bytes for converting a file of ten times as many, and for a pass over its rows."""

IN_LIMIT = """
import resource, sys
import pyarrow as pa
from pathlib import Path
from shardrec.trainer.data import Feature, FeatureSpec, FileClickData, formats

formats._BLOCK_BYTES = 1 << 20  # of which pyarrow reads 32 ahead
path, limit = Path(sys.argv[1]), int(sys.argv[2])
pa.set_io_thread_count(1)  # a stack for each counts
block = "".join(f"{n % 2},{n:0120},{n % 977}\\n" for n in range(10_000)).encode()
with open(path, "wb") as file:
    file.write(b"label,user,price\\n")
    for _ in range(10 * limit // len(block) + 1):
        file.write(block)
spec = FeatureSpec(features=(Feature(name="user", kind="id", rows=99),))
used = next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]
resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used) + limit,) * 2)
data = FileClickData([path], spec, streams=4)
print(sum(batch.size for batch in data.train_batches(0, 1, 4096)) > 0)
"""


@pytest.mark.slow
def test_a_file_of_ten_times_the_memory(tmp_path: Path) -> None:
    program = [sys.executable, "-c", IN_LIMIT, str(tmp_path / "rows.csv"), str(LIMIT)]
    settings = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | settings)
    assert done.stdout == "True\n", done.stderr
