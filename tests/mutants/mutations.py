"""The small changes of a module's source that a test should notice, each by where it is in the text.

A change replaces text inside of a line, or of a few: line numbers stay, and so does what reads a function's source.
Left alone are docstrings, messages, assertions (also ``strict=`` of zip), annotations, ``__all__`` and decorators.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Mutation", "mutations"]

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A change.

    Args:
        start: of the text that is replaced, in bytes of the source's UTF-8.
        end: of it.
        text: what comes in its place.
        line: its first line, from 1.
        before: the text that is replaced.
    """

    start: int
    end: int
    text: str
    line: int
    before: str

    def apply(self, source: str) -> str:
        """The changed source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """All changes of a module, in the order of the text."""
    data = source.encode()
    starts = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]

    def change(node: ast.expr | ast.stmt, text: str) -> Mutation:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = data[start:end].decode()
        # As many lines as before, in brackets that let them be.
        return Mutation(start=start, end=end, text=text + "\\\n" * before.count("\n"), line=node.lineno, before=before)

    found = [change(node, text) for node in _nodes(ast.parse(source)) for text in _replacements(node)]
    return sorted(found, key=lambda one: (one.start, one.end, one.text))


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements that run."""
    if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    ):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may come in the place of a node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield f"({ast.unparse(left)} {_COMPARISONS[type(operator)]} {ast.unparse(right)})"
        case ast.BoolOp(op=ast.And() | ast.Or(), values=values):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            yield f"(({ast.unparse(left)}) {_ARITHMETIC[type(operator)]} ({ast.unparse(right)}))"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"(({ast.unparse(orelse)}) if ({ast.unparse(test)}) else ({ast.unparse(body)}))"
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case _:
            return


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
