"""Write docs/options.md from the commands' own flags: ``python -m docs.make_options``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.command import app as bench_app
from shardrec.trainer.cli.app import app

PAGE = Path(__file__).with_name("options.md")
INTRODUCTION = """# Options

Every flag of every command, with its default and the text of `--help`. `make docs` writes this page.
[cli.md](cli.md) explains the commands.

An option of `shardrec train` is also a key of its YAML file, with underscores instead of dashes.
A flag overrides the file.
"""


def page() -> str:
    """The text of docs/options.md."""
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # the app has several commands
    commands["bench"] = typer.main.get_command(bench_app)
    parts = [INTRODUCTION]
    for name, command in commands.items():
        panels = dict[str, list[str]]()
        for option in command.params:
            panels.setdefault(getattr(option, "rich_help_panel", None) or "", []).append(_row(option))
        parts.append(f"## shardrec {name}\n")
        for panel, rows in panels.items():
            if panel:
                parts.append(f"### {name}: {panel.lower()}\n")
            parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(option: Any) -> str:
    """A line of the table: the flag, the default and the help."""
    text = " ".join((option.help or "").split())
    default = re.search(r" \(default: (.*)\)$", text)
    if default:
        text = text[: default.start()]
        shown = default[1]
    else:
        shown = "" if option.default in (None, False) else str(option.default)
    name = option.opts[0] if option.param_type_name == "option" else str(option.name).upper()
    metavar = str(option.metavar)
    listed = metavar.split("|") if "|" in metavar and metavar.islower() else []
    values = getattr(getattr(option, "type", None), "choices", None) or listed
    text += "" if text.endswith((".", "...")) else "."
    choices = f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""
    return f"| `{name}` | {_code(shown)} | {_cell(text)}{choices} |"


def _code(text: str) -> str:
    return f"`{text}`" if text and " " not in text else _cell(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
