"""Id maps that learn no more, in torch's operators: for programs that run without shardrec.

Shapes: S slots of this rank, B_all samples of all ranks, N ids, n ids of all the maps of this rank.

The ids of all maps are one sorted list. An id stands in it as its hash, which is a bijection, xored with a number of
its map's own. Equal entries are then of different maps, and other numbers are chosen if there are any. An entry that is
found belongs to the id if it is of the map that was asked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardrec._torchscript import list_of
from shardrec.errors import ConfigError
from shardrec.exchange.hashing import mixed
from shardrec.ids.maps import IdMaps
from shardrec.modules.collection import ShardedCollection


class FrozenMaps(nn.Module):
    """The maps of a rank's shards as they are now."""

    def __init__(self, maps: IdMaps, device: torch.device) -> None:
        super().__init__()
        # A number for each map, and at the end one for plain rows.
        known = list(maps.maps.values())
        self.blocks = list_of(tuple[str, int], maps.maps)
        self.plain = len(known)
        numbers = [
            self.plain if id_map is None else known.index(id_map) for id_map, slots in maps.runs() for _ in range(slots)
        ]
        self.slot_maps = torch.tensor(numbers or [self.plain], device=device)
        fallback = [id_map.options.fallback_rows for id_map in known]
        self.fallback_rows = torch.tensor([*fallback, 0], dtype=torch.int64, device=device)
        self.keys, self.owners, self.rows, self.salts = self.prepared([id_map.records for id_map in known])

    @torch.jit.export
    def prepared(self, records: list[Tensor]) -> list[Tensor]:
        """What :meth:`replace` takes, of maps with other records: (R, 2) int64 each, the ids, and above 0 if in use.

        Programs call both that follow a publisher, see :func:`shardrec.serve.published.places_in`.
        """
        salts = torch.zeros(0, dtype=torch.int64)
        hashes, owners, rows = [salts], [salts], [salts]
        for number, table in enumerate(records):
            used = (table[:, 1] > 0).nonzero().squeeze(1)
            hashes.append(mixed(table[:, 0].index_select(0, used)))
            owners.append(torch.full_like(used, number))
            rows.append(used)
        hash_n, owner_n = torch.cat(hashes), torch.cat(owners)
        keys = order = hash_n
        attempt, clash = 0, True
        while clash:
            assert attempt < 64, "two rows of a table have the same id"
            salts = mixed(torch.arange(self.plain + 1) + attempt * (self.plain + 1))
            keys, order = (hash_n ^ salts[owner_n]).sort()
            clash = bool((keys.diff() == 0).any())
            attempt += 1
        # One entry more, of no map, so that there is one to look at.
        last, no_map = torch.tensor([0x7FFFFFFFFFFFFFFF]), torch.tensor([-1])
        keys, owner_n = torch.cat([keys, last]), torch.cat([owner_n[order], no_map])
        row_n = torch.cat([torch.cat(rows)[order], no_map])
        return [tensor.to(self.slot_maps.device) for tensor in [keys, owner_n, row_n, salts]]

    @torch.jit.export
    def replace(self, prepared: list[Tensor]) -> None:
        """Have other maps from now on."""
        self.keys, self.owners, self.rows, self.salts = prepared[0], prepared[1], prepared[2], prepared[3]

    def forward(self, lengths: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids. Reads no value on the host.

        Args:
            lengths: (S, B_all).
            ids: (N,) int64, slot after slot.

        Returns:
            (N,) int64 rows, and (N,) float32: 0 for an id that is a row of zeros (its row here is 0), and 1 otherwise.
        """
        ends = lengths.sum(dim=1, dtype=torch.int64).cumsum(0)
        slot_N = torch.searchsorted(ends, torch.arange(ids.size(0), device=ids.device), right=True)
        map_N = self.slot_maps.index_select(0, slot_N.clamp(max=self.slot_maps.size(0) - 1))
        hash_N = mixed(ids)
        key_N = hash_N ^ self.salts.index_select(0, map_N)
        place_N = torch.searchsorted(self.keys, key_N).clamp(max=self.keys.size(0) - 1)
        is_mapped = (self.keys.index_select(0, place_N) == key_N) & (self.owners.index_select(0, place_N) == map_N)
        fallback_N = self.fallback_rows.index_select(0, map_N)
        of_fallback = (hash_N & 0xFFFFFFFF).remainder(fallback_N.clamp(min=1))
        rows = torch.where(is_mapped, self.rows.index_select(0, place_N), of_fallback)
        is_plain = map_N == self.plain
        kept = is_mapped | is_plain | (fallback_N > 0)
        return torch.where(is_plain, ids, rows), kept.to(torch.float32)


def frozen_maps(collection: ShardedCollection) -> nn.ModuleList:
    """The frozen maps of a collection, if it has dynamic ids, for a program that runs without shardrec.

    Raises:
        ConfigError: if the collection looks distinct ids up, which takes ids that are rows.
    """
    if collection.id_maps is None:
        return nn.ModuleList()
    if getattr(collection, "finds_distinct", False):
        raise ConfigError(
            f"{type(collection).__name__} has dynamic ids and looks up each distinct id of a batch once. A program "
            "that runs without shardrec does so for plain ids alone: shard the model with dedup=False"
        )
    return nn.ModuleList([FrozenMaps(collection.id_maps, collection.device)])
