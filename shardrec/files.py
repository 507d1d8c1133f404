"""Files of any origin, read with bounds on memory and time; and what the operating system says of files, in words.

A fault of a JSON document is a ``ValueError`` whose text says what is wrong; who reads it adds the file's name and the
remedy. YAML is written by people: its faults are a ``ConfigError`` with the line.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardrec.errors import ConfigError

__all__ = ["naming", "open_regular", "os_fault", "parse_json", "parse_yaml", "read_json", "read_text", "yaml_lines"]

_MAX_BYTES = 256 << 20
"""Of a JSON document, such as the plan of a million shards."""
_MAX_YAML_BYTES = 8 << 20
_MAX_NESTED = 100
_MAX_VALUES = 1_000_000
"""Of a YAML document with aliases, each counted as what it stands for."""
_LONGEST_NUMBER = 1000
"""Characters of a YAML value other than text; parsing some numbers takes O(length²) time."""


def open_regular(path: str | Path) -> int:
    """A descriptor to read a regular file; a pipe, a socket or a device is refused, and not waited for.

    Raises:
        OSError: if the file cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(None, f"it is no regular file ({stat.filemode(mode)})", str(path))
    return descriptor


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, an ``OSError`` without a file's name, such as that of a write, gets this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def os_fault(error: OSError) -> str:
    """What the operating system says of a file, and of a full file system how much of it is free."""
    if error.filename is None:
        return str(error)
    text = f"{error.filename}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next((parent for parent in Path(error.filename).absolute().parents if parent.is_dir()), Path("/"))
        text += f" ({shutil.disk_usage(folder).free / 2**20:,.1f} MiB are free in {folder})"
    return text


def read_text(path: str | Path, most: int = _MAX_BYTES) -> str:
    """The text of a file.

    Args:
        path: of a UTF-8 file.
        most: bytes that it may have.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is larger, or not UTF-8.
    """
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data.decode("utf-8")


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """What a JSON document holds.

    Raises:
        ValueError: if it is not JSON, has a number of more digits than Python reads, or is nested too deeply.
    """
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: str | Path) -> Any:
    """What a JSON file holds; raises as :func:`read_text` and :func:`parse_json`."""
    return parse_json(read_text(path))


def parse_yaml(text: str, where: str) -> tuple[Any, Any]:
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

    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"it has more than {_MAX_YAML_BYTES >> 20} MiB")
    return text


def _values(node: Any, counted: dict[int, int]) -> int:
    """Values of a node with each alias replaced by what it stands for; counts of finished nodes are kept by id.

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


def yaml_lines(node: Any) -> dict[str, int]:
    """The line of each key of a mapping, which :func:`parse_yaml` gave."""
    return {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
