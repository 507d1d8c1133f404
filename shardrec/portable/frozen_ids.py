"""Id maps that learn no more, in torch's operators: for programs that run without shardrec.

Shapes: S slots of this rank, B_all samples of all ranks, N ids, n ids of all the maps of this rank.

The ids of all maps are one sorted list. An id stands in it as its hash, which is a bijection, xored with a number of
its map's own. Equal entries are then of different maps, and other numbers are chosen if there are any; an entry that is
found is that of the id if it is of the map that was asked.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.hashing import mixed
from shardrec.ids.maps import IdMaps
from shardrec.modules.collection import ShardedCollection

__all__ = ["FrozenMaps", "frozen_maps"]


class FrozenMaps(nn.Module):
    """The maps of a rank's shards as they are now.

    Args:
        maps: copied.
        device: of the ids.
    """

    def __init__(self, maps: IdMaps, device: torch.device) -> None:
        super().__init__()
        known = list(dict.fromkeys(one for one, _ in maps.runs() if one is not None))
        # A number for each map, and at the end one for plain rows.
        numbers = [len(known) if one is None else known.index(one) for one, slots in maps.runs() for _ in range(slots)]
        used = [(one.records[:, 1] > 0).nonzero().squeeze(1) for one in known]
        ids = [one.records[rows, 0] for one, rows in zip(known, used, strict=True)]
        for attempt in count():
            salts = mixed(torch.arange(len(known) + 1) + attempt * (len(known) + 1))
            keys = torch.cat([salts[:0], *(mixed(one) ^ salt for one, salt in zip(ids, salts[:-1], strict=True))])
            keys, order = keys.sort()
            if not bool((keys.diff() == 0).any()):
                break
        owners = torch.cat([salts[:0], *(torch.full_like(one, number) for number, one in enumerate(ids))])
        rows = torch.cat([salts[:0], *used])
        # One entry more, of no map, so that there is one to look at.
        last, no_map = torch.tensor([2**63 - 1]), torch.tensor([-1])
        self.keys = torch.cat([keys, last]).to(device)
        self.owners = torch.cat([owners[order], no_map]).to(device)
        self.rows = torch.cat([rows[order], no_map]).to(device)
        self.salts = salts.to(device)
        fallback = [one.options.fallback_rows for one in known]
        self.fallback_rows = torch.tensor([*fallback, 0], dtype=torch.int64, device=device)
        self.plain = len(known)
        self.slot_maps = torch.tensor(numbers or [self.plain], device=device)

    def forward(self, lengths: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids; reads no value on the host.

        Args:
            lengths: (S, B_all).
            ids: (N,) int64, slot after slot.

        Returns:
            (N,) int64 rows, and (N,) float32: 0 for an id that is a row of zeros, whose row is 0 here, and else 1.
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
    if getattr(collection, "dedup", False):
        raise ConfigError(
            f"{type(collection).__name__} has dynamic ids and looks up each distinct id of a batch once; a program "
            "that runs without shardrec does so for plain ids alone: shard the model with dedup=False"
        )
    return nn.ModuleList([FrozenMaps(collection.id_maps, collection.device)])
