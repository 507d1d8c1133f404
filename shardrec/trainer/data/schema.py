"""``ClickSchema``: which columns a click-through data set has, and how many rows each embedding table needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardrec import ConfigError

CRITEO_CARDINALITIES: tuple[int, ...] = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical columns of the Criteo Kaggle training file, column by column."""


@dataclass(frozen=True, kw_only=True)
class ClickSchema:
    """Names and sizes of the columns of one data set. Every reader and the generator follow it.

    Attributes:
        dense_names: names of the numeric features, in file order.
        sparse_names: names of the categorical features, in file order. The keys of every batch's
            ``KeyedJaggedTensor``, in this order.
        num_embeddings: rows of the embedding table of each categorical feature. Row 0 is for a missing value, so
            that each is at least 2.
        weighted: whether each id comes with a weight.
        outputs: columns of a model's output for each label: a logit of each class, or one number.
        dims: columns of the table of each categorical feature, None for what the model's ``dim`` says. Empty for None
            everywhere.
        tables: name of the table of each categorical feature. Features that share one have the same name, rows and
            columns. Default: ``t_`` and the feature's name.

    Raises:
        ConfigError: no feature at all, a name used twice, sizes that do not match the names, a table of fewer than 2
            rows or more than ``2**31 - 1``, or features that share a table and differ. All the faults are in one
            message.
    """

    dense_names: tuple[str, ...]
    sparse_names: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    weighted: bool = False
    outputs: tuple[int, ...] = (1,)
    dims: tuple[int | None, ...] = ()
    tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("dense_names", "sparse_names", "num_embeddings", "dims", "tables"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        object.__setattr__(self, "dims", self.dims or (None,) * len(self.sparse_names))
        object.__setattr__(self, "tables", self.tables or tuple(f"t_{name}" for name in self.sparse_names))
        faults = []
        if not self.sparse_names:
            faults.append("sparse_names is empty: give at least one categorical feature")
        repeated = sorted(name for name, n in Counter(self.dense_names + self.sparse_names).items() if n > 1)
        if repeated:
            faults.append(f"names used more than once: {', '.join(map(repr, repeated))}: rename them")
        faults += [
            f"{field} has {len(getattr(self, field))} {values} for {len(self.sparse_names)} sparse_names: give one "
            f"{values.removesuffix('s')} per name"
            for field, values in (("num_embeddings", "sizes"), ("dims", "sizes"), ("tables", "names"))
            if len(getattr(self, field)) != len(self.sparse_names)
        ]
        shapes: dict[str, tuple[int, int | None]] = {}
        faults += [
            f"features that share table {table!r} have {(size, dim)} and {shapes[table]} as rows and columns: give "
            "them the same"
            for table, size, dim in zip(self.tables, self.num_embeddings, self.dims, strict=False)
            if shapes.setdefault(table, (size, dim)) != (size, dim)
        ]
        faults += [
            f"num_embeddings of {name!r} is {size}: a table needs 2 to {2**31 - 1} rows (row 0 is for missing values)"
            for name, size in zip(self.sparse_names, self.num_embeddings, strict=False)
            if not 2 <= size < 2**31
        ]
        if faults:
            raise ConfigError("ClickSchema: " + "; ".join(faults))


def criteo_schema(*, max_embeddings: int = 100_000) -> ClickSchema:
    """The schema of the Criteo Kaggle display-advertising files: 13 integers and 26 categories.

    Args:
        max_embeddings: the largest table, in rows. A column with more distinct values is hashed into this number of
            rows. A smaller one gets a row per distinct value plus row 0.

    Returns:
        A schema named ``int_1`` ... ``int_13`` and ``cat_1`` ... ``cat_26``.
    """
    return ClickSchema(
        dense_names=tuple(f"int_{i}" for i in range(1, 14)),
        sparse_names=tuple(f"cat_{i}" for i in range(1, len(CRITEO_CARDINALITIES) + 1)),
        num_embeddings=tuple(min(size + 1, max_embeddings) for size in CRITEO_CARDINALITIES),
    )
