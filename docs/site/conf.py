"""The site: the pages of the repository, as they stand, by Sphinx. ``make docs-site`` builds it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

project = "shardrec"
copyright = "the shardrec authors"
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "benchmarks/*/*.md",
    "examples/*/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "shardrec", "tests"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
# TorchScript's and the shell's lines in the pages have no lexer of their own.
highlight_language = "text"

html_theme = "furo"
html_title = "shardrec"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]

NAVIGATION = {
    "Start": [
        "docs/tutorial",
        "docs/guide",
        "docs/migration",
        "docs/cli",
        "docs/models",
        "docs/ranking",
        "docs/troubleshooting",
    ],
    "Training": [
        "docs/planner",
        "docs/updates",
        "docs/dynamic_ids",
        "docs/checkpoints",
        "docs/elastic",
        "docs/pipelines",
        "docs/rpc",
        "docs/compile",
    ],
    "Serving": ["docs/scripting", "docs/serving", "docs/publishing", "docs/executors", "docs/security"],
    "Reference": ["docs/api", "docs/parity", "docs/communication", "docs/scaling"],
    "Inside": ["docs/design", "docs/gpu", "docs/benchmarks", "CHANGELOG", "CONTRIBUTING"],
}
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def setup(app: Any) -> None:
    """Sphinx's hook."""
    app.connect("source-read", _as_pages)


def _as_pages(app: Any, name: str, source: list[str]) -> None:
    """Links to folders lead to their README, as they do where the repository is read; README has the navigation."""
    folder = (ROOT / name).parent

    def target(link: re.Match[str]) -> str:
        path = folder / link[2]
        inside = path / "README.md"
        return f"{link[1]}{os.path.relpath(inside, folder)}{link[3]}" if inside.is_file() else link[0]

    source[0] = _LINK.sub(target, source[0])
    if name == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
            for caption, pages in {
                **NAVIGATION,
                "Benchmarks": _folders("benchmarks"),
                "Examples": _folders("examples"),
            }.items()
        )


def _folders(name: str) -> list[str]:
    return [f"{name}/{path.parent.name}/{path.stem}" for path in sorted((ROOT / name).glob("*/*.md"))]
