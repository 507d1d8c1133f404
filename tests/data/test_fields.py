from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardrec.data.fields import ByteFields, split_lines


def places(fields: list[bytes]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """The fields in one byte string with tabs between them, their positions and lengths."""
    lengths = np.array([len(field) for field in fields], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]).astype(np.int64)
    return b"\t".join(fields), starts, lengths


integers = st.one_of(
    st.integers(-(10**18) + 1, 10**18 - 1).map(lambda value: b"%d" % value),
    st.integers(0, 10**9).map(lambda value: b"%012d" % value),
    st.just(b""),
)
messy = st.text("-+0123456789abcdefABCDEFgG .\0éx", max_size=22).map(str.encode)


@settings(max_examples=100)
@given(fields=st.lists(st.one_of(integers, messy), min_size=1, max_size=20))
def test_integers(fields: list[bytes]) -> None:
    data, starts, lengths = places(fields)
    values, missing, bad = ByteFields(data).integers(starts, lengths)
    for field, value, absent, broken in zip(fields, values, missing, bad, strict=True):
        digits = field.removeprefix(b"-")
        assert absent == (field == b"")
        assert broken == (field != b"" and not (digits.isdigit() and len(digits) <= 18))
        if not absent and not broken:
            assert value == float(int(field))


@settings(max_examples=100)
@given(
    fields=st.lists(
        st.one_of(st.integers(0, 2**32 - 1).map(lambda value: b"%08x" % value), messy), min_size=1, max_size=20
    )
)
def test_categories(fields: list[bytes]) -> None:
    data, starts, lengths = places(fields)
    values, missing, bad = ByteFields(data).categories(starts, lengths)
    for field, value, absent, broken in zip(fields, values, missing, bad, strict=True):
        good = len(field) == 8 and all(chr(each) in "0123456789abcdefABCDEF" for each in field)
        assert absent == (field == b"")
        assert broken == (field != b"" and not good)
        if good:
            assert value == int(field, 16)


@given(fields=st.lists(st.one_of(st.sampled_from([b"0", b"1", b"2", b"", b"01"]), messy), min_size=1, max_size=20))
def test_bits(fields: list[bytes]) -> None:
    data, starts, lengths = places(fields)
    values, bad = ByteFields(data).bits(starts, lengths)
    for field, value, broken in zip(fields, values, bad, strict=True):
        assert broken == (field not in (b"0", b"1"))
        assert broken or value == float(field)


@settings(max_examples=100)
@given(rows=st.lists(st.lists(st.text("ab\r", max_size=4), min_size=1, max_size=4), min_size=1, max_size=8))
def test_lines_are_split_as_python_splits_them(rows: list[list[str]]) -> None:
    data = b"".join("\t".join(row).encode() + b"\n" for row in rows)
    table = split_lines(data, 3)
    assert table.good.tolist() == [number for number, row in enumerate(rows) if len(row) == 3]
    for number, starts, lengths in zip(table.good, table.starts, table.lengths, strict=True):
        fields = [data[start : start + length].decode() for start, length in zip(starts, lengths, strict=True)]
        assert fields == [*rows[number][:2], rows[number][2].removesuffix("\r")]
    assert [data[a : b - 1] for a, b in zip(table.line_starts, table.line_starts[1:], strict=False)] == [
        "\t".join(row).encode() for row in rows
    ]
