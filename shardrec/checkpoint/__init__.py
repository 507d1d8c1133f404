"""Checkpoints of sharded models, for any number of ranks."""

from shardrec.checkpoint.checkpoints import Checkpoints, LoadedCheckpoint
from shardrec.checkpoint.id_files import export_ids, import_ids
from shardrec.checkpoint.load import load_checkpoint
from shardrec.checkpoint.save import PendingSave, save_checkpoint

__all__ = [
    "Checkpoints",
    "LoadedCheckpoint",
    "PendingSave",
    "export_ids",
    "import_ids",
    "load_checkpoint",
    "save_checkpoint",
]
