"""Files that others read as they appear, such as versions of a model or scores: in a folder, or at a URL."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardrec.errors import ConfigError, DataError
from shardrec.files import file_system, naming, os_fault

__all__ = ["Store"]


class Store:
    """Files of a folder, or of a URL's file system with copies of those in use in a temporary folder.

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
        """The files and folders in the folder, or in one inside of it; none if there is no such folder."""
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
            with naming(self._at(name)):
                self._system.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(self.folder / name), self._at(name))
            (self.folder / name).unlink()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which others see whole or not at all, under a name that may be there already.

        Raises:
            ConfigError: if it cannot be written.
        """
        beside = f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with naming(self.folder / beside), (self.folder / beside).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.send(beside)
            if self._system is None:
                (self.folder / beside).replace(self.folder / name)
            else:
                self._system.mv(self._at(beside), self._at(name))
        except OSError as error:
            raise ConfigError(f"{self._target!r} cannot be used ({os_fault(error)}): give another folder") from error
        finally:
            with suppress(OSError):  # what could not be written whole
                (self.folder / beside).unlink()

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
