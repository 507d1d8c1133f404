"""Every public package has a page of the API, on which every public name has a text."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.rst"))
PACKAGES = [path.stem for path in PAGES]
DOOR = ["checkpoint", "files", "launch", "layout", "pipeline", "planner", "rpc", "serve"]


def test_each_page_is_of_its_package() -> None:
    for path in PAGES:
        assert f".. automodule:: {path.stem}\n   :members:\n" in path.read_text(encoding="utf-8")


def test_each_public_package_has_a_page() -> None:
    assert {"shardrec", "shardrec.errors", "shardrec.modules", "shardrec.pending", "shardrec.trainer.run"} < set(
        PACKAGES
    )
    assert {f"shardrec.{name}" for name in DOOR} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_is_on_the_page(package: str) -> None:
    """Autodoc shows what has a docstring. A plain value has none, and needs a directive of its own."""
    page = PAGES[PACKAGES.index(package)].read_text(encoding="utf-8")
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.ismodule(value):
            written = inspect.getdoc(value) if callable(value) else f".. py:data:: {package}.{name}\n" in page
            assert written, f"{package}.{name} is not on docs/api/{package}.rst"
