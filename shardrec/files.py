"""Files of any origin, read with bounds on memory and time. Files that others see whole or not at all, in a folder or
at a URL, and the operating system's errors about files in words.

A fault of a JSON document is a ``ValueError`` with a text that says what is wrong. Who reads it adds the file's name
and the remedy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardrec.errors import ConfigError, DataError

__all__ = [
    "Store",
    "UnreachableError",
    "file_system",
    "naming",
    "open_regular",
    "os_fault",
    "parse_json",
    "read_json",
    "read_text",
    "replacing",
]

_MAX_BYTES = 256 << 20
"""Of a JSON document, such as the plan of a million shards."""
_BY_PYARROW = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""Schemes of URLs that pyarrow's own file systems read."""


class UnreachableError(DataError):
    """A folder or a file that may be there, and cannot be read now."""


def open_regular(path: str | Path) -> int:
    """A descriptor to read a regular file. A pipe, a socket or a device is refused, and not waited for.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(None, f"it is not a regular file ({stat.filemode(mode)})", str(path))
    return descriptor


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, an ``OSError`` without a file's name, such as an error of a write, gets this name."""
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


@contextmanager
def replacing(path: Path, partial: str = "", *, sync: bool = False) -> Iterator[Path]:
    """Another path to write to, which then takes the name: others see the file before or the new one, each whole.

    Args:
        path: of the file. It is unchanged if the block raises.
        partial: name of the file that is written, in the same folder. Default: one of this process's own.
        sync: wait until the data are on the disk before the file gets its name, so that no loss of power leaves an
            empty one.
    """
    beside = path.with_name(partial or f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        if sync:
            with naming(beside), beside.open("rb") as file:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(OSError):  # what could not be written whole, where this can still be removed
            beside.unlink()


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
    """What a JSON file holds. Raises as :func:`read_text` and :func:`parse_json`."""
    return parse_json(read_text(path))


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    pyarrow's own come first: they are there with it, and are read without Python.

    Raises:
        DataError: if the file system is not available here.
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
        arrow_system, base = fs.FileSystem.from_uri(f"{scheme}://{authority}/{mark}{options}")  # a pattern is not a URI
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


class Store:
    """Files that others read as they appear, such as versions of a model or scores: in a folder, or at a URL.

    Of a URL, copies of the files in use are in a temporary folder.

    Args:
        target: the folder, or a URL of a file system of pyarrow's or fsspec's, such as ``s3://bucket/model``.

    Attributes:
        folder: has the files that were sent or fetched.

    Raises:
        ConfigError: for a URL that cannot be used.
    """

    def __init__(self, target: str | Path) -> None:
        self._target, self.folder = str(target), Path(target).absolute()
        self._system: Any = None
        if "://" in str(target):
            try:
                self._system, self._path = file_system(str(target).rstrip("/"))
            except DataError as error:
                raise ConfigError(str(error)) from error
            self._copies = tempfile.TemporaryDirectory(prefix="shardrec-")
            self.folder = Path(self._copies.name)

    @property
    def is_folder(self) -> bool:
        """Whether ``folder`` is the target itself, and not copies."""
        return self._system is None

    def names(self, inside: str = "") -> list[str]:
        """The files and folders in the folder, or in one inside of it. None if the folder does not exist."""
        try:
            if self._system is None:
                return [path.name for path in (self.folder / inside).iterdir()]
            self._system.invalidate_cache()
            return [Path(path).name for path in self._system.ls(self._at(inside).rstrip("/"), detail=False)]
        except FileNotFoundError:
            return []

    def send(self, name: str) -> None:
        """Make a file that was written to ``folder`` visible to others, whole or not at all."""
        if self._system is not None:
            self._put(name, name)

    def _put(self, name: str, place: str) -> None:
        """Move the local copy of a file to a place of the file system."""
        try:
            with naming(self._at(place)):
                self._system.makedirs(self._at(place).rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(self.folder / name), self._at(place))
        finally:
            (self.folder / name).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which others see whole or not at all, under a name that may be there already.

        Raises:
            ConfigError: if it cannot be written.
        """
        partial = f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / name, partial, sync=True) as beside, naming(beside):
                beside.write_bytes(data)
            if self._system is not None:
                self._put(name, partial)
                self._system.mv(self._at(partial), self._at(name))
        except OSError as error:
            raise ConfigError(f"{self._target!r} cannot be used ({os_fault(error)}): give another folder") from error

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        with self.fetched(name):
            return (self.folder / name).read_bytes()

    @contextmanager
    def fetched(self, name: str) -> Iterator[None]:
        """Inside, ``folder`` has a file."""
        if self._system is None:
            yield
            return
        (self.folder / name).parent.mkdir(exist_ok=True)
        try:
            with naming(self._at(name)):
                self._system.get_file(self._at(name), str(self.folder / name))
            yield
        finally:
            (self.folder / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it is there."""
        with suppress(FileNotFoundError):
            if self._system is not None:
                self._system.rm(self._at(name), recursive=True)
            elif (self.folder / name).is_dir():
                shutil.rmtree(self.folder / name)
            else:
                (self.folder / name).unlink()

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"
