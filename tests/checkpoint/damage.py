"""Ways in which a checkpoint comes to harm, each drawn at random."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["DAMAGE", "files_of"]


class _Crafted:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def files_of(folder: Path) -> list[Path]:
    """Every file of a checkpoint."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _data(folder: Path) -> list[Path]:
    return sorted(folder.glob("data-*/*.safetensors"))


def flip_a_bit(rng: Random, folder: Path) -> None:
    path = rng.choice(files_of(folder))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_bits(rng: Random, folder: Path) -> None:
    path = rng.choice(_data(folder))
    data = bytearray(path.read_bytes())
    # Two flips of one bit would undo each other.
    for place in rng.sample(range(len(data)), rng.randint(2, 50)):
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite_a_run(rng: Random, folder: Path) -> None:
    """As a sector that was lost."""
    path = rng.choice(files_of(folder))
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    run = data[start : start + 512]
    lost = bytes(len(run)) if any(run) else b"\xff" * len(run)
    path.write_bytes(data[:start] + lost + data[start + 512 :])


def truncate(rng: Random, folder: Path) -> None:
    path = rng.choice(files_of(folder))
    os.truncate(path, rng.choice([0, rng.randrange(path.stat().st_size)]))


def append(rng: Random, folder: Path) -> None:
    with rng.choice(files_of(folder)).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 100)))


def remove_a_file(rng: Random, folder: Path) -> None:
    rng.choice(files_of(folder)).unlink()


def remove_the_data(rng: Random, folder: Path) -> None:
    (path,) = folder.glob("data-*")
    shutil.rmtree(path)


def add_a_file(rng: Random, folder: Path) -> None:
    (path,) = folder.glob("data-*")
    names = ["rank-00099.safetensors", "model.pt", ".metadata", "__0_0.distcp", "rank-00000.safetensors.bak"]
    (path / rng.choice(names)).write_bytes(rng.randbytes(rng.randint(0, 200)))


def swap_files(rng: Random, folder: Path) -> None:
    one, other = rng.sample(_data(folder), 2)
    between = folder / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def copy_over(rng: Random, folder: Path) -> None:
    one, other = rng.sample(_data(folder), 2)
    shutil.copyfile(one, other)


def foreign_file(rng: Random, folder: Path) -> None:
    """A sound file of another checkpoint of the same model."""
    files = {path.name: path for path in files_of(folder.with_name("other"))}
    named = [path for path in files_of(folder) if path.name in files]
    path = rng.choice([path for path in named if path.read_bytes() != files[path.name].read_bytes()])
    shutil.copyfile(files[path.name], path)


def foreign_bytes(rng: Random, folder: Path) -> None:
    rng.choice(files_of(folder)).write_bytes(rng.randbytes(rng.randint(0, 5000)))


def crafted_pickle(rng: Random, folder: Path) -> None:
    import pickle

    rng.choice(files_of(folder)).write_bytes(pickle.dumps(_Crafted(folder.with_name("mark"))))


def folder_for_a_file(rng: Random, folder: Path) -> None:
    path = rng.choice(files_of(folder))
    path.unlink()
    path.mkdir()


def pipe_for_a_file(rng: Random, folder: Path) -> None:
    """Whose reader waits for a writer, if it is not careful."""
    path = rng.choice(files_of(folder))
    path.unlink()
    os.mkfifo(path)


def _edit(folder: Path, change: Callable[[Any], None], *, sign: bool) -> None:
    path = folder / "manifest.json"
    before = path.read_bytes()
    values = json.loads(before)
    digest = values.pop("sha256")
    change(values)
    body = json.dumps(values).encode().removesuffix(b"}")
    digest = hashlib.sha256(body).hexdigest() if sign else digest
    path.write_bytes(body + f',\n"sha256": "{digest}"}}\n'.encode())
    assert path.read_bytes() != before


def edit_the_manifest(rng: Random, folder: Path) -> None:
    """By hand, and the checksum was forgotten."""

    def change(values: Any) -> None:
        tensor = values["tensors"][rng.choice(sorted(values["tensors"]))]
        number = rng.randrange(6)
        match number:
            case 0:
                values["extra"]["step"] = 99
            case 1:
                values["step_counts"]["t_a"] = 7
            case 2:
                values["files"].pop()
            case 3:
                tensor["dtype"] = "I8"
            case 4:
                tensor["shape"] = [1, *tensor["shape"]]
            case _:
                values["format"] = 4

    _edit(folder, change, sign=False)


def forge_the_manifest(rng: Random, folder: Path) -> None:
    """By hand, with a right checksum: what is in it is not possible."""

    def change(values: Any) -> None:
        names = sorted(name for name, one in values["tensors"].items() if one["parts"])
        tensor = values["tensors"][rng.choice(names)]
        part = rng.choice(tensor["parts"])
        file = values["files"][rng.randrange(len(values["files"]))]
        number = rng.randrange(20 if values.get("linked") else 18)
        match number:
            case 0:
                tensor["parts"].remove(part)
            case 1:
                tensor["parts"].append(part)
            case 2:
                part[rng.randrange(4)] += rng.choice([-1, 1, 2**40])
            case 3:
                part[4] = rng.choice([-1, 99, 2**70])
            case 4:
                part[5] = rng.choice([-8, file["size"], 2**70])
            case 5:
                tensor["dtype"] = rng.choice(["F7", None, 3, "F64"])
            case 6:
                tensor["shape"] = rng.choice([[3, 3, 3], None, "12", [-1, 8], [2**40, 2**40]])
            case 7:
                file["name"] = rng.choice(["../manifest.json", "/etc/passwd", "", "..", None, "rank-00009.safetensors"])
            case 8:
                file["size"] = rng.choice([0, -1, file["size"] + 1, None, "many", 2**70])
            case 9:
                file["checksums"] = rng.choice([[], [0], None, file["checksums"] * 2, ["x"]])
            case 10:
                values["data"] = rng.choice(["..", "/tmp", "data-", None, "data-0123456789abcdef"])
            case 11:
                values.pop(rng.choice(sorted(values)))
            case 12:
                values[rng.choice(["tensors", "files", "extra"])] = rng.choice([None, 5, [1], "x"])
            case 13:
                values["format"] = rng.choice([1, 4, 5 - values["format"], None, "2"])
            case 14:
                values["step_counts"][next(iter(values["step_counts"]))] = rng.choice(
                    ["x", None, math.nan, -1, 1e30, 1.0, True, [], 2**60]
                )
            case 15:
                values["fused_settings"][rng.choice(sorted(values["fused_settings"]))] = rng.choice(["x", None, 3, []])
            case 16:
                rng.choice(values["param_groups"])["settings"] = rng.choice(["x", None, 3, []])
            case 17:
                tensor["dtype"] = {"F32": "I32", "I64": "F64"}[tensor["dtype"]]
            case 18:
                values["linked"] = rng.choice([None, [], values["linked"][1:], values["linked"] + ["x"]])
            case _:
                changed = [part for one in values["tensors"].values() for part in one["parts"] if part[6:]]
                rows = rng.choice(rng.choice(changed)[6:])
                rows[rng.randrange(4)] += rng.choice([-(2**40), 2**40, 2**70])

    _edit(folder, change, sign=True)


def not_a_manifest(rng: Random, folder: Path) -> None:
    texts = [b"", b"{}", b"null", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"format": 2}', b"not json"]
    (folder / "manifest.json").write_bytes(rng.choice(texts))


DAMAGE = (
    flip_a_bit,
    flip_bits,
    overwrite_a_run,
    truncate,
    append,
    remove_a_file,
    remove_the_data,
    add_a_file,
    swap_files,
    copy_over,
    foreign_file,
    foreign_bytes,
    crafted_pickle,
    folder_for_a_file,
    pipe_for_a_file,
    edit_the_manifest,
    forge_the_manifest,
    not_a_manifest,
)
"""Each leaves the folder other than it was: ``damage(rng, folder)``. ``folder.with_name("other")`` is another one's."""
