"""Checkpoints of sharded models, for any number of ranks."""

from shardrec.checkpoint.save import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
