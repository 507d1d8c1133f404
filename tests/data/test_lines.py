from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.data import compression
from shardrec.data import lines as lines_module
from shardrec.data.compression import FileKind
from shardrec.data.lines import LineBlock, LineStream


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "data.tsv"


def blocks_of(path: Path, text: bytes, *, chunk: int, block: int) -> list[LineBlock]:
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "_CHUNK_BYTES", chunk)
        patch.setattr(lines_module, "_BLOCK_BYTES", block)
        patch.setattr(lines_module, "_SHOWN_BYTES", 4)
        return list(LineStream(path, FileKind.TEXT))


@settings(max_examples=100)
@given(text=st.text("ab\n", max_size=40), chunk=st.integers(1, 8))
def test_blocks_are_the_text_in_whole_lines(path: Path, text: str, chunk: int) -> None:
    data = text.encode()
    blocks = blocks_of(path, data, chunk=chunk, block=50)
    unended = bool(data) and not data.endswith(b"\n")
    assert b"".join(block.data for block in blocks) == data + b"\n" * unended
    assert [block.cut for block in blocks] == [False] * (len(blocks) - 1) + [unended] * bool(blocks)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(0, 30), max_size=12), ended=st.booleans(), chunk=st.integers(1, 40))
def test_only_lines_longer_than_a_block_are_shortened(path: Path, lengths: list[int], ended: bool, chunk: int) -> None:
    """Every line arrives once, with its number; those of up to 8 bytes whole, whatever was before them."""
    lines = [bytes([97 + number]) * length for number, length in enumerate(lengths)]
    text = b"\n".join(lines) + (b"\n" if ended else b"")
    expected = text.removesuffix(b"\n").split(b"\n") if text else []
    blocks = blocks_of(path, text, chunk=chunk, block=9)
    got: list[bytes] = []
    for block in blocks:
        assert block.first_line == len(got) + 1
        assert block.data.endswith(b"\n")
        got += block.data[:-1].split(b"\n")
        assert not block.too_long or (len(got[-1]) == 4 and len(expected[len(got) - 1]) >= 9)
    assert len(got) == len(expected)
    for number, (line, whole) in enumerate(zip(got, expected, strict=True), 1):
        shortened = any(block.too_long and block.first_line == number for block in blocks)
        assert line == (whole[:4] if shortened else whole)
        assert not (shortened and len(whole) <= 8)
