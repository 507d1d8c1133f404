"""The operators that pass pending values on without using them: the operators of lists, dicts and tuples.

All others use what they are given. In the table, ``h`` is the list or dict itself, ``x`` something put into it, ``.``
anything else. The result is an element of it (``e``), a list or dict of the same elements (``h``), the list of a dict's
values (``v``) or of its items (``i``), or holds nothing that could be pending (``""``).
"""

from __future__ import annotations

from typing import NamedTuple

from shardrec._torchscript import Node


class Rule(NamedTuple):
    """The effect of an operator on the elements of a list or dict.

    Args:
        arguments: a letter for each. One that is not mentioned is ``.``.
        result: a letter, or none.
    """

    arguments: str
    result: str


_LISTS = {
    "aten::__getitem__": Rule("h.", "e"),
    "aten::_set_item": Rule("h.x", "h"),
    "aten::add": Rule("hh", "h"),
    "aten::add_": Rule("hh", "h"),
    "aten::append": Rule("hx", "h"),
    "aten::clear": Rule("h", ""),
    "aten::copy": Rule("h", "h"),
    "aten::Delete": Rule("h.", ""),
    "aten::extend": Rule("hh", ""),
    "aten::insert": Rule("h.x", ""),
    "aten::len": Rule("h", ""),
    "aten::list": Rule("h", "h"),
    "aten::mul": Rule("h.", "h"),
    "aten::pop": Rule("h.", "e"),
    "aten::reverse": Rule("h", ""),
    "aten::slice": Rule("h...", "h"),
    "prim::ListUnpack": Rule("h", "e"),
}
_DICTS = {
    "aten::__contains__": Rule("h.", ""),
    "aten::__getitem__": Rule("h.", "e"),
    "aten::_set_item": Rule("h.x", ""),
    "aten::clear": Rule("h", ""),
    "aten::copy": Rule("h", "h"),
    "aten::Delete": Rule("h.", ""),
    "aten::get": Rule("h.x", "e"),
    "aten::items": Rule("h", "i"),
    "aten::keys": Rule("h", ""),
    "aten::len": Rule("h", ""),
    "aten::pop": Rule("h.x", "e"),
    "aten::setdefault": Rule("h.x", "e"),
    "aten::update": Rule("hh", ""),
    "aten::values": Rule("h", "v"),
}
_TABLES = {"ListType": _LISTS, "DictType": _DICTS}


def rule_of(node: Node) -> Rule | None:
    """The rule of an operator of lists or dicts, which its first argument tells it to be. None for any other."""
    inputs = list(node.inputs())
    if not inputs:
        return None
    rule: Rule | None = _TABLES.get(inputs[0].type().kind(), {}).get(node.kind())
    if rule is None:
        return None
    # A list times a tensor, or the like, is not in the table under any kind.
    holders = [value for value, letter in zip(inputs, rule.arguments, strict=False) if letter == "h"]
    return rule if all(value.type().kind() == inputs[0].type().kind() for value in holders) else None
