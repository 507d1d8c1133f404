"""Data files by name, folder or pattern: of this machine, or by the URL of a file system of pyarrow's or fsspec's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from typing import TYPE_CHECKING

from shardrec import DataError
from shardrec.files import UnreachableError, file_system

if TYPE_CHECKING:
    import pyarrow as pa

TOPIC = "kafka://"
"""What the URL of a topic of Kafka begins with."""


def files_of(pattern: str, *, least: int = 1) -> list[str]:
    """The files that a name, a folder or a pattern (``day_*.parquet``) stands for, in order. Each may be a URL.

    A folder stands for all files in it and in the folders below, without those whose names, or their folders' names,
    begin with ``.`` or ``_``, such as those that Spark adds.

    Args:
        pattern: the name, folder or pattern.
        least: number of files that there must be in a folder or of a pattern.

    Raises:
        DataError: if there are fewer, or the URL's file system cannot be used.
    """
    if pattern.startswith("feed:"):
        raise DataError(
            f"data files {pattern}: only shardrec train --data takes a feed. Give its files, without 'feed:'"
        )
    if pattern.startswith(TOPIC):
        raise DataError(
            f"data files {pattern}: the records of a topic go on arriving. Train on feed:{pattern}, or write them to "
            f"files (shardrec ingest {pattern} FOLDER)"
        )
    if "://" not in pattern:
        if os.path.isdir(pattern):
            below = [os.path.join(folder, name) for folder, _, names in os.walk(pattern) for name in names]
            return _shown(pattern, below, least)
        return _found(pattern, os.path.isfile, lambda path: filter(os.path.isfile, glob(path)), least)
    import pyarrow as pa

    system, path = file_system(pattern)

    def matching(path: str) -> list[str]:  # in one request, and not one for each file
        return [name for name, info in system.glob(path, detail=True).items() if info["type"] == "file"]

    try:
        system.invalidate_cache()  # some of fsspec's keep their lists
        is_folder = system.isdir(path)
        names = _shown(path, system.find(path), least) if is_folder else _found(path, system.isfile, matching, least)
    except (OSError, pa.ArrowException) as error:
        raise _not_listed(pattern, error) from error
    if names == [path]:
        return [pattern]
    # A name in the file system as a URL again, with user, host and options: only the path's end differs.
    url, mark, options = pattern.partition("?")
    before = url.rstrip("/").removesuffix(path.strip("/"))
    return [before + name.lstrip("/") + mark + options for name in names]


def check_listable(pattern: str) -> None:
    """Look into the folder of a name or a pattern: lists leave out what they cannot read, and do not say so.

    Raises:
        UnreachableError: if it cannot be read; not if there is none.
    """
    import pyarrow as pa

    system, path = file_system(pattern) if "://" in pattern else (None, pattern)
    fixed = re.split("[*?[]", path, maxsplit=1)[0]
    folder = path if fixed == path else os.path.dirname(fixed)
    try:
        if system is None:
            os.scandir(folder or ".").close()
        else:
            system.ls(folder, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, pa.ArrowException) as error:
        raise _not_listed(pattern, error) from error


def stamp(path: str) -> tuple[int, str]:
    """Bytes of a file, and when it was last written, as far as its file system knows."""
    with open_input(path) as file:
        size = file.size()
    if "://" not in path:
        return size, str(os.stat(path).st_mtime_ns)
    system, name = file_system(path)
    about = system.info(name)
    return size, str(
        next((about[key] for key in ("mtime", "LastModified", "updated", "created") if about.get(key)), "")
    )


def _not_listed(pattern: str, error: Exception) -> UnreachableError:
    return UnreachableError(f"data files {pattern} cannot be listed ({error}): check the name and your access")


def path_of(path: str) -> str:
    """A path, or that of a URL: without its options, so that the end says what the file is."""
    return path.partition("?")[0] if "://" in path else path


def gone_of(paths: Iterable[str]) -> Iterator[str]:
    """The files that surely are not there: a list also lacks those of a folder that cannot be reached.

    An empty folder may be one that another file system is mounted on at other times.
    """
    import pyarrow as pa

    has_names: dict[str, bool] = {}
    for path in paths:
        system, name = file_system(path) if "://" in path else (None, path)
        folder = os.path.dirname(name)
        try:
            if folder not in has_names:
                has_names[folder] = False
                names = os.listdir(folder or ".") if system is None else system.ls(folder, detail=False)
                has_names[folder] = bool(names)
            os.stat(name) if system is None else system.info(name)
        except FileNotFoundError:
            if has_names[folder]:
                yield path
        except (OSError, pa.ArrowException):
            pass


def open_input(path: str) -> pa.NativeFile:
    """A file that can be read at any place.

    Raises:
        DataError: if there is none.
        UnreachableError: if it cannot be opened.
    """
    import pyarrow as pa
    from pyarrow import fs

    try:
        if "://" not in path:
            return pa.OSFile(path)
        system, name = file_system(path)
        arrow_system = getattr(system, "fs", None)
        if not isinstance(arrow_system, fs.FileSystem):
            arrow_system = fs.PyFileSystem(fs.FSSpecHandler(system))
        return arrow_system.open_input_file(name)
    except FileNotFoundError:
        kind = DataError if [*gone_of([path])] else UnreachableError
        raise kind(f"data file {path} does not exist: check the path") from None
    except (OSError, pa.ArrowException) as error:
        raise UnreachableError(f"data file {path} cannot be opened ({error}): give a file that can") from error


def _found(
    path: str,
    is_file: Callable[[str], bool],
    matching: Callable[[str], Iterable[str]],
    least: int,
) -> list[str]:
    if is_file(path) or not set("*?[") & set(path):
        return [path]  # if it is not there, its reader says so
    matches = sorted(matching(path))
    if len(matches) < least:
        raise DataError(f"no data file is named {path}: check the path")
    return matches


def _shown(folder: str, below: Iterable[str], least: int) -> list[str]:
    """The files below a folder, in the order of their names, without hidden ones and those in hidden folders."""
    start = len(folder.rstrip("/"))
    names = sorted(name for name in below if not any(part[:1] in "._" for part in name[start:].split("/") if part))
    if len(names) < least:
        raise DataError(f"no data file is in {folder}: check the path")
    return names
