"""``ClickData``: one way to get batches, whether from files or from the generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from shardrec.trainer.data.batch import ClickBatch
from shardrec.trainer.data.schema import ClickSchema
from shardrec.trainer.data.split import BatchRequest

__all__ = ["ClickData"]


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
                that goes on with another number of ranks; they are spread evenly.
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
        """One rank's share of the held-out rows; arguments and errors as for :meth:`train_batches`."""
        request = BatchRequest(rank=rank, world_size=world_size, batch_size=batch_size, global_rows=global_rows)
        return self._batches(request, None)

    @abstractmethod
    def describe(self) -> str:
        """A few lines of text for a person."""

    @abstractmethod
    def _batches(self, request: BatchRequest, epoch: int | None) -> Iterator[ClickBatch]:
        """The batches of a request: of a pass over the training rows, or, with None, of the held-out ones."""
