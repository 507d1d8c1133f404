"""JSON and YAML documents that are broken, or made to take all memory or time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardrec.files import open_regular, parse_json, read_json, read_text


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"a": 1', "", b"\xff", "nul"])
def test_json_that_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_files_are_read_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]
    with pytest.raises(ValueError, match="more than 0 MiB"):
        read_text(path, 5)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_text("/dev/zero", 1 << 20)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
            with pytest.raises(OSError, match="it is not a regular file"):
                open_regular(path)
        with pytest.raises(OSError, match="No such device"):
            open_regular(tmp_path / "socket")
    (tmp_path / "file").write_bytes(b"text")
    descriptor = open_regular(tmp_path / "file")
    assert os.read(descriptor, 9) == b"text"
    os.close(descriptor)
