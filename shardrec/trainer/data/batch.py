"""``ClickBatch``: what a click model reads in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["ClickBatch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickBatch:
    """The rows of one rank in one step. B is the rank's number of rows; it may be 0 in the last step of a pass.

    Has the methods of TorchRec's ``Pipelineable`` (``to``, ``pin_memory``, ``record_stream``), so that a pipeline
    that copies inputs ahead of the computation can handle it like a tensor.

    Attributes:
        dense: float32 (B, dense features); transformed by :func:`shardrec.trainer.data.transform_dense`.
        sparse: the ids, int64, under the schema's ``sparse_names`` in their order, stride B.
        labels: float32 (B,), 0 or 1; or of a spec with ``labels`` (B, tasks), NaN where a row lacks one.
        groups: int64 (B,), rows with the same key are ranked against each other; None where the data have no groups.
        row_weights: float32 (B,), of the rows in the losses; None where all count alike.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    groups: Tensor | None = None
    row_weights: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the number of rows."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ClickBatch:
        """The same batch on ``device``; with ``non_blocking`` a copy from pinned memory does not wait."""
        target = torch.device(device)
        return self._with_each(lambda part: part.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> ClickBatch:
        """The same batch in page-locked memory; the batch itself on a machine without an accelerator."""
        return self._with_each(lambda part: part.pin_memory()) if torch.accelerator.is_available() else self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory from being reused before ``stream`` has done its present work (accelerators only)."""
        for part in vars(self).values():
            if part is not None:
                part.record_stream(stream)

    def _with_each(self, change: Callable[[Any], Any]) -> ClickBatch:
        parts: dict[str, Any] = {name: None if part is None else change(part) for name, part in vars(self).items()}
        return ClickBatch(**parts)
