"""docs/options.md is what docs/make_options.py writes, and the defaults in it are those of the settings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

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


def commands() -> dict[str, Any]:
    found = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # it has several commands
    return {**found, "bench": typer.main.get_command(bench_app)}


def test_each_help_has_an_example() -> None:
    assert len(commands()) >= 15
    for name, command in commands().items():
        assert f"Example: shardrec {name} " in (command.help or ""), name


UNITS = re.compile(
    r"\b(rows?|samples?|batch(es)?|steps?|epochs?|points?|places?|passes|ids|items?|users?|columns?|widths?|interactions|"
    r"tables?|shards?|ranks?|hosts?|threads?|replicas|copies|trainers|requests|plans?|workloads|repetitions|settings|runs|"
    r"saves|checkpoints?|times|restarts|proposals|seconds|milliseconds|minutes|GiB|MiB|bytes|fraction|share|decay|norm|"
    r"penalty|learning rate|ratings?|seed|port)\b",
    re.IGNORECASE,
)


def unitless(command: Any) -> list[str]:
    """The options with a number that do not say of what."""
    kinds = {name: [kind, *get_args(kind)] for name, kind in get_type_hints(command.callback).items()}
    numbers = [option for option in command.params if {int, float}.intersection(kinds[option.name])]
    return [option.opts[0] for option in numbers if not UNITS.search(option.help or "")]


def test_each_quantity_has_a_unit() -> None:
    assert {name: found for name, command in commands().items() if (found := unitless(command))} == {}


def test_a_quantity_without_a_unit_is_found() -> None:
    def command(patience: Annotated[int, typer.Option(help="How long to wait.")] = 3) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    assert unitless(typer.main.get_command(alone)) == ["--patience"]
