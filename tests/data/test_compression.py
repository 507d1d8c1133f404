from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.data import compression
from shardrec.data.compression import ByteStream, FileKind, detect_kind
from shardrec.errors import DataError
from tests.data.raw import lines, write

_GZIPPED = gzip.compress(b"0\n", mtime=0)
"""Of a fixed time, so that the test that has it as a parameter has the same name in each process."""
PACKED = [(".gz", gzip.compress, FileKind.GZIP), (".xz", lzma.compress, FileKind.XZ)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.mark.parametrize(("suffix", "pack", "kind"), PACKED)
@settings(max_examples=30)
@given(chunk=st.integers(1, 3000), parts=st.lists(st.integers(0, 200), min_size=1, max_size=4), padding=st.booleans())
def test_members_and_padding_in_any_chunks(
    folder: Path, suffix: str, pack: object, kind: FileKind, chunk: int, parts: list[int], padding: bool
) -> None:
    path = folder / f"data{suffix}"
    assert callable(pack)
    path.write_bytes((b"\0" * 8 if padding else b"").join(pack(lines(part)) for part in parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "_CHUNK_BYTES", chunk)
        stream = ByteStream(path, kind)
        chunks = list(stream)
    assert b"".join(chunks) == b"".join(lines(part) for part in parts)
    assert max(map(len, chunks), default=0) <= chunk
    assert stream.damage is None


@pytest.mark.parametrize(("suffix", "pack", "kind"), PACKED)
@settings(max_examples=12)
@given(cut=st.floats(0.05, 0.999))
def test_a_truncated_stream_gives_what_came_before(
    folder: Path, suffix: str, pack: object, kind: FileKind, cut: float
) -> None:
    path = folder / f"cut{suffix}"
    packed = write(path, lines(3000)).read_bytes()
    path.write_bytes(packed[: int(len(packed) * cut)])
    stream = ByteStream(path, kind)
    got = b"".join(stream)
    assert stream.damage == f"the {kind.value} stream ends before its end mark"
    assert lines(3000).startswith(got)
    # what is missing is about what the missing bytes held
    assert len(got) > (cut - 0.2) * len(lines(3000)) or suffix == ".xz"


@pytest.mark.parametrize(("suffix", "pack", "kind"), PACKED)
def test_damage_is_told_apart_from_truncation(tmp_path: Path, suffix: str, pack: object, kind: FileKind) -> None:
    path = write(tmp_path / f"bad{suffix}", lines(3000))
    packed = bytearray(path.read_bytes())
    packed[len(packed) // 2 : len(packed) // 2 + 40] = bytes(range(40))
    path.write_bytes(packed)
    stream = ByteStream(path, kind)
    assert len(b"".join(stream)) <= len(lines(3000))
    assert stream.damage is not None
    assert f"the {kind.value} stream is damaged (" in stream.damage


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tsv", FileKind.TEXT), ("a.txt.gz", FileKind.GZIP), ("a.XZ", FileKind.XZ), ("day_0", FileKind.TEXT)],
)
def test_suffixes(tmp_path: Path, name: str, kind: FileKind) -> None:
    text = b"0\t1\n"
    packed = {FileKind.TEXT: text, FileKind.GZIP: gzip.compress(text), FileKind.XZ: lzma.compress(text)}
    (tmp_path / name).write_bytes(packed[kind])
    assert detect_kind(tmp_path / name) is kind


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.gz", b"0\t1\n", "is plain text by its first bytes but gzip by its suffix: name it without that suffix"),
        (
            "a.tsv",
            gzip.compress(b"0\n", mtime=0),
            "is gzip by its first bytes but plain text by its suffix: name it .gz",
        ),
        ("a.gz", lzma.compress(b"0\n"), "is xz by its first bytes but gzip by its suffix: name it .xz"),
        ("a.tsv", b"PAR1....", "is Parquet by its first bytes but plain text by its suffix: name it .parquet"),
        ("a.parquet", b"0\t1\n", "is plain text by its first bytes but Parquet by its suffix"),
        ("a.tsv", b"PK\x03\x04....", "is zip by its first bytes .* write it as plain text, .gz, .xz or .parquet"),
        ("a.tsv", b"", "is empty"),
    ],
)
def test_a_file_that_is_not_what_its_suffix_says(tmp_path: Path, name: str, contents: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(DataError, match=message) as caught:
        detect_kind(path)
    assert str(path) in str(caught.value)


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.tsv does not exist: check the path"):
        detect_kind(tmp_path / "nothing.tsv")
    with pytest.raises(DataError, match="is a directory: give the files in it, as a list"):
        detect_kind(tmp_path)
