"""The tables of a collection that serves: in inference kernels, without parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.gradients import Gradients
from shardrec.exchange.route import Slot
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.groups import LookupGroup, LookupTable
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable
from shardrec.serve.format import WeightFormat
from shardrec.serve.lookup import ServedReplicas, ServedShards

__all__ = ["ServedStorage"]


class ServedTable(ShardedTable):
    """A table that is not trained, and has no entry in a state_dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise ConfigError(
            "a served model has no state_dict: save it with shardrec.serve.save, and the trained one with "
            "shardrec.save_checkpoint"
        )


class ServedStorage(Storage):
    """Makes inference kernels for one collection, whose tables hold nothing before their :attr:`memory` is filled.

    Args:
        formats: of each table, by its name in the plan.

    Attributes:
        memory: (rows, b) uint8 of each part of a table that this rank holds, by its shard; of a replicated table, by
            the table's name in the plan.
    """

    trains = False

    def __init__(self, formats: Mapping[str, WeightFormat]) -> None:
        self.formats = formats
        self.memory: dict[Shard | str, Tensor] = {}

    def shards(
        self,
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool,
    ) -> ServedShards:
        widths = [0 if pooled else group.width or 0 for group in groups]
        lookup = ServedShards(slots, widths, self.formats, collectives, device, pooled=pooled)
        for shard, rows in lookup.memory.items():
            self.memory[shard] = rows
        return lookup

    def replicas(
        self,
        tables: Sequence[LookupTable],
        slot_tables: Sequence[int],
        gradients: Gradients,
        device: torch.device,
        *,
        pooled: bool,
    ) -> ServedReplicas:
        layouts = [table.layout for table in tables]
        lookup = ServedReplicas(layouts, slot_tables, self.formats, gradients, device, pooled=pooled)
        self.memory.update(zip((layout.name for layout in layouts), lookup.memory, strict=True))
        return lookup

    def table(
        self,
        layout: TableLayout,
        parameters: Mapping[Shard | None, nn.Parameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        *,
        fused: bool,
    ) -> ServedTable:
        return ServedTable(layout, {}, group, dtype)
