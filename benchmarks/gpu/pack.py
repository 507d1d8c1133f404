"""Libraries for a GPU machine that reaches no package index: wheels as parts small enough to be carried there.

``wheels.txt`` names those that go with requirements/set-2.11.txt; README.md has the commands.

Headers and static libraries stay behind. Of the device code in shared libraries, that of other architectures is
written over with zeros, which take no room once compressed: the libraries keep their layout, and CUDA's loader never
reads code for another architecture. So is that of kernels which no part of the benchmark runs (:data:`UNUSED`): CUDA
loads a kernel's code when it is first called. PTX stays, from which the driver compiles what there is no code for.

::

    container  magic u32 | version u16 | header size u16 | size u64         | entries, one after the other
    entry      kind u16 | version u16 | header size u32 | size u64 | 12 bytes | architecture u32 | ... | code (size)
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["UNUSED", "main", "pack", "thin_library"]

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
_CODE = 2  # kind of an entry with code of one architecture; 1 is PTX
UNUSED = "with_counter|_lamb_|_lars_sgd_|_none_|_ssd_|backward_(vbe|gwd|dense)|tbe_(inference|index_select|optimizers)"
"""In the names of libraries, or of kernels, of fbgemm's that are not run: other optimizers, tables on disks, a batch
size per feature, quantized tables, rows selected from tensors."""

_LEFT_OUT = (".a", ".h", ".cuh", ".cu", ".cpp", ".pyi", ".pyc")
_LEFT_OUT_FOLDERS = ("include", "examples")  # fbgemm_gpu imports its docs, pyre_extensions its tests
_NAME = "libraries.tar.xz"
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": 2**26}  # kernels for other types are much alike


def thin_library(library: bytes, architecture: int, unused: str | None = None) -> bytes:
    """A shared library with the device code of one architecture, of the same size.

    Args:
        library: ELF, or anything.
        architecture: compute capability, such as 90. Its code is all that stays, besides PTX.
        unused: a regular expression. Code in which it matches does not stay either.
    """
    pattern = None if unused is None else re.compile(unused.encode())
    found = bytearray(library)
    place = library.find(_MAGIC)
    while place >= 0:
        place = library.find(_MAGIC, max(place + 4, _thin_container(found, place, architecture, pattern)))
    return bytes(found)


def _thin_container(library: bytearray, place: int, architecture: int, unused: re.Pattern[bytes] | None) -> int:
    """Clear the container at ``place``. Returns its end, or ``place`` if it is none."""
    if place + _CONTAINER.size > len(library):
        return place
    _, version, header, size = _CONTAINER.unpack_from(library, place)
    begin, end = place + int(header), place + int(header) + int(size)
    if version != 1 or header < _CONTAINER.size or end > len(library):
        return place
    entries = []
    while begin < end:
        if begin + _ENTRY.size > end:
            return place
        kind, _, header, size, of = _ENTRY.unpack_from(library, begin)
        if header < _ENTRY.size or begin + header + size > end:
            return place
        entries.append((kind, of, begin + header, size))
        begin += header + size
    for kind, of, code, size in entries:
        # Where there is none for the architecture itself, code of the same generation would be taken: it stays.
        other = of // 10 != architecture // 10
        if kind == _CODE and (other or (unused is not None and unused.search(library, code, code + size))):
            library[code : code + size] = bytes(size)
    return end


class _Parts(io.RawIOBase):
    """A file that is written as several files with a maximum size in bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self.paths: list[Path] = []
        self._file: BinaryIO | None = None
        self._left = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        while rest:
            if not self._left:
                self._next()
            assert self._file is not None, "the first part was opened"
            now = rest[: self._left]
            self._file.write(now)
            self._left -= len(now)
            rest = rest[len(now) :]
        return memoryview(data).nbytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _next(self) -> None:
        if self._file is not None:
            self._file.close()
        self.paths.append(self._folder / f"{_NAME}.{len(self.paths):03}")
        self._file = self.paths[-1].open("wb")
        self._left = self._size


def pack(
    wheels: Sequence[Path], folder: Path, *, architecture: int, part_bytes: int, unused: str | None = None
) -> list[Path]:
    """Write the files of some wheels as one compressed archive, in parts.

    Args:
        wheels: to be unpacked beside each other.
        folder: of the parts. Those of an earlier run are deleted.
        architecture: compute capability of the machine's GPU, such as 90.
        part_bytes: most bytes of a part.
        unused: a regular expression for the names of libraries, or of kernels, whose device code stays behind.

    Returns:
        The parts. Joined they are a ``.tar.xz``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_NAME}.*"):
        old.unlink()
    parts = _Parts(folder, part_bytes)
    with (
        io.BufferedWriter(parts) as buffered,
        lzma.LZMAFile(buffered, "wb", filters=[_FILTER]) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name, data in _files(wheels, architecture, unused):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return parts.paths


def _files(wheels: Sequence[Path], architecture: int, unused: str | None) -> Iterator[tuple[str, bytes]]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                path = Path(name)
                if name.endswith("/") or path.suffix in _LEFT_OUT or set(path.parts[:-1]) & set(_LEFT_OUT_FOLDERS):
                    continue
                data = opened.read(name)
                is_library = path.suffix == ".so" or ".so." in path.name
                if is_library:
                    in_name = unused is not None and re.search(unused, path.name)
                    data = thin_library(data, architecture, "" if in_name else unused)
                yield name, data


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("wheels", type=Path, help="folder of wheels")
    parser.add_argument("--arch", type=int, default=90, help="compute capability of the GPU, such as 80 or 90")
    parser.add_argument("--part-mb", type=int, default=60, help="most megabytes (10^6 bytes) of a part")
    parser.add_argument("--unused", default=UNUSED, help="libraries and kernels whose device code stays behind")
    parser.add_argument("--out", type=Path, default=Path("parts"))
    options = parser.parse_args(arguments)
    wheels = sorted(options.wheels.glob("*.whl"))
    if not wheels:
        print(f"{options.wheels} holds no wheel: fill it with pip download --no-deps", file=sys.stderr)
        return 1
    others = sorted(path.name for path in options.wheels.iterdir() if path.suffix in (".gz", ".zip"))
    if others:
        print(
            f"{', '.join(others)}: no wheel, and would be left out: make one with pip wheel --no-deps", file=sys.stderr
        )
        return 1
    parts = pack(
        wheels, options.out, architecture=options.arch, part_bytes=options.part_mb * 10**6, unused=options.unused
    )
    for path in parts:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
