"""Wheels as small parts, without the device code of other architectures."""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.pack import UNUSED, main, pack, thin_library

CODE, PTX = 2, 1


def entry(kind: int, architecture: int, code: bytes, header: int = 64) -> bytes:
    """As nvcc writes it, with what the header holds besides."""
    fields = struct.pack("<HHIQIIHHI", kind, 0x101, header, len(code), 0, 64, 0, 1, architecture)
    return fields + b"\x07" * (header - len(fields)) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*containers: bytes) -> bytes:
    return b"\x7fELF" + b"host code" + b"".join(one + b"pad" for one in containers) + b"the end"


def test_code_of_other_architectures_is_cleared() -> None:
    def made(of_80: bytes) -> bytes:
        return library(
            container(entry(CODE, 80, of_80), entry(CODE, 90, b"H" * 40), entry(PTX, 80, b"ptx" * 9)),
            container(entry(CODE, 90, b"again" * 7, header=72)),
            container(entry(CODE, 80, of_80)),
        )

    assert thin_library(made(b"A" * 50), 90) == made(bytes(50))
    assert thin_library(made(b"A" * 50), 80) != made(b"A" * 50)


def test_code_of_kernels_that_are_not_run_is_cleared(tmp_path: Path) -> None:
    """By their names, or by the library's."""

    def made(kernel: bytes) -> bytes:
        return library(container(entry(CODE, 90, b"backward_adam_kernel"), entry(CODE, 90, kernel)))

    lamb = b"\x7fbackward_lamb_kernel"
    assert re.search(UNUSED, lamb.decode())
    assert thin_library(made(lamb), 90, UNUSED) == made(bytes(len(lamb)))
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("one/tbe_training_backward_vbe.so", library(container(entry(CODE, 90, b"H" * 40))))
    parts = pack([wheel], tmp_path / "parts", architecture=90, part_bytes=10**6, unused=UNUSED)
    with tarfile.open(parts[0]) as archive:
        found = archive.extractfile("one/tbe_training_backward_vbe.so")
        assert found is not None
        assert found.read() == library(container(entry(CODE, 90, bytes(40))))


@pytest.mark.parametrize("cut", [3, 40, 90])
def test_what_is_no_container_is_left_alone(cut: int) -> None:
    """The number may stand anywhere in a library, and be followed by anything."""
    whole = library(container(entry(CODE, 80, b"A" * 50)))
    spoiled = whole[: whole.index(struct.pack("<I", 0xBA55ED50)) + cut]
    assert thin_library(spoiled, 90) == spoiled
    wrong = container(entry(CODE, 80, b"A" * 50))
    wrong = wrong[:8] + struct.pack("<Q", 2**60) + wrong[16:]
    both = wrong + container(entry(CODE, 80, b"B" * 50))
    assert thin_library(both, 90) == wrong + container(entry(CODE, 80, bytes(50)))


def test_parts_give_the_needed_files(tmp_path: Path) -> None:
    wheels, out = tmp_path / "wheels", tmp_path / "parts"
    wheels.mkdir()
    noise = bytes(number * 7919 % 251 for number in range(300_000))
    files = {
        "one/__init__.py": b"x = 1\n",
        "one/lib.so": library(container(entry(CODE, 80, noise), entry(CODE, 90, b"H" * 40))),
        "one/data.bin": bytes(reversed(noise)),
        "one/include/one.h": b"// not needed",
        "one/tests/__init__.py": b"# imported by pyre_extensions",
        "one/docs/one.py": b"# imported by fbgemm_gpu",
    }
    with zipfile.ZipFile(wheels / "one-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    assert main([str(wheels), "--out", str(out), "--part-mb", "60"]) == 0
    assert main([str(wheels), "--out", str(out)]) == 0, "the parts of an earlier run go"
    parts = sorted(out.iterdir())
    assert [path.name for path in parts] == ["libraries.tar.xz.000"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in parts))) as archive:
        names = archive.getnames()
        assert names == ["one/__init__.py", "one/lib.so", "one/data.bin", "one/tests/__init__.py", "one/docs/one.py"]
        thin = archive.extractfile("one/lib.so")
        assert thin is not None
        assert thin.read() == library(container(entry(CODE, 80, bytes(len(noise))), entry(CODE, 90, b"H" * 40)))
