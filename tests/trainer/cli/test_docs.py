"""The pages about the command line: their flags exist, and their YAML examples are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardrec.trainer.data import load_spec
from shardrec.trainer.run import load_config

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name != "options.md")
TORCHRUN = {
    "--standalone",
    "--nproc-per-node",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--max-restarts",
}


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def examples(page: str, word: str) -> list[str]:
    """The YAML blocks of a page with a word."""
    return [block for block in re.findall(r"```yaml\n(.*?)```", text(page), re.DOTALL) if word in block]


def test_yaml_examples(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    (labels,), (spec,) = examples("data.md", "labels:"), examples("data.md", "features:")
    path.write_text(spec, encoding="utf-8")
    assert {feature.kind for feature in load_spec(path).features} == {
        "id",
        "multi_hot",
        "sequence",
        "weighted",
        "dense",
    }
    path.write_text(labels + spec[spec.index("features:") :], encoding="utf-8")
    assert [task.kind for task in load_spec(path).labels] == ["binary", "binary", "regression", "multiclass"]
    (example,) = examples("cli.md", "nproc:")
    path.write_text(example, encoding="utf-8")
    assert load_config(path).ranks.constraint == ("t_*=row_wise", "t_cat_3=table_wise@1")


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_examples_exist(page: str) -> None:
    known = set(re.findall(r"^\| `(--[a-z-]+)` ", text("options.md"), re.MULTILINE)) | TORCHRUN | {"--help"}
    lines = text(page).replace("\\\n", " ").splitlines()
    commands = "\n".join(line for line in lines if re.match(r"    (\w+=\S+ )*(shardrec|torchrun) ", line))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", commands)) <= known
