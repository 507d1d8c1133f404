"""YAML, which people write, read with bounds on memory and time: its faults are a ``ConfigError`` with the line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrec import ConfigError

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 8 << 20
_MAX_NESTED = 100
_MAX_VALUES = 1_000_000
"""Of a document with aliases, each counted as what it stands for."""
_LONGEST_NUMBER = 1000
"""Characters of a value other than text. Parsing some numbers takes O(length²) time."""


def parse_yaml(text: str, where: str) -> tuple[object, yaml.Node | None]:
    """What a YAML document holds, of plain types.

    Args:
        text: the document.
        where: the file's name, for messages.

    Returns:
        The value, and the ``yaml.Node`` that it was made from (None for an empty document), for :func:`yaml_lines`.

    Raises:
        ConfigError: naming file and line, if the text is not YAML, is too large or nested too deeply, has aliases that
            make too much of it, or a mapping with a key twice.
    """
    import yaml

    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0  # before anything is composed: libyaml's recursion has no end but the stack's
        for event in yaml.parse(_bounded(text), kind):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_NESTED:
                raise _fault(event, "it is nested too deeply")
        root = yaml.compose(text, kind)
        counted: dict[int, int] = {}
        if root is not None and _values(root, counted) > max(_MAX_VALUES, len(counted)):
            raise ValueError(f"its aliases make more than {_MAX_VALUES:,} values of it: use fewer")
        return (None if root is None else yaml.SafeLoader("").construct_document(root)), root
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{where}{line} cannot be read as YAML ({reason})") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        name = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ConfigError(f"{where} cannot be read as YAML ({name}{error})") from error


def _bounded(text: str) -> str:
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
    return text


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Values of a node with each alias replaced by what it stands for. Counts of finished nodes are kept by id.

    Raises:
        MarkedYAMLError: for an alias inside of what it stands for, a key that a mapping has twice, and a number too
            long.
    """
    if id(node) in counted:
        if not counted[id(node)]:
            raise _fault(node, "an alias stands inside of what it stands for")
        return counted[id(node)]
    children = node.value if isinstance(node.value, list) else []
    if not children and len(node.value) > _LONGEST_NUMBER and not node.tag.endswith(":str"):
        raise _fault(node, f"a value has {len(node.value):,} characters and is no text")
    if children and isinstance(children[0], tuple):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in children:
            name = key.tag, str(key.value)
            if name in lines:
                raise _fault(key, f"{key.value!r} is there twice, first in line {lines[name]}: keep one")
            lines[name] = key.start_mark.line + 1
        children = [child for pair in children for child in pair]
    counted[id(node)] = 0
    counted[id(node)] = 1 + sum(_values(child, counted) for child in children)
    return counted[id(node)]


def _fault(node: Any, problem: str) -> Exception:
    import yaml

    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def yaml_lines(node: yaml.Node) -> dict[str, int]:
    """The line per key of a mapping, which :func:`parse_yaml` gave."""
    return {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
