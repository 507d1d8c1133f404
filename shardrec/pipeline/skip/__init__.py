"""Skip connections: tensors from a layer of a sequential to a later one, past those between.

::

    layer 0 ──► layer 1 ──► layer 2 ──► layer 3
       └── stash("a") ─────────────────── pop("a")

See :mod:`shardrec.pipeline` for their way between stages.
"""

from shardrec.pipeline.skip.routes import verify_skippables
from shardrec.pipeline.skip.skippable import Skippable, pop, skippable, stash
from shardrec.pipeline.skip.tracker import Namespace, SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = [
    "Namespace",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "pop",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
