"""The site: the pages of the repository, as they stand, and the API from the docstrings.

``make docs-site`` builds it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

from api import MODULES
from api import setup as set_up_api

ROOT = Path(__file__).parents[2]

project = "shardrec"
copyright = "the shardrec authors"
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.rst",
    "benchmarks/*/*.md",
    "examples/*/README.md",
    "tests/*/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "shardrec"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
templates_path = ["templates"]
html_additional_pages = {"index": "index.html"}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# Lines of TorchScript and of the shell in the pages need no lexer.
highlight_language = "text"

html_theme = "furo"
html_title = "shardrec"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]

NAVIGATION = {
    "Start": ["docs/tutorial", "docs/guide", "docs/migration", "docs/features"],
    "Guides": [
        "docs/cli",
        "docs/data",
        "docs/feeds",
        "docs/models",
        "docs/planner",
        "docs/dynamic_ids",
        "docs/checkpoints",
        "docs/failures",
        "docs/pipelines",
        "docs/scripting",
        "docs/serving",
        "docs/rpc",
    ],
    "Reference": ["docs/options", "docs/performance", "docs/troubleshooting", "docs/security", "CHANGELOG"],
    "API": [f"docs/api/{name}" for name in MODULES],
    "Internals": ["docs/design", "docs/ledger", "CONTRIBUTING"],
}
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def setup(app: Any) -> None:
    """Sphinx's hook."""
    set_up_api(app)
    app.connect("source-read", _as_pages)


def _as_pages(app: Any, name: str, source: list[str]) -> None:
    """Links to folders lead to their README, as in the repository. README has the navigation."""
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
                "Tests": _folders("tests"),
            }.items()
        )


def _folders(name: str) -> list[str]:
    return [f"{name}/{path.parent.name}/{path.stem}" for path in sorted((ROOT / name).glob("*/*.md"))]
