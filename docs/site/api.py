"""Which page of the API documents an object that several packages export, and links to it by any of its names."""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "api"
MODULES = sorted((path.stem for path in FOLDER.glob("*.rst")), key=lambda name: (name.count("."), name))
"""The packages with a page of their own. The first one that exports an object documents it."""


def setup(app: Any) -> None:
    """Sphinx's hook."""
    homes, names = _documented()

    def skip(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
        """Leave out a member that another page documents."""
        page = app.env.docname.rsplit("/", 1)[-1]
        return True if what == "module" and homes.get(id(value), page) != page else None

    def add_links(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        """Name the members of a package that another page documents."""
        elsewhere = [names[f"{name}.{member}"] for member in getattr(value, "__all__", ()) if what == "module"]
        links = [f":py:obj:`{target}`" for target in elsewhere if target.rsplit(".", 1)[0] != name]
        if links:
            lines += ["", f"Also exported here: {', '.join(links)}.", ""]

    def resolve(app: Any, env: Any, node: Any, text: Any) -> Any:
        """The target of a link by another name of the object."""
        target = names.get(node.get("reftarget", ""))
        if target is None or node.get("refdomain") != "py":
            return None
        return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, text)

    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", add_links)
    app.connect("missing-reference", resolve)


def _documented() -> tuple[dict[int, str], dict[str, str]]:
    """The package that documents each object, and the documented name of each public name."""
    homes, names = dict[int, str](), dict[str, str]()
    logging.disable(logging.INFO)  # fbgemm-gpu logs each file that it loads
    for path in MODULES:
        module = importlib.import_module(path)
        for name in module.__all__:
            value = getattr(module, name)
            home = homes.setdefault(id(value), path) if inspect.isclass(value) or inspect.isfunction(value) else path
            names[f"{path}.{name}"] = f"{home}.{name}"
            if hasattr(value, "__qualname__"):
                names[f"{value.__module__}.{value.__qualname__}"] = f"{home}.{name}"
    return homes, names
