"""Ids of hot rows, of which every rank has a copy: moved to keys of their own before a batch is cut.

Shapes: F keys of the batch, H of them with hot rows, B samples, N ids, R hot rows of all tables.

::

    key       a          b            a        b            hot a    hot b
    ids       1 2 | 9    7 4 | 3  ──► 2 |      4 | 3        0 | 1    0 |      (hot rows of a: 1 and 9; of b: 7)

What is left of a key travels to the owners of its rows. The keys of hot rows belong to no unit; their ids, now
positions among the hot rows of their table, are looked up in this rank's copies. The split keeps the number of ids, so
that nothing has to be known on the host, and all that follows is that of a plain batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from shardrec import native
from shardrec.exchange.batch import KEY_ORDERS, Batch
from shardrec.exchange.cut import permuted
from shardrec.layout import TableLayout

__all__ = ["HotSplit", "hot_key", "split_hot"]

_NOT_HOT = -(2**62)
_WORD = 64


def hot_key(key: str) -> str:
    """The key of the ids of hot rows that were under ``key``."""
    return f"\0hot {key}"


@dataclass(frozen=True, kw_only=True)
class _KeyOrder:
    """Constants for one order of the batch's keys."""

    keys: tuple[str, ...]  # of the result
    chosen: Tensor | None  # (F,) int32 positions of the keys to split among those given; None: all, in order
    chosen_of: tuple[int, ...]  # the same, on the host, and never None
    most: int  # keys that are made of one
    firsts: Tensor  # (F + 1,) int64, where the rows of each key's table begin, if tables lie one after the other
    starts: Tensor  # (F + 1,) int64, where its hot rows begin among all hot rows
    hot: Tensor  # (H,) int64 positions of the keys with hot rows


class HotSplit:
    """Moves the ids of hot rows to keys of their own.

    Args:
        tables: by key, the layout of its table, which has hot rows. No other table looks such a key up.
        copies: keys to be made of others first, and of which (where several tables look one up, or for each lookup).
        keep: keep the batch's own keys beside the copies.
        device: of the batches.
    """

    def __init__(
        self, tables: Mapping[str, TableLayout], copies: Mapping[str, str], *, keep: bool, device: torch.device
    ) -> None:
        self._tables, self._copies, self._keep = dict(tables), dict(copies), keep
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}
        rows: list[Tensor] = []
        first = start = 0
        for layout in {table.name: table for table in tables.values()}.values():
            self._places[layout.name] = first, start
            rows.append(torch.tensor(layout.hot_rows, dtype=torch.int64) + first)
            # Whole words of the index.
            first, start = first + -(-layout.num_embeddings // _WORD) * _WORD, start + len(layout.hot_rows)
        self._rows = torch.cat(rows).to(device)
        self._index = _index_of(self._rows, first // _WORD) if device.type == "cpu" and native.is_loaded() else None
        self._order = lru_cache(maxsize=KEY_ORDERS)(self._new_order)

    def __call__(self, batch: Batch, *, places: bool) -> Batch:
        """Split a checked batch.

        Args:
            batch: the local batch.
            places: give the result its ``order``, as a weighted batch gets in any case.

        Returns:
            The batch, with the keys of hot rows after the others.
        """
        keys = self._order(batch.keys)
        before: Tensor | None = None
        if keys.chosen is not None:
            batch, before = self._copied(batch, keys, keys.chosen)
        weighted = batch.weights is not None
        given = batch.lengths, batch.values, batch.weights, keys.firsts, keys.starts, keys.hot
        if self._index is not None:
            found = torch.ops.shardrec.split_hot(*given, self._index, places or weighted)
        else:
            found = split_hot(*given, self._rows)
        lengths, values, weights, order = found
        sizes = batch.sizes
        if sizes is not None:
            by_key = dict(zip(keys.keys, sizes, strict=False))
            sizes = (*sizes, *(by_key[key] for key in keys.keys[: len(sizes)] if key in self._tables))
        return replace(
            batch,
            keys=keys.keys,
            lengths=lengths,
            values=values,
            weights=weights if weighted else None,
            sizes=sizes,
            order=(order if before is None else before.index_select(0, order)) if places or weighted else None,
        )

    def _copied(self, batch: Batch, order: _KeyOrder, chosen: Tensor) -> tuple[Batch, Tensor | None]:
        """The batch with the keys to split, and where its ids were, where they have weights."""
        total = None if self._device.type == "cpu" else batch.values.numel() * order.most
        places = None if batch.weights is None else torch.arange(batch.values.numel(), device=self._device)
        given = batch.lengths, batch.values, batch.weights, places
        lengths, values, weights, before = permuted(chosen, *given, total)
        sizes = None if batch.sizes is None else tuple(batch.sizes[place] for place in order.chosen_of)
        return replace(batch, lengths=lengths, values=values, weights=weights, sizes=sizes), before

    def _new_order(self, keys: tuple[str, ...]) -> _KeyOrder:
        place = {key: index for index, key in enumerate(keys)}
        kept = keys if self._keep else ()
        chosen = (*range(len(kept)), *(place[feature] for feature in self._copies.values()))
        keys = (*kept, *self._copies)
        hot = [index for index, key in enumerate(keys) if key in self._tables]
        begins = [self._places[self._tables[key].name] if key in self._tables else (_NOT_HOT, 0) for key in keys]
        firsts, starts = torch.tensor([*begins, (_NOT_HOT, 0)], dtype=torch.int64, device=self._device).unbind(1)
        return _KeyOrder(
            keys=(*keys, *(hot_key(keys[index]) for index in hot)),
            chosen=torch.tensor(chosen, dtype=torch.int32, device=self._device) if self._copies else None,
            chosen_of=chosen,
            most=max(map(chosen.count, chosen), default=0),
            firsts=firsts.contiguous(),
            starts=starts.contiguous(),
            hot=torch.tensor(hot, dtype=torch.int64, device=self._device),
        )


def _index_of(rows: Tensor, words: int) -> Tensor:
    """(words, 2) int64: a bit for each of 64 rows that says whether it is hot, and the hot rows before them."""
    word = rows // _WORD
    bits = torch.zeros(words, dtype=torch.int64).index_add_(0, word, torch.ones_like(rows) << rows % _WORD)
    count = torch.bincount(word, minlength=words)
    return torch.stack([bits, count.cumsum(0) - count], dim=1)


def split_hot(
    lengths: Tensor, values: Tensor, weights: Tensor | None, firsts: Tensor, starts: Tensor, hot: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """``torch.ops.shardrec.split_hot`` by torch's operators. It reads no value.

    Args:
        lengths: (F, B) ids of each bag.
        values: (N,) ids; behind those of the bags there may be more, which are none.
        weights: (N,) or None.
        firsts: (F + 1,) int64, where the rows of each key's table begin, if the tables with hot rows lie one after the
            other; far below 0 for keys without, and for what is no id.
        starts: (F + 1,) int64, where the hot rows of each key's table begin in ``rows``.
        hot: (H,) int64 positions of the keys with hot rows.
        rows: (R,) int64, ascending, the hot rows of all tables, if the tables lie one after the other.

    Returns:
        Lengths (F + H, B); the ids, of hot rows as positions among those of their table (N,); their weights; and
        where each of them was (N,) int64.
    """
    places = torch.arange(values.numel(), device=values.device)
    ends_F = lengths.sum(dim=1, dtype=torch.int64).cumsum(0)
    key_N = torch.searchsorted(ends_F, places, right=True)
    linear_N = values + firsts.index_select(0, key_N)
    found_N = torch.searchsorted(rows, linear_N).clamp_(max=rows.numel() - 1)
    hot_N = rows.index_select(0, found_N) == linear_N
    seen = nn.functional.pad(hot_N.cumsum(0), [1, 0])
    ends = nn.functional.pad(lengths.reshape(-1).cumsum(0, dtype=torch.int64), [1, 0])
    hot_FB = seen.index_select(0, ends).diff().view(lengths.size()).to(lengths.dtype)
    colds = ends_F[-1] - seen[-1]
    moved = torch.where(hot_N, colds + seen[:-1], places - seen[:-1])
    moved = torch.where(places < ends_F[-1], moved, places)
    local_N = torch.where(hot_N, found_N - starts.index_select(0, key_N), values).to(values.dtype)
    order = torch.empty_like(moved).scatter_(0, moved, places)
    weights = None if weights is None else weights.index_select(0, order)
    return torch.cat([lengths - hot_FB, hot_FB.index_select(0, hot)]), local_N.index_select(0, order), weights, order
