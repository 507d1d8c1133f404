"""Vocabularies counted in the rows to train on, for features with ``vocabulary: from_data``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from shardrec.trainer.data.encode import count_values, group_keys
from shardrec.trainer.data.order import held_out
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.spelling import Each
from shardrec.trainer.data.tables import FileInfo, read_blocks


def count_vocabularies(
    files: Sequence[FileInfo],
    spec: FeatureSpec,
    *,
    holdout: float = 0.0,
    each: Each = map,
    parts: int = 1,
) -> dict[str, list[str]]:
    """The values of each feature in ``spec.uncounted`` that occur ``min_count`` times, the most frequent first.

    Values of features that share the table count, too. Rows that are held out do not, so that a value that only they
    have is unknown to the model, as a new one is when it serves. Memory is that of the distinct values.

    Args:
        files: read in this order as one stream, of :func:`~shardrec.trainer.data.convert.counted`.
        spec: what the columns are.
        holdout: share of the rows that is held out, as of :class:`~shardrec.trainer.data.FileClickData`.
        each: calls a function for each item, as ``map`` does; for instance with other ranks.
        parts: items that the chunks of the files are dealt to, such as the number of ranks.

    Raises:
        DataError: for a file that is damaged.
    """
    chunks, first = [], 0
    for info in files:
        chunks += [(info, group, first) for group in range(len(info.groups))]
        first += sum(info.groups)
    counts = {feature.name: Counter[str]() for feature in spec.uncounted}
    for part in each(partial(_counts, spec, holdout), [chunks[number::parts] for number in range(parts)]):
        for name, values in part.items():
            counts[name].update(values)
    vocabularies = {}
    for feature in spec.uncounted:
        pairs = sorted(counts[feature.name].items(), key=lambda pair: (-pair[1], pair[0]))
        vocabularies[feature.name] = [value for value, count in pairs if count >= (feature.min_count or 1)]
    return vocabularies


def _counts(
    spec: FeatureSpec, holdout: float, chunks: Sequence[tuple[FileInfo, int, int]]
) -> dict[str, dict[str, int]]:
    """How often each value occurs in some chunks: of each file, group, and the number of the file's first row."""
    import pyarrow as pa

    counts = {feature.name: Counter[str]() for feature in spec.uncounted}
    for info, group, first in chunks:
        for block in read_blocks(info, spec, group=group):
            units = block.numbers + first if spec.group is None else group_keys(block.table, spec)[0]
            trained = block.table.filter(pa.array(~held_out(units, holdout)))
            for feature in spec.sparse:
                if (owner := feature.share or feature.name) in counts:
                    counts[owner].update(count_values(trained, feature, spec))
    return {name: dict(values) for name, values in counts.items()}
