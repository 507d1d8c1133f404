"""``shardrec.serve.save``: saves a model in a file that torch and fbgemm run without shardrec and without Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardrec._torchscript import quiet
from shardrec.errors import ConfigError
from shardrec.files import os_fault
from shardrec.modules import ShardedModel
from shardrec.modules.collection import ShardedCollection
from shardrec.scripting.script import compiled
from shardrec.serve.entry import Entry, Features, from_tensors
from shardrec.serve.served_model import ServedModel

__all__ = ["NOTES", "notes_of", "save"]

NOTES = "shardrec.json"
"""Name of the file inside the saved one that describes the model's inputs."""


def save(model: nn.Module, path: str | os.PathLike[str], *, features: Features) -> Path:
    """Save a model for inference, as TorchScript with an entry that takes plain tensors.

    The file's ``forward`` takes the arguments of :func:`shardrec.serve.from_tensors`'s entry. Besides the model the
    file holds ``shardrec.json``: ``features``, ``inputs`` (the names of the arguments, in order), ``formats`` (of the
    quantized tables), ``rank``, ``world_size`` and ``group`` (the name of the process group that a program with several
    ranks must register); of a model of ``quantize`` on one rank also ``published``, for programs that follow a
    :class:`shardrec.Publisher` (:func:`shardrec.serve.published.places_in`). Loading needs torch and fbgemm's
    operators: ``import fbgemm_gpu``, or in C++ its libraries.

    Args:
        model: a sharded model, one made by :func:`shardrec.serve.quantize`, or a module that holds one of these; in
            eval mode.
        path: path of the file. On several ranks each rank saves its own file, and ``{rank}`` in the path is replaced
            by the rank.
        features: the keys of the KeyedJaggedTensor, in the order of the lengths; by parameter if there are several.

    Returns:
        The path of this rank's file. If this raises, a file that existed before is unchanged.

    Raises:
        ConfigError: if the model holds no sharded model, if it is in training mode, if several ranks would write one
            file, or if its ``forward`` cannot be called with plain tensors.
        ScriptError: if TorchScript refuses the model's code.
    """
    if model.training:
        raise ConfigError(
            f"{type(model).__name__} is in training mode, and its file would update tables: call model.eval() first"
        )
    held = [child for child in model.modules() if isinstance(child, ShardedModel)]
    if len(held) != 1:
        raise ConfigError(
            f"{type(model).__name__} holds {len(held)} sharded models, not one: shard the model that it calls, or all "
            "of it, with shardrec.shard"
        )
    collectives = held[0].context.collectives
    if collectives.world_size > 1 and "{rank}" not in str(path):
        raise ConfigError(f"{collectives.world_size} ranks would all write {path}: put {{rank}} into its name")
    # Not str.format, which would also replace other braces in the path.
    target = Path(str(path).replace("{rank}", str(collectives.rank)))
    entry = from_tensors(model, features)
    scripted = compiled(entry, portable=True, overlap=collectives.world_size > 1)
    notes = notes_of(entry, held[0])
    if isinstance(held[0], ServedModel) and collectives.world_size == 1:
        from shardrec.serve.published import places_in  # with all of shardrec.checkpoint

        notes["published"] = places_in(scripted, held[0], held[0].formats)
    # Written beside the target and then renamed: a program that loads the path never sees an incomplete file.
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.touch()
    except OSError as error:
        raise ConfigError(f"{os_fault(error)}; give a file in a folder that can be written to") from error
    try:
        with quiet():
            torch.jit.save(scripted, str(beside), _extra_files={NOTES: json.dumps(notes)})
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def notes_of(entry: Entry, model: ShardedModel) -> dict[str, Any]:
    """The description of a model's entry for its callers, as JSON values."""
    collectives = model.context.collectives
    groups = [child.group for child in model.module.modules() if isinstance(child, ShardedCollection)]
    formats = model.formats if isinstance(model, ServedModel) else {}
    return {
        "features": entry.features,
        "inputs": list(entry.inputs),
        "formats": {name: form.value for name, form in formats.items()},
        "rank": collectives.rank,
        "world_size": collectives.world_size,
        "group": next((group.group_name for group in groups if group is not None), ""),
    }
