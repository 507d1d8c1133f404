"""``open_click_data``: one way to get batches, whether from files or from the generator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from shardrec.data.batch import ClickBatch
from shardrec.data.config import SyntheticConfig
from shardrec.data.files import FileClickData
from shardrec.data.schema import ClickSchema
from shardrec.data.spec import FeatureSpec, criteo_spec
from shardrec.data.synthetic import SyntheticClickData
from shardrec.data.urls import files_of
from shardrec.errors import ConfigError

__all__ = ["ClickData", "open_click_data"]


class ClickData(Protocol):
    """A source of training and held-out batches, the same for files and for the generator.

    All ranks get the same number of batches for the same arguments, without exchanging anything: each global batch of
    ``world_size * batch_size`` rows is cut into one part per rank. Parts are ``batch_size`` rows but in the last
    global batch, which is spread evenly: a rank's last batch may have fewer rows than another's, or none. A mean over
    the rows of a batch must allow for that, or ``drop_last`` be used.
    """

    @property
    def schema(self) -> ClickSchema:
        """Names and table sizes."""
        ...

    @property
    def train_rows(self) -> int | None:
        """Training rows in one pass over all ranks, None while that is not known."""
        ...

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
            DataError: a broken row in a file, while iterating; on every rank before the same batch.
        """
        ...

    def holdout_batches(
        self, rank: int, world_size: int, batch_size: int, *, global_rows: int | None = None
    ) -> Iterator[ClickBatch]:
        """One rank's share of the held-out rows; arguments and errors as for :meth:`train_batches`."""
        ...

    def describe(self) -> str:
        """A few lines of text for a person."""
        ...


def open_click_data(
    source: SyntheticConfig | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    spec: FeatureSpec | None = None,
    **options: Any,
) -> FileClickData | SyntheticClickData:
    """Opens rows of clicks.

    Args:
        source: a :class:`SyntheticConfig`; or files, read as one stream: a name, a folder, a pattern, a URL of one of
            these, or a sequence of them.
        spec: what the files' columns are; :func:`criteo_spec` by default.
        options: of :class:`FileClickData`.

    Returns:
        The source, as a :class:`ClickData`; a synthetic one also has ``best_metrics()``, a file ``skipped``.

    Raises:
        ConfigError: an option out of range, or one for files given with a :class:`SyntheticConfig`.
        DataError: a file that cannot be read.
    """
    if isinstance(source, SyntheticConfig):
        given = [*options, *(["spec"] if spec is not None else [])]
        if given:
            raise ConfigError(f"{', '.join(given)} given with a SyntheticConfig: set its own fields instead")
        return SyntheticClickData(source)
    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    found = [name for path in paths for name in files_of(os.fspath(path))]
    return FileClickData(found, criteo_spec() if spec is None else spec, **options)
