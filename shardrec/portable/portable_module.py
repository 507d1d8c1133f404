"""What the portable twins of sharded collections have in common: their input, lookups, and all-to-all of float rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardrec._torchscript import list_of
from shardrec.errors import ConfigError
from shardrec.modules.collection import ShardedCollection
from shardrec.portable.frozen_ids import frozen_maps
from shardrec.portable.portable_input import PortableInput


class PortableTwin(nn.Module):
    """A twin that infers, with the memory of a sharded collection's tables."""

    def __init__(self, collection: ShardedCollection) -> None:
        super().__init__()
        collectives, comms = collection.context.collectives, collection.context.options.comms
        if collectives.world_size > 1 and (comms.output, comms.gradient) != ("fp32", "fp32"):
            raise ConfigError(
                f"{type(collection).__name__} exchanges {comms.output} and {comms.gradient}. A program that runs "
                "without shardrec exchanges fp32: shard without comms, or script with portable=False"
            )
        self.input = PortableInput(collection.input, collectives)
        self.id_maps = frozen_maps(collection)
        self.lookups, group_slots = collection.shards.scripted()
        self.group_slots = list_of(int, group_slots)
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.output_dtype = collection.output_dtype
        self.nothing = torch.zeros(0, dtype=torch.float32, device=collection.device)

    def exchange_rows(self, flat: Tensor, into: list[int], out: list[int]) -> Tensor:
        """Issue the all-to-all of float rows.

        Args:
            flat: float32, the parts for each rank one after the other.
            into: elements from each rank.
            out: elements to each rank.

        Returns:
            What :meth:`arrived_rows` takes.
        """
        if self.world_size == 1:
            return flat
        pending: Tensor = torch.ops._c10d_functional.all_to_all_single(flat, into, out, self.input.group_name)
        return pending

    def arrived_rows(self, pending: Tensor) -> Tensor:
        """Wait for :meth:`exchange_rows`."""
        if self.world_size == 1:
            return pending
        done: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
        return done

    def by_group(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, came: list[list[int]]) -> list[Tensor]:
        """Per group, the (B_all, D) pooled columns of this rank's shards, or the (n, w) rows.

        Args:
            lengths: (S_mine, B_all).
            ids: (n,).
            weights: (n,) or None.
            came: ids from each rank, per group.
        """
        counts = [sum([per_group[group] for per_group in came]) for group in range(len(self.group_slots))]
        ids_of = ids.split(counts)
        lengths_of = lengths.split(self.group_slots)
        looked_up: list[Tensor] = []
        for group, lookup in enumerate(self.lookups):
            part: Tensor | None = None
            if weights is not None:
                part = weights.split(counts)[group]
            looked_up.append(lookup(ids_of[group], lengths_of[group], part))
        return looked_up
