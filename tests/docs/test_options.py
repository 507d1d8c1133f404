"""docs/options.md is what docs/make_options.py writes, and the defaults in it are those of the settings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import typer

from benchmarks.harness.command import app as bench_app
from benchmarks.harness.timing import TimingConfig
from shardrec.trainer.cli.app import app
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.options import Options, flag

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "options.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "make_options.py"))["page"]()
    assert written == PAGE, "run `make docs`"


@pytest.mark.parametrize(("command", "config"), [("train", TrainConfig), ("bench", TimingConfig)])
def test_defaults(command: str, config: type[Options]) -> None:
    section = PAGE.partition(f"## shardrec {command}\n")[2].partition("\n## ")[0]
    defaults = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", section, re.MULTILINE))
    for name, option in config.options().items():
        default = ",".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        if default not in (None, "", {}):
            assert defaults[flag(name)].strip("`") == str(default), name


def test_each_help_has_an_example() -> None:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # it has several commands
    commands["bench"] = typer.main.get_command(bench_app)
    assert len(commands) >= 15
    for name, command in commands.items():
        assert f"Example: shardrec {name} " in (command.help or ""), name
