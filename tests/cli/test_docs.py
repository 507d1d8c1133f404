"""docs/cli.md names every option with its default, and its YAML example is one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shardrec.train import TrainConfig, load_config
from shardrec.train.options import flag

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", PAGE, re.MULTILINE))


def test_options_are_those_that_there_are() -> None:
    assert list(ROWS) == [flag(field.name) for field in dataclasses.fields(TrainConfig)] + ["--debug"]


@pytest.mark.parametrize("field", dataclasses.fields(TrainConfig), ids=lambda field: field.name)
def test_defaults(field: dataclasses.Field[object]) -> None:
    if field.default in (None, ()):
        return
    shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    assert ROWS[flag(field.name)].strip("`").replace(",", "") == shown.replace(",", "")


def test_yaml_example(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_config(path).constraint == ("t_*=row_wise", "t_cat_3=table_wise@1")


def test_flags_in_the_examples_exist() -> None:
    known = {*ROWS, "--help", "--version", "--flags", "--nproc-per-node"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= known
