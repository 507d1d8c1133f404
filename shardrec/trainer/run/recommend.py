"""The best items of a run's model for the rows of files or of a request, with ids as the data have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardrec import ConfigError
from shardrec.trainer.data import ClickBatch, Feature, FeatureSpec, batch_of_request
from shardrec.trainer.data.request import whole_sequences
from shardrec.trainer.run.catalogue import Catalogue, Seen

if TYPE_CHECKING:
    import pyarrow as pa


class Recommender:
    """Finds the items with the highest logits for rows of the run's features without the item.

    Attributes:
        catalogue: whose items are looked up before the first call.
        absent: the item's feature, which rows need not have.

    Raises:
        ConfigError: for another model, or items whose rows do not tell their ids, such as hashed ones.
    """

    def __init__(self, model: nn.Module, spec: FeatureSpec, device: torch.device) -> None:
        self.catalogue = Catalogue(model, spec, device, purpose="a recommendation", remedy="")
        self.absent, self._spec = (self.catalogue.item,), spec
        if self._item.coding not in ("vocabulary", "number"):
            raise ConfigError(
                f"a recommendation needs the id of each row of the item's table, and feature {self._item.name!r} has "
                f"ids: {self._item.coding}: train with vocabulary: from_data, or ids: number"
            )
        features = {feature.name: feature for feature in spec.features}
        self._seen = [name if features[name].max_length is None else f"all {name}" for name in self.catalogue.sharing]

    @cached_property
    def _item(self) -> Feature:
        return next(feature for feature in self._spec.features if feature.name == self.catalogue.item)

    @cached_property
    def spec(self) -> FeatureSpec:
        """Of the rows: the run's, and the items that are seen beyond the ``max_length`` of a history."""
        return whole_sequences(self._spec, self.catalogue.sharing)

    def check_seen(self) -> None:
        """Check that rows tell which items they have seen.

        Raises:
            ConfigError: if no other feature shares the item's table.
        """
        if not self._seen:
            raise ConfigError(
                f"seen items (--exclude-seen) are those of a feature with share: {self.catalogue.item}, and the "
                "features (--features) have none: leave the option out"
            )

    def asked(self, model: nn.Module, batch: ClickBatch) -> tuple[Tensor, Seen]:
        """Vectors of a batch's rows, (B, D), and the items that they have seen."""
        return self.catalogue.queries(model, batch), self.catalogue.seen(batch, self._seen)

    def best(self, queries_BD: Tensor, seen: Seen, k: int, *, exclude_seen: bool) -> Mapping[str, pa.Array]:
        """Lists ``items`` and ``scores`` of the k best items, or of all if there are fewer. Every rank calls it."""
        import pyarrow as pa

        none = Seen(torch.zeros_like(seen.counts_B), seen.items_M[:0])
        rows_Bk, scores_Bk = self.catalogue.top(queries_BD, seen if exclude_seen else none, k)
        offsets = torch.nn.functional.pad((rows_Bk > 0).sum(1).cumsum(0), [1, 0]).int().numpy()
        items, scores = rows_Bk[rows_Bk > 0].numpy(), scores_Bk[rows_Bk > 0].numpy()
        ids = pa.array(items) if self._ids is None else self._ids.take(pa.array(items - 1))
        return {
            "items": pa.ListArray.from_arrays(offsets, ids),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(scores)),
        }

    def answer(self, rows: object, k: int, *, exclude_seen: bool) -> list[dict[str, object]]:
        """:meth:`best` for the rows of a request, on one rank."""
        batch = batch_of_request(rows, self._spec, absent=self.absent, whole=self.catalogue.sharing)
        ((queries_BD, seen),) = self.catalogue.steps.predict([batch], self.asked)
        columns = self.best(queries_BD, seen, k, exclude_seen=exclude_seen)
        items, scores = (columns[name].to_pylist() for name in ("items", "scores"))
        return [{"items": ids, "scores": of_ids} for ids, of_ids in zip(items, scores, strict=True)]

    @cached_property
    def _ids(self) -> pa.Array | None:
        """The id of each row from 1 on. None where it is the row's number."""
        import pyarrow as pa

        if self._item.coding == "number":
            return None
        texts = pa.array(self._item.values)
        if self._item.spelling == "numbers":
            try:
                return texts.cast(pa.int64())
            except pa.ArrowInvalid:  # of one that is too large
                pass
        return texts
