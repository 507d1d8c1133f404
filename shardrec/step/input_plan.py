"""All of a sharded module's exchange of ids that does not depend on the batch."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor

from shardrec.exchange.bad_ids import POLICIES
from shardrec.exchange.batch import KEY_ORDERS, NO_LIMIT, Expectation
from shardrec.exchange.cut import Cutter
from shardrec.exchange.dedup import DistinctIds
from shardrec.exchange.headers import Headers
from shardrec.exchange.payload import HEADER_SIZES, Payload
from shardrec.exchange.route import Route

_REPEATS = 4  # calls of one module that a header has room for. Further ones go into another exchange


class InputPlan:
    """A module's part of the exchange of ids.

    Args:
        route: where the ids of each lookup go.
        expect: what the input must look like.
        headers: of the model. This module gets columns in every header.
        per_id: each id gets a row of its own, so that bags need not travel: all of a rank's samples go as one, and the
            positions of the ids are kept, unless they are in order.
        distinct: finds the distinct ids of each table, which are sent instead of all ids. Default: all are sent.

    Attributes:
        rank: this one.
        world_size: number of ranks W.
        cutter: cuts batches into slots.
        payload: packs what is sent and unpacks what is received.
        group_edges: (W·G + 1,) int64, where each rank's groups begin among the slots.
        group_spans: the same, as slices of the slots.
        columns: width of a call's part of a header.
        shard_rows: (S_mine,) int64, on the CPU, the rows of the shard behind each slot of this rank.
        flags: of the model's batches that are checked on a device.
        bad_ids: (U,) int64, per feature, ids outside its table that were not an error, in the batches so far.
        limits: of a batch's keys: (F,) int64, one more than the largest id per key, and whether some keys allow any id.
        policies: of a batch's keys: (F,) number of each key's policy, and (U,) place per feature among the keys.
    """

    def __init__(
        self,
        route: Route,
        expect: Expectation,
        headers: Headers,
        *,
        per_id: bool = False,
        distinct: DistinctIds | None = None,
    ) -> None:
        self.per_id = per_id
        self.distinct = distinct
        self.route = route
        self.expect = expect
        self.rank = headers.collectives.rank
        self.world_size = headers.collectives.world_size
        self.columns = HEADER_SIZES + route.groups
        headers.add_module(_REPEATS * self.columns)
        self._headers = headers
        self.flags = headers.flags
        self.limits = lru_cache(maxsize=KEY_ORDERS)(self._new_limits)
        self.policies = lru_cache(maxsize=KEY_ORDERS)(self._new_policies)
        self.cutter = Cutter(route, expect.device)
        self.payload = Payload(route, self.rank, weighted=expect.weighted, device=expect.device)
        sizes = (sum(slot.group == group for slot in slots) for slots in route.slots for group in range(route.groups))
        edges = [0, *accumulate(sizes)]
        self.group_edges = torch.tensor(edges, dtype=torch.int64, device=expect.device)
        self.group_spans = tuple(starmap(slice, pairwise(edges)))
        self.drops = "zero" in expect.on_bad_id.values()
        self.keeps_positions = per_id and not route.in_whole
        self.shard_rows = torch.tensor([slot.shard.rows for slot in route.slots[self.rank]], dtype=torch.int64)
        self.bad_ids = torch.zeros(len(expect.features), dtype=torch.int64, device=expect.device)

    def retire(self) -> None:
        """Give back the columns of each header, for an exchange that replaces this one."""
        self._headers.columns -= _REPEATS * self.columns
        self._headers.modules -= 1

    def _new_limits(self, keys: tuple[str, ...]) -> tuple[Tensor, bool]:
        limits = [self.expect.rows(key) for key in keys]
        return torch.tensor(limits, dtype=torch.int64, device=self.expect.device), NO_LIMIT in limits

    def _new_policies(self, keys: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        numbers = [POLICIES.index(self.expect.on_bad_id.get(key, "error")) for key in keys]
        places = [keys.index(feature) for feature in self.expect.features]
        device = self.expect.device
        return torch.tensor(numbers, device=device), torch.tensor(places, dtype=torch.int64, device=device)
