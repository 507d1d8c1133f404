"""How one option of a run is declared: its default, its help text and what it may be.

An option is written once, as a field of :class:`~shardrec.train.config.TrainConfig`; the command line, the YAML reader
and the validation are made from it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Rule", "check_fields", "coerce", "flag", "option", "rule_of", "together"]

_KEY = "shardrec.rule"
_NOUNS = {"int": "a whole number", "float": "a number", "tuple[int, ...]": "whole numbers with commas between"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an option may be.

    Args:
        help: one line for people.
        panel: the heading that the help puts it under.
        minimum: the smallest value; of a list, of each item.
        above: the value must be larger.
        below: the value must be smaller.
        choices: the values that there are, if these can be listed.
        metavar: stands for the value in the help.
    """

    help: str
    panel: str
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    def fault(self, value: Any, kind: str) -> str | None:
        """What the value should have been, if it is not that.

        Args:
            value: of a field that was declared as ``kind``.
            kind: ``int``, ``float``, ``str``, ``tuple[int, ...]`` or ``tuple[str, ...]``, maybe with ``| None``.
        """
        if value is None and kind.endswith("| None"):
            return None
        base = kind.removesuffix("| None").strip()
        items = value if base.startswith("tuple") else (value,)
        fits = isinstance(items, tuple) and all(self._fits(item, base) for item in items)
        return None if fits else self._wanted(base)

    def _fits(self, item: Any, base: str) -> bool:
        if "str" in base:
            return isinstance(item, str) and item != "" and (not self.choices or item in self.choices)
        if isinstance(item, bool) or not isinstance(item, (int,) if "int" in base else (int, float)):
            return False
        return (
            abs(item) <= sys.float_info.max
            and (self.minimum is None or item >= self.minimum)
            and (self.above is None or item > self.above)
            and (self.below is None or item < self.below)
        )

    def _wanted(self, base: str) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if base == "str":
            return "some text"
        if base == "tuple[str, ...]":
            return "texts"
        noun = _NOUNS[base]
        limits = [
            f"{word} {limit:g}"
            for word, limit in (("at least", self.minimum), ("above", self.above), ("below", self.below))
            if limit is not None
        ]
        each = ", each" if base.startswith("tuple") else ""
        return f"{noun}{each or ','} {' and '.join(limits)}".rstrip(" ,")


def option(default: Any, panel: str, help: str, **rule: Any) -> Any:
    """A dataclass field with a :class:`Rule`; the keywords are the rule's."""
    return dataclasses.field(default=default, metadata={_KEY: Rule(help=help, panel=panel, **rule)})


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """The rule that :func:`option` gave to a field."""
    rule: Rule = field.metadata[_KEY]
    return rule


def check_fields(config: Any) -> list[str]:
    """Give each field of a frozen dataclass of options its declared type; returns what is wrong with any, in words."""
    faults = []
    for field in dataclasses.fields(config):
        kind = str(field.type)
        value = coerce(getattr(config, field.name), kind)
        object.__setattr__(config, field.name, value)
        wanted = rule_of(field).fault(value, kind)
        if wanted is not None:
            faults.append(f"{field.name} ({flag(field.name)}) is {value!r}: give {wanted}")
    return faults


def together(faults: list[str]) -> str:
    """One fault as it is, several as a numbered list."""
    if len(faults) == 1:
        return faults[0]
    lines = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
    return f"the options have {len(faults)} faults:\n{lines}"


def flag(name: str) -> str:
    """The command line's spelling of an option."""
    return "--" + name.replace("_", "-")


def coerce(value: Any, kind: str) -> Any:
    """What a YAML file or a shell wrote, as the declared type where that is meant beyond doubt; else as it is.

    YAML 1.1 reads ``1e-3`` as text, a list comes for a tuple, and a mapping ``{"t_*": row_wise}`` for ``t_*=row_wise``.
    """
    if "tuple" in kind:
        if isinstance(value, Mapping):
            return tuple(f"{key}={_joined(item)}" for key, item in value.items())
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if "int" in kind else [value]
        elif isinstance(value, int):
            value = [value]
        if not isinstance(value, (list, tuple)):
            return value
        return tuple(_number(item, int) if "int" in kind else item for item in value)
    if "float" in kind:
        return _number(value, float)
    # A file says 500 where '500' is meant.
    return str(value) if "str" in kind and isinstance(value, int) and not isinstance(value, bool) else value


def _joined(item: Any) -> str:
    return ",".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item)


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """Text that spells a number as that number, and a whole number as a float where one is asked for."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    try:
        return kind(value)
    except (OverflowError, ValueError):
        return value
