"""Files of any origin, read with bounds on memory and time; and what the operating system says of files, in words.

A fault of a JSON document is a ``ValueError`` whose text says what is wrong; who reads it adds the file's name and the
remedy.
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

from shardrec.errors import DataError

__all__ = [
    "UnreachableError",
    "file_system",
    "naming",
    "open_regular",
    "os_fault",
    "parse_json",
    "read_json",
    "read_text",
]

_MAX_BYTES = 256 << 20
"""Of a JSON document, such as the plan of a million shards."""
_BY_PYARROW = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""Schemes of URLs that pyarrow's own file systems read."""


class UnreachableError(DataError):
    """A folder or a file that may be there, and cannot be read now."""


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


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], object] | None = None) -> Any:
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


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    pyarrow's own come first: they are there with it, and are read without Python.

    Raises:
        DataError: if there is no such file system here.
        UnreachableError: if it cannot be reached now.
    """
    import fsspec
    import pyarrow as pa
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    scheme, _, rest = url.partition("://")
    try:
        if scheme not in _BY_PYARROW:
            system, path = fsspec.core.url_to_fs(url)
            return system, path
        rest, mark, options = rest.partition("?")
        authority, _, path = rest.partition("/")
        arrow_system, base = fs.FileSystem.from_uri(f"{scheme}://{authority}/{mark}{options}")  # a pattern is no URI
        return ArrowFSWrapper(arrow_system), f"{base.rstrip('/')}/{path}"
    except ImportError as error:  # which names the package
        raise DataError(f"data file {url} cannot be read here: {error}") from error
    except (ValueError, OSError, pa.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        # pyarrow asks the network where a bucket is.
        raise (UnreachableError if isinstance(error, OSError) else DataError)(
            f"data file {url} cannot be read ({reason}): give a path, or a URL of {', '.join(_BY_PYARROW)} or of an "
            "installed fsspec file system"
        ) from error
