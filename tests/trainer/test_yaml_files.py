"""YAML that people write: what a document holds, and documents that are refused."""

from __future__ import annotations

import pytest

from shardrec.errors import ConfigError
from shardrec.trainer.yaml_files import parse_yaml
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
