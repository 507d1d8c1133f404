"""Python files as the parser sees them, parsed once for all tests of a process that look at them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

__all__ = ["nodes", "tree"]


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    gc.disable()  # all of it stays
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the tree, as ``ast.walk`` gives them."""
    return list(ast.walk(tree(path)))
