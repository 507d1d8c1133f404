"""What ``shardrec inspect`` says of a run, a checkpoint, a plan, or a file for programs that serve a model."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from pathlib import Path

from shardrec import ConfigError, ShardingPlan
from shardrec.checkpoint import MANIFEST, Manifest, verify_checkpoint
from shardrec.files import parse_json
from shardrec.serve import NOTES
from shardrec.trainer.run.config import FILE
from shardrec.trainer.run.runs import RunFolder, cuts_of

_MAX_NOTES_BYTES = 16 << 20


def describe(path: Path) -> dict[str, str]:
    """The kind of the file or folder, by its contents, and its contents.

    Args:
        path: results of ``shardrec train``, a folder that ``save_checkpoint`` wrote, a plan, or a file of
            ``shardrec export``, ``shardrec.serve.save`` or ``shardrec.serve.package``.

    Returns:
        Names and values, to be shown.

    Raises:
        CheckpointError: naming the file, if it is a checkpoint and damaged.
        ConfigError: for any other kind.
    """
    if (path / FILE).is_file():
        return RunFolder(path).summary()
    if (path / MANIFEST).exists():
        return _checkpoint(path)
    if path.suffix == ".json" and path.is_file():
        return _plan(ShardingPlan.load(path))
    if path.is_file() and zipfile.is_zipfile(path):
        return _served(path)
    kinds = f"a run has a {FILE}, a checkpoint a {MANIFEST}, a plan is a .json file, a model to serve a .pt or .pt2"
    problem = "is not a complete result of shardrec" if path.exists() else "does not exist"
    raise ConfigError(f"{path} {problem}: {kinds}")


def _checkpoint(path: Path) -> dict[str, str]:
    manifest = verify_checkpoint(path)
    plan = ShardingPlan.from_json(manifest.plan)
    ordinary = sum(len(group["parameters"]) for group in manifest.param_groups or ())
    return {
        "is": f"{'an incremental' if manifest.linked else 'a'} checkpoint, every byte as it was written",
        "files": f"{len(manifest.files)}, {sum(file.size for file in manifest.files):,} bytes",
        **_linked(manifest),
        **_plan(plan),
        "tensors": f"{len(manifest.tensors):,}",
        "fused optimizers": f"of {len(manifest.fused_settings)} tables",
        "ordinary optimizer": f"of {ordinary} parameters" if ordinary else "none",
        "extra": ", ".join(manifest.extra) or "none",
    }


def _linked(manifest: Manifest) -> dict[str, str]:
    """What an incremental checkpoint takes besides its own files."""
    if not manifest.linked:
        return {}
    size = sum(file.size for file in manifest.linked)
    rows = sum(rows.length for tensor in manifest.tensors.values() for part in tensor.parts for rows in part.changes)
    return {
        "files of earlier saves": f"{len(manifest.linked)}, {size:,} bytes, as hard links; no other folder is needed",
        "changed rows": f"{rows:,} of all tensors, which are read on top of them",
    }


def _plan(plan: ShardingPlan) -> dict[str, str]:
    rows = sum(table.num_embeddings for table in plan.tables)
    return {
        "plan": cuts_of(plan),
        "tables": f"{len(plan.tables):,}, {rows:,} rows",
        "fingerprint": str(plan.fingerprint),
    }


def _served(path: Path) -> dict[str, str]:
    try:
        with zipfile.ZipFile(path) as file:
            scripted = next((name for name in file.namelist() if name.endswith(f"/extra/{NOTES}")), None)
            packaged = next((name for name in file.namelist() if name.endswith("_metadata.json")), None)
            if scripted is not None:
                return {"is": "a model in TorchScript", **_noted(path, _member(file, scripted))}
            machine = {} if packaged is None else parse_json(_member(file, packaged))
        if NOTES not in machine:
            raise ConfigError(f"{path} was not written by shardrec: it lacks {NOTES}")
        words = (machine.get(f"AOTI_{key}", "") for key in ("DEVICE_KEY", "MACHINE", "CPU_ISA"))
        described = {"is": "a model compiled by AOTInductor", **_noted(path, machine[NOTES])}
        return {**described, "compiled for": " ".join(words)}
    except ConfigError:
        raise
    except (
        *(AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise ConfigError(
            f"{path} is damaged, or was not written by shardrec ({type(error).__name__}: {error}). Export the model "
            "again"
        ) from error


def _member(file: zipfile.ZipFile, name: str) -> bytes:
    """A file of the archive, which is not unpacked if it says that it is large. It cannot be larger than it says."""
    size = file.getinfo(name).file_size
    if size > _MAX_NOTES_BYTES:
        raise ValueError(f"{name} would take {size:,} bytes")
    return file.read(name)


def _noted(path: Path, text: str | bytes) -> dict[str, str]:
    """What shardrec has noted of a model in the file."""
    notes = parse_json(text)
    formats = Counter(notes["formats"].values())
    return {
        "bytes": f"{path.stat().st_size:,}",
        "features": ", ".join(notes["features"]),
        "inputs": ", ".join(notes["inputs"]),
        "tables": ", ".join(f"{count} {name}" for name, count in sorted(formats.items())) or "as trained",
        "rank": f"{notes['rank']} of {notes['world_size']}",
        **{
            f"input {tensor['name']}": f"{tensor['dtype']} [{', '.join(map(str, tensor['shape']))}]"
            for tensor in notes.get("tensors", ())
        },
    }
