"""Checkpoints of sharded models, for any number of ranks."""

from shardrec.checkpoint.checkpoints import Checkpoints, LoadedCheckpoint
from shardrec.checkpoint.id_files import export_ids, import_ids
from shardrec.checkpoint.load import load_checkpoint, verify_checkpoint
from shardrec.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from shardrec.checkpoint.save import PendingSave, save_checkpoint
from shardrec.checkpoint.warm import WarmStart, WarmTensor, warm_start

__all__ = [
    "MANIFEST",
    "Checkpoints",
    "LoadedCheckpoint",
    "Manifest",
    "PendingSave",
    "WarmStart",
    "WarmTensor",
    "export_ids",
    "import_ids",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "verify_checkpoint",
    "warm_start",
]
