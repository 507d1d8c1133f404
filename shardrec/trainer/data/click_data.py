"""``ClickBatch``, what a model reads in one step, and ``ClickData``: one way to get them, from files or generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.data.order import BatchRequest
from shardrec.trainer.data.schema import ClickSchema


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickBatch:
    """The rows of one rank in one step. B is the rank's number of rows. It may be 0 in the last step of a pass.

    Has the methods of TorchRec's ``Pipelineable`` (``to``, ``pin_memory``, ``record_stream``), so that a pipeline
    that copies inputs ahead of the computation can handle it like a tensor.

    Attributes:
        dense: float32 (B, dense features). Transformed by :func:`shardrec.trainer.data.transform_dense`.
        sparse: the ids, int64, under the schema's ``sparse_names`` in their order, stride B.
        labels: float32 (B,), 0 or 1; or of a spec with ``labels`` (B, tasks), NaN where a row lacks one.
        groups: int64 (B,), rows with the same key are ranked against each other. None where the data have no groups.
        row_weights: float32 (B,), of the rows in the losses. None where all count alike.
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
        """The same batch in page-locked memory. The batch itself on a machine without an accelerator."""
        return self._with_each(lambda part: part.pin_memory()) if torch.accelerator.is_available() else self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory from being reused before ``stream`` has done its present work (accelerators only)."""
        for part in vars(self).values():
            if part is not None:
                part.record_stream(stream)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> ClickBatch:
        return replace(self, **{name: change(part) for name, part in vars(self).items() if part is not None})


class ClickData(ABC):
    """A source of training and held-out batches, the same for files and for the generator.

    All ranks get the same number of batches for the same arguments, without exchanging anything: each global batch of
    ``world_size * batch_size`` rows is cut into one part per rank. Parts are ``batch_size`` rows but in the last
    global batch, which is spread evenly: a rank's last batch may have fewer rows than another's, or none. A mean over
    the rows of a batch must allow for that, or ``drop_last`` be used.
    """

    @property
    @abstractmethod
    def schema(self) -> ClickSchema:
        """Names and table sizes."""

    @property
    @abstractmethod
    def train_rows(self) -> int:
        """Training rows in one pass, over all ranks."""

    def train_batches(
        self,
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        first_batch: int = 0,
        drop_last: bool = False,
        global_rows: int | None = None,
        epoch: int = 0,
    ) -> Iterator[ClickBatch]:
        """One rank's training batches of one pass.

        Args:
            rank: this rank, from 0.
            world_size: number of ranks.
            batch_size: rows per rank.
            first_batch: batches to leave out at the start, to go on after a checkpoint.
            drop_last: leave out the last global batch when it is not full.
            global_rows: rows of a global batch where they are not ``world_size * batch_size``, such as those of a run
                that goes on with another number of ranks. They are spread evenly.
            epoch: number of the pass, from 0, which decides the order of shuffled rows.

        Raises:
            ConfigError: an argument out of range, at the call.
            DataError: a broken row of this rank in a file, while iterating, before its batch.
        """
        request = BatchRequest(
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            first_batch=first_batch,
            drop_last=drop_last,
            global_rows=global_rows,
        )
        return self._batches(request, epoch)

    def holdout_batches(
        self, rank: int, world_size: int, batch_size: int, *, global_rows: int | None = None
    ) -> Iterator[ClickBatch]:
        """One rank's share of the held-out rows. Arguments and errors as for :meth:`train_batches`."""
        request = BatchRequest(rank=rank, world_size=world_size, batch_size=batch_size, global_rows=global_rows)
        return self._batches(request, None)

    @abstractmethod
    def describe(self) -> str:
        """A few lines of text for a person."""

    @abstractmethod
    def _batches(self, request: BatchRequest, epoch: int | None) -> Iterator[ClickBatch]:
        """The batches of a request: of a pass over the training rows, or, with None, of the held-out ones."""
