"""What a run has left: whether it is what an undisturbed one leaves, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from shardrec.checkpoint.manifest import read_manifest
from tests.checkpoint.whole import contents

__all__ = ["differences", "leftovers", "shared_memory"]

_RESULTS = {
    "_rows",
    "checkpoints",
    "config.yaml",
    "curve.png",
    "features.yaml",
    "ids.json",
    "metrics.json",
    "plan.json",
}
_RESULTS |= {"tensorboard", "topic"}
_SHARED_MEMORY = Path("/dev/shm")
_TIMES = frozenset({"seconds", "samples_per_second"})


def differences(run: Path, reference: Path) -> list[str]:
    """What differs between two finished runs, times and names of folders aside.

    Weights, optimizer states and random states are compared as the last checkpoints hold them, whichever files these
    share with earlier ones; options, metrics and the curve as JSON.
    """
    found = [f"{name} is left in the folder" for name in os.listdir(run) if name not in _RESULTS]
    for path in (run / "checkpoints").iterdir():
        parts = sorted(part.name.split("-")[0] for part in path.iterdir())
        if parts != ["data", "manifest.json"]:
            found.append(f"checkpoints/{path.name} has {', '.join(parts)}: something of another save is left in it")
    if _without_times(run / "metrics.json") != _without_times(reference / "metrics.json"):
        found.append("metrics.json differs")
    last, wanted = max((run / "checkpoints").iterdir()), max((reference / "checkpoints").iterdir())
    if last.name != wanted.name:
        return [*found, f"its last checkpoint is {last.name}, the undisturbed run's {wanted.name}"]
    one, other = read_manifest(last), read_manifest(wanted)
    if [file.name for file in one.files] != [file.name for file in other.files]:
        return [*found, f"{last.name} is of other ranks than the undisturbed run's"]
    if (one.numbers, one.step_counts) != (other.numbers, other.step_counts):
        found.append(f"{last.name}: counts differ")
    mine, theirs = contents(last), contents(wanted)
    names = sorted(mine.keys() | theirs.keys())
    return found + [
        f"{last.name}: {name} differs"
        for name in names
        if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name])
    ]


def leftovers(folder: Path, before: set[str]) -> list[str]:
    """Temporary files in ``folder/tmp``, and blocks of shared memory that were not there before and nobody has open."""
    unused = {name for name in shared_memory() - before if not _is_open(_SHARED_MEMORY / name)}
    return [
        *(str(path) for path in sorted((folder / "tmp").rglob("*"))),
        *(f"{_SHARED_MEMORY}/{name}" for name in unused),
    ]


def shared_memory() -> set[str]:
    """The named blocks of shared memory of this machine."""
    return set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else set()


def _is_open(path: Path) -> bool:
    """Whether any process has a file open or mapped; such a one is another program's, for the run's have ended."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text(encoding="utf-8"):
                return True
            if any(os.readlink(link) == str(path) for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return not path.exists()


def _without_times(path: Path) -> Any:
    metrics = json.loads(path.read_text(encoding="utf-8"))
    metrics["config"].pop("out")
    return _strip(metrics)


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip(item) for key, item in value.items() if key not in _TIMES}
    return [_strip(item) for item in value] if isinstance(value, list) else value
