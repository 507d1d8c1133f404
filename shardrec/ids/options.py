"""Options of a table with dynamic ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardrec.errors import ConfigError

Evict = Literal["never", "lfu", "lru", "ttl", "score"]
"""Which ids lose their rows when others need them."""

POLICIES: tuple[Evict, ...] = get_args(Evict)
"""In the order of their numbers, as ``shardrec::map_ids`` takes them."""


@dataclass(frozen=True, kw_only=True)
class DynamicIds:
    """Assign a table's rows to raw 64-bit ids. ``num_embeddings`` is then the number of rows, not of ids.

    A step is a lookup of the collection in training mode. A step that looks an id up uses it once, regardless of how
    often it occurs. docs/dynamic_ids.md states the rules.

    Args:
        capacity: rows that ids may have, spread over the row blocks. Default: all but the fallback rows. A lower number
            leaves a reserve for :meth:`shardrec.ShardedModel.set_id_capacity`.
        admit_after: an id gets a row in the n-th step that uses it; until then it takes the fallback. At most as many
            ids wait as the table has rows. The ids unused for longest are dropped first.
        evict: which ids lose their rows if none is free: ``"lfu"``, used by the fewest steps; ``"lru"``, not used
            for longest; ``"score"``, with the fewest uses per step since the last one; ``"ttl"``, not used for longest,
            and for more than ``ttl`` steps; ``"never"``. An evicted row gets new initial values, and its optimizer
            state is reset.
        ttl: steps, with ``evict="ttl"``.
        fallback_rows: per row block, for ids that have no row: 1, one row that they share. N, hashed into n rows;
            0, a row of zeros, which takes no gradient (and counts in a mean).

    Raises:
        ConfigError: if a value is not one that is documented here.

    TorchRec's managed collisions and Monolith's collisionless embedding table (Liu et al., 2022) also hold a changing
    set of ids.
    """

    capacity: int | None = None
    admit_after: int = 1
    evict: Evict = "lfu"
    ttl: int | None = None
    fallback_rows: int = 0

    def __post_init__(self) -> None:
        if self.evict not in POLICIES:
            raise ConfigError(f"evict is {self.evict!r}. Give one of {', '.join(map(repr, POLICIES))}")
        if (self.evict == "ttl") != (self.ttl is not None) or (self.ttl is not None and self.ttl < 1):
            raise ConfigError(f"evict={self.evict!r} and ttl={self.ttl}. Give ttl, 1 step or more, with 'ttl' alone")
        if self.admit_after < 1:
            raise ConfigError(f"admit_after={self.admit_after}. Give 1 for a row at the first use, or more")
        if self.fallback_rows < 0:
            raise ConfigError(f"fallback_rows={self.fallback_rows}. Give 0 for zeros, or more")
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"capacity={self.capacity}. Give the number of rows that ids may have, or None for all")
