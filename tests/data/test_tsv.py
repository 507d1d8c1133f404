from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.data.compression import detect_kind
from shardrec.data.fault import FaultLog, explain_line
from shardrec.data.rows import ClickRows, join_rows
from shardrec.data.tsv import read_tsv
from shardrec.errors import DataError
from tests.data.raw import SCHEMA, line, lines, write

Value = int | None
Row = tuple[int, list[Value], list[Value]]

raw_rows = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.none() | st.integers(-5, 10**7) | st.integers(-(10**17), 10**17), min_size=2, max_size=2),
        st.lists(st.none() | st.integers(0, 2**32 - 1), min_size=2, max_size=2),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tsv") / "data.tsv"


def read(path: Path, log: FaultLog) -> ClickRows:
    return join_rows([block.rows for block in read_tsv(path, detect_kind(path), SCHEMA, log)])


def text_of(row: Row, upper: bool) -> str:
    label, counts, categories = row
    fields = ["" if value is None else str(value) for value in counts]
    fields += ["" if value is None else f"{value:08X}" if upper else f"{value:08x}" for value in categories]
    return "\t".join([str(label), *fields])


@settings(max_examples=100)
@given(rows=raw_rows, upper=st.booleans(), end=st.sampled_from(["\n", "\r\n"]), ended=st.booleans())
def test_what_is_written_is_read(path: Path, rows: list[Row], upper: bool, end: str, ended: bool) -> None:
    text = end.join(text_of(row, upper) for row in rows) + (end if ended else "")
    path.write_bytes(text.encode())
    got = read(path, FaultLog("raise"))
    assert got.labels.tolist() == [row[0] for row in rows]
    for (_, counts, categories), dense, ids in zip(rows, got.dense, got.ids.reshape(-1, 2), strict=True):
        for value, number in zip(counts, dense.tolist(), strict=True):
            assert math.isclose(number, 0.0 if value is None else math.log(max(value, -1) + 3), rel_tol=1e-5)
        sizes = SCHEMA.num_embeddings
        expected = [0 if value is None else value % (n - 1) + 1 for value, n in zip(categories, sizes, strict=True)]
        assert ids.tolist() == expected


@settings(max_examples=150)
@given(place=st.integers(0, 40), junk=st.binary(max_size=3), removed=st.integers(0, 4), cut=st.booleans())
def test_blocks_and_single_lines_are_judged_alike(path: Path, place: int, junk: bytes, removed: int, cut: bool) -> None:
    """A damaged line among good ones is left out if and only if ``explain_line`` finds a fault in it."""
    good = line(12345)
    damaged = (good[:place] + junk + good[place + removed :]).replace(b"\n", b"")
    if cut and not damaged:
        return  # no line at all
    path.write_bytes(line(1) + b"\n" + damaged + (b"" if cut else b"\n" + line(2)))
    log = FaultLog("skip")
    rows = read(path, log)
    fault = explain_line(damaged, SCHEMA, cut=cut)
    others = 1 if cut else 2
    assert len(rows) == others + (fault is None)
    assert log.skipped == ({} if fault is None else {fault.reason.value: 1})


BROKEN = [
    (b"1\t2\t3\tab", "truncated line", r"field 'cat_1': value 'ab' is the end of the file, in column 4 of 5"),
    (b"1\t2\t3\t0000000a\t0000", "truncated line", r"field 'cat_2': value '0000' is the end of the file"),
    (b"1\t2\t3\t0000000a\n", "wrong number of columns", r"field 'cat_2': missing, the line has 4 of 5 columns"),
    (b"1\t2\t3\t0000000a\t\t9\n", "wrong number of columns", r"field 6: value '9' is extra, the line has 6 of 5"),
    (b"\n", "wrong number of columns", r"field 'label': the line is empty, 5 columns are expected"),
    (
        b"1\tabc\t3\t\t\n",
        "bad number",
        r"field 'int_1': value 'abc' is not an integer of at most 18 digits; correct it",
    ),
    (b"1\t2\t1.0\t\t\n", "bad number", r"field 'int_2': value '1\.0' is not an integer"),
    (b"1\t2\t%d\t\t\n" % 10**18, "bad number", r"field 'int_2': value '1000000000000000000' is not an integer"),
    (b"1\t-\t3\t\t\n", "bad number", r"field 'int_1': value '-' is not an integer"),
    (b"2\t2\t3\t\t\n", "bad label", r"field 'label': value '2' is not 0 or 1"),
    (b"\t2\t3\t\t\n", "bad label", r"field 'label': value '' is not 0 or 1"),
    (
        b"label\tint_1\tint_2\ta\tb\n",
        "bad label",
        r"field 'label': value 'label' is not 0 or 1; remove the header line",
    ),
    (
        b"\xef\xbb\xbf1\t2\t3\t\t\n",
        "bad label",
        r"field 'label': value '.*1' is not 0 or 1; save the file without a byte order mark",
    ),
    (b"1\t2\t3\t0000000g\t\n", "bad category", r"field 'cat_1': value '0000000g' is not 8 hexadecimal digits; correct"),
    (b"1\t2\t3\t\tabc\n", "bad category", r"field 'cat_2': value 'abc' is not 8 hexadecimal digits"),
    (b"1\t2\t3\xff\t\t\n", "not UTF-8", r"field 'int_2': byte 0xff at position 5 is not UTF-8"),
    (b"1\t2\t3\t0000\x00000\t\n", "NUL byte", r"field 'cat_1': value '0000\\x00000' holds a NUL byte"),
    (b"1\t2\t3\t\t" + b"z" * 99 + b"\n", "bad category", r"field 'cat_2': value 'z{37}\.\.\.' is not"),
]


@pytest.mark.parametrize(("broken", "reason", "message"), BROKEN)
def test_a_broken_row(tmp_path: Path, broken: bytes, reason: str, message: str) -> None:
    path = write(tmp_path / "data.tsv", lines(3) + broken + (lines(2) if broken.endswith(b"\n") else b""))
    with pytest.raises(DataError, match=rf"data\.tsv:4: {message}") as caught:
        read(path, FaultLog("raise"))
    assert str(caught.value).endswith('or drop such rows with on_bad_row="skip"')
    log = FaultLog("skip")
    assert len(read(path, log)) == (5 if broken.endswith(b"\n") else 3)
    assert log.skipped == {reason: 1}


@pytest.mark.parametrize("suffix", [".tsv", ".gz", ".xz"])
def test_faults_are_counted_by_reason_and_rows_keep_their_numbers(tmp_path: Path, suffix: str) -> None:
    text = line(0) + b"\nx\n\n" + line(1) + b"\n2\t\t\t\t\n3\t\t\t\t\n" + line(2) + b"\n"
    path = write(tmp_path / f"data{suffix}", text)
    log = FaultLog("skip")
    (block,) = read_tsv(path, detect_kind(path), SCHEMA, log)
    assert log.skipped == {"wrong number of columns": 2, "bad label": 2}
    assert (block.numbers.tolist(), block.seen) == ([0, 3, 6], 7)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_truncated_stream(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}", lines(2000))
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) * 3 // 5])
    log = FaultLog("skip")
    rows = read(path, log)
    assert log.skipped == {"truncated stream": 1}
    assert 0 < len(rows) < 2000
    kept: list[ClickRows] = []
    with pytest.raises(
        DataError, match=rf"data\{suffix}:{len(rows) + 1}: the .* stream ends before its end mark; copy"
    ):
        kept.extend(block.rows for block in read_tsv(path, detect_kind(path), SCHEMA, FaultLog("raise")))
    assert sum(map(len, kept)) == len(rows)


def test_a_line_without_end(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tsv", lines(2) + b"7" * (3 << 20) + b"\n" + lines(2))
    with pytest.raises(
        DataError, match=r"data\.tsv:3: field 'label': value '7+'\.\.\. begins a line of more than 1 MiB"
    ):
        read(path, FaultLog("raise"))
    log = FaultLog("skip")
    assert len(read(path, log)) == 4
    assert log.skipped == {"line too long": 1}


def test_real_rows(data_dir: Path) -> None:
    """Every field of Criteo's first rows, against Python's own parsing."""
    import lzma

    from shardrec.data import criteo_schema

    path, schema = data_dir / "criteo_raw_sample" / "kaggle_head.tsv.xz", criteo_schema()
    if not path.is_file():
        pytest.skip(f"no {path}: set SHARDREC_DATA to the folder that has it")
    got = join_rows([block.rows for block in read_tsv(path, detect_kind(path), schema, FaultLog("raise"))])
    with lzma.open(path, "rt") as file:
        table = [text.rstrip("\n").split("\t") for text in file]
    assert got.labels.tolist() == [int(row[0]) for row in table]
    for row, dense, ids in zip(table, got.dense.tolist(), got.ids.reshape(-1, 26).tolist(), strict=True):
        wanted = [math.log(max(int(field), -1) + 3) if field else 0.0 for field in row[1:14]]
        assert dense == pytest.approx(wanted, rel=1e-5)
        assert ids == [
            int(field, 16) % (n - 1) + 1 if field else 0
            for field, n in zip(row[14:], schema.num_embeddings, strict=True)
        ]


@pytest.mark.parametrize(("name", "count", "rate"), [("x4_valid", 3999, 0.216), ("x4_test", 3999, 0.209)])
def test_real_files_are_whole(data_dir: Path, name: str, count: int, rate: float) -> None:
    from shardrec.data import criteo_schema

    path = data_dir / "criteo_raw_sample" / f"{name}_sample.tsv.xz"
    if not path.is_file():
        pytest.skip(f"no {path}: set SHARDREC_DATA to the folder that has it")
    rows = join_rows([b.rows for b in read_tsv(path, detect_kind(path), criteo_schema(), FaultLog("raise"))])
    assert len(rows) == count
    assert rows.labels.mean() == pytest.approx(rate, abs=5e-4)
