"""JSON and YAML documents that are broken, or made to take all memory or time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardrec.errors import ConfigError
from shardrec.files import open_regular, parse_json, parse_yaml, read_json, read_text
from tests.documents import LAUGHS

MERGES = "m0: &m0 {x: 1, y: 2}\n" + "".join(
    f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def test_what_a_yaml_document_holds() -> None:
    value, node = parse_yaml("rows: &rows [1, 2]\nmore: {<<: {a: 1}, b: *rows}\n", "f.yaml")
    assert value == {"rows": [1, 2], "more": {"a": 1, "b": [1, 2]}}
    assert [key.start_mark.line for key, _ in node.value] == [0, 1]
    assert parse_yaml("", "f.yaml") == (None, None)
    # Many aliases of small things, and many values without any, are taken.
    assert len(parse_yaml("a: &a [1]\nb: [" + "*a, " * 10_000 + "]", "f.yaml")[0]["b"]) == 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "its aliases make more than 1,000,000 values of it"),
        (MERGES, "its aliases make more than 1,000,000 values of it"),
        ("a: 1\nb: 2\na: 3\n", r"f\.yaml:3 .*'a' is there twice, first in line 1: keep one"),
        ("a: {b: 1, b: 2}", r"f\.yaml:1 .*'b' is there twice, first in line 1: keep one"),
        ("a: &a\n  - *a", r"f\.yaml:1 .*an alias stands inside of what it stands for"),
        ("[" * 100_000, r"f\.yaml:1 .*nested too deeply"),
        ("a: " + "9" * 900 + "\nb: " + "9" * 5000, r"f\.yaml:2 .*a value has 5,000 characters and is no text"),
        ("a: 1" + ":1" * 100_000, r"f\.yaml:1 .*a value has 200,001 characters"),
        ("a: !!bool perhaps", r"f\.yaml .*KeyError"),
        ("a: !!int ''", r"f\.yaml .*IndexError"),
        ("a: !!timestamp soon", r"f\.yaml .*AttributeError"),
        ("a: 2026-99-99", r"f\.yaml .*month must be in 1\.\.12"),
        ("a: !!python/object/apply:os.getpid []", r"f\.yaml:1 .*could not determine a constructor"),
        ("a: 1\n---\nb: 2", r"f\.yaml:2 .*another document"),
        ("a: '" + "x" * (8 << 20) + "'", r"f\.yaml .*more than 8 MiB"),
        ("a: \0", r"f\.yaml .*"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_yaml(text, "f.yaml")


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
            with pytest.raises(OSError, match="it is no regular file"):
                open_regular(path)
        with pytest.raises(OSError, match="No such device"):
            open_regular(tmp_path / "socket")
    (tmp_path / "file").write_bytes(b"text")
    descriptor = open_regular(tmp_path / "file")
    assert os.read(descriptor, 9) == b"text"
    os.close(descriptor)
