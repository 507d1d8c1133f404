"""Pipelined stages, and skip connections between them.

::

    skip          stash(name, tensor) in one layer, pop(name) in a later one
    Pipeline      a sequential cut into stages, on several devices or ranks, between which micro-batches flow
    TrainPipeline a training loop that exchanges the next ids and copies inputs while a batch is computed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrec._late_imports import names_from
from shardrec._versions import check_versions
from shardrec.errors import PipelineError
from shardrec.exchange.recomputation import is_checkpointing, is_recomputing
from shardrec.pipeline import skip
from shardrec.pipeline.balance import balance_by_size, balance_by_time
from shardrec.pipeline.pipeline import Pipeline
from shardrec.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from shardrec.pipeline.lookahead import tell_others
    from shardrec.pipeline.train import TrainPipeline

__all__ = [
    "Pipeline",
    "PipelineError",
    "Timeline",
    "TrainPipeline",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "skip",
    "tell_others",
]

_HOMES, _load = names_from(
    __name__, {"shardrec.pipeline.lookahead": "tell_others", "shardrec.pipeline.train": "TrainPipeline"}
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        check_versions()  # they import torchrec and fbgemm-gpu
    return _load(name)
