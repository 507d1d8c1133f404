"""Vocabularies counted in the rows to train on, for features with ``vocabulary: from_data``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardrec.data.encode import count_values, group_keys
from shardrec.data.spec import FeatureSpec
from shardrec.data.split import held_out
from shardrec.data.tables import check_file, counted, read_blocks

__all__ = ["count_vocabularies"]


def count_vocabularies(paths: Sequence[str], spec: FeatureSpec, *, holdout: float = 0.0) -> dict[str, list[str]]:
    """The values of each feature in ``spec.uncounted`` that occur ``min_count`` times, the most frequent first.

    Values of features that share the table count, too. Rows that are held out do not, so that a value that only they
    have is unknown to the model, as a new one is when it serves. Memory is that of the distinct values.

    Args:
        paths: files, read in this order as one stream.
        spec: what the columns are.
        holdout: share of the rows that is held out, as of :class:`~shardrec.data.FileClickData`.

    Raises:
        DataError: for a file that is missing, damaged, or without the columns.
    """
    import pyarrow as pa

    counts: dict[str, Counter[str]] = {feature.name: Counter() for feature in spec.uncounted}
    before = 0
    for path in paths:
        info = counted(check_file(path, spec), spec)
        for group in range(len(info.groups)):
            for block in read_blocks(info, spec, group=group):
                units = block.numbers + before if spec.group is None else group_keys(block.table, spec)
                trained = block.table.filter(pa.array(~held_out(units, holdout)))
                for feature in spec.sparse:
                    if (owner := feature.share or feature.name) in counts:
                        counts[owner].update(count_values(trained, feature))
        before += sum(info.groups)
    vocabularies = {}
    for feature in spec.uncounted:
        pairs = sorted(counts[feature.name].items(), key=lambda pair: (-pair[1], pair[0]))
        vocabularies[feature.name] = [value for value, count in pairs if count >= (feature.min_count or 1)]
    return vocabularies
