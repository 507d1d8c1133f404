"""docs/cli.md names every option with its default, and its YAML example is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness import BenchConfig
from benchmarks.harness.timing import TimingConfig
from shardrec.trainer.data import load_spec
from shardrec.trainer.run import TrainConfig, load_config
from shardrec.trainer.run.options import Options, flag

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
CONFIGS = {"train": TrainConfig, "bench: Timings": TimingConfig, "bench: Bytes": BenchConfig}


def parts(text: str, heading: str) -> dict[str, str]:
    """What follows each heading of a form."""
    found = re.split(heading, text, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def rows(command: str = "") -> dict[str, str]:
    """The default of each flag in the tables of a command's section, or of a part of it; of all sections."""
    name, _, part = command.partition(": ")
    text = parts(PAGE, r"^## shardrec (\w+)\n")[name] if command else PAGE
    text = parts(text, r"^### (\w+)\n")[part] if part else text
    return dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", text, re.MULTILINE))


def names(config: type[Options]) -> list[str]:
    return [flag(name) for name in config.model_fields]


def test_options_are_those_that_there_are() -> None:
    assert list(rows("train")) == [*names(TrainConfig), "--resume", "--debug"]
    assert list(rows("bench: Bytes")) == ["--bytes", *names(BenchConfig), "--json", "--debug"]
    assert list(rows("bench: Timings")) == ["--quick", *names(TimingConfig), "--resume", "--json", "--debug"]


@pytest.mark.parametrize("command", CONFIGS)
def test_defaults(command: str) -> None:
    described = rows(command)
    for name, field in CONFIGS[command].model_fields.items():
        if field.default in (None, (), {}):
            continue
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        assert described[flag(name)].strip("`").replace(",", "") == shown.replace(",", ""), name


def test_yaml_example(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (example,) = (one for one in examples if "nproc:" in one)
    (labels,) = (one for one in examples if "labels:" in one)
    (spec,) = (one for one in examples if "features:" in one)
    path = tmp_path / "run.yaml"
    path.write_text(spec, encoding="utf-8")
    assert {one.kind for one in load_spec(path).features} == {"id", "multi_hot", "sequence", "weighted", "dense"}
    path.write_text(labels + spec[spec.index("features:") :], encoding="utf-8")
    assert [task.kind for task in load_spec(path).labels] == ["binary", "binary", "regression", "multiclass"]
    path.write_text(example, encoding="utf-8")
    assert load_config(path).constraint == ("t_*=row_wise", "t_cat_3=table_wise@1")


def test_flags_in_the_examples_exist() -> None:
    known = {
        *rows(),
        "--help",
        "--version",
        "--flags",
        "--nproc-per-node",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-endpoint",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= known
