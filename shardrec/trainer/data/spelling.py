"""Whether the ids of each table are spelled as numbers or as texts, decided by its columns' types and all their values.

In a column of whole numbers ``7.0`` is the number 7, as programs write it that have made floats of them. Beside a
``1.10`` it is a text, such as a version. A column of numbers needs no look at its values, and a column of texts only up
to the first that is not a whole number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from shardrec.trainer.data.encode import spells_numbers
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import FileInfo, read_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Each(Protocol):
    """Calls a function for each item, as ``map`` does; for instance on other ranks."""

    def __call__(self, function: Callable[[_Item], _Result], items: Sequence[_Item], /) -> Iterable[_Result]: ...


def decided(files: Sequence[FileInfo], spec: FeatureSpec, *, each: Each = map, parts: int = 1) -> FeatureSpec:
    """The spec with the spelling of each table's ids.

    Args:
        files: all that the ids are decided by, of :func:`~shardrec.trainer.data.convert.counted`.
        spec: what their columns are.
        each: calls a function for each item, as ``map`` does; for instance with other ranks.
        parts: items that the row groups of the files are dealt to, such as the number of ranks.

    Raises:
        DataError: for a file that is damaged.
    """
    if not spec.undecided:
        return spec
    chunks = [(info, group) for info in files for group in range(len(info.groups)) if not info.lost]
    texts = set().union(*each(partial(_texts, spec), [chunks[number::parts] for number in range(parts)]))
    spellings: dict[str, Literal["numbers", "texts"]] = {
        feature.name: "texts" if feature.name in texts else "numbers" for feature in spec.undecided if not feature.share
    }
    return spec.with_ids({"rules": spec.rules, "spelling": spellings})


def _texts(spec: FeatureSpec, chunks: Sequence[tuple[FileInfo, int]]) -> set[str]:
    """The tables that have an id in some row groups which is not a whole number, by the name of their first feature."""
    texts = set[str]()
    for info, group in chunks:
        open_ones = [
            feature
            for feature in spec.undecided
            if (feature.share or feature.name) not in texts
            and info.kinds.get(feature.source, "texts").endswith("texts")
        ]
        if not open_ones:
            continue
        columns = [*dict.fromkeys(feature.source for feature in open_ones)]
        # Few, large blocks: of each block the whole dictionary of its row group is looked at.
        for block in read_blocks(info, spec, group=group, columns=columns, part=4):
            for feature in open_ones:
                if not spells_numbers(block.table, feature, spec):
                    texts.add(feature.share or feature.name)
            open_ones = [feature for feature in open_ones if (feature.share or feature.name) not in texts]
            if not open_ones:
                break
    return texts
