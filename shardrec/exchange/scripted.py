"""The exchanges as modules that TorchScript compiles and saves: operators of torch and fbgemm, plain data, no objects.

What :mod:`shardrec.exchange.input`, :mod:`payload` and :mod:`output` do for one module, in the same order and layouts,
with collectives that carry gradients by themselves. Left out, and refused with a fault: a batch size per feature and
weights that take a gradient. Not needed: sums inside hosts (the output is the same without).

Shapes as in those modules: F features of the input, S slots of all ranks, W ranks, G lookup groups, B local batch size.

[Note: faults without Python]
The header carries a number for the fault, so that every rank raises at the same step and says which ranks are at fault
and why, but not which id: the eager model tells that.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import NO_LIMIT, Expectation
from shardrec.exchange.check import are_sound
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.input import group_edges
from shardrec.exchange.route import Route

__all__ = ["FAULTS", "Received", "ScriptedInput", "arrived_rows", "exchange_rows", "list_of", "mean_gradient"]

FAULTS = [
    "",
    "an id is outside its table, or lengths and ids do not fit (call the eager model with this batch: it says which)",
    "the input lacks a feature that a table looks up",
    "the ids are not int32 or int64, or not one-dimensional",
    "the collection is weighted and the input has no floating-point weight for each id, or the other way around",
    "the features have a batch size each, which scripted models do not take",
    "there is not exactly one length for each feature and sample",
    "the weights of the ids take a gradient, which scripted models do not carry back",
]
"""What a header's number says is wrong."""

Received = tuple[Tensor, Tensor, Tensor | None, list[int], list[list[int]], list[list[int]], Tensor | None, Tensor]
"""Lengths (S_mine, B_all), ids (n,), weights (n,), batch sizes, ids per rank and group that came and that went, and,
where each id gets a row, positions (N_sent,) and number of ids per slot (S,)."""


def list_of(kind: Any, values: Iterable[Any]) -> Any:
    """A list attribute whose type TorchScript is told, for an empty one does not show it."""
    return torch.jit.Attribute(list(values), list[kind])


class ScriptedInput(nn.Module):
    """Checks a batch, cuts it by rank, and exchanges header and payload.

    Args:
        route: where the ids of each lookup go.
        expect: what the input must look like.
        collectives: of the group that the embeddings are sharded over.
        per_id: all of a rank's samples go as one, and the positions of the ids are kept.

    Attributes:
        group_name: of the process group; a program that loads the saved model may set another.
    """

    def __init__(self, route: Route, expect: Expectation, collectives: Collectives, *, per_id: bool = False) -> None:
        super().__init__()
        self.group_name = str(getattr(collectives, "group_name", ""))
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.groups = route.groups
        self.per_id = per_id
        self.weighted = expect.weighted
        self.features = list_of(str, list(expect.features))
        self.limits = list_of(int, [expect.rows(feature) for feature in expect.features])
        self.no_limit = NO_LIMIT
        self.unit_keys = list_of(str, list(route.unit_keys))
        self.blocks = route.blocks
        rows = max((edges[-1] for edges in route.unit_boundaries), default=0)
        self.wide_ids = rows > 2**31 - 1
        self.wide_payload = route.wide_ids
        dtype = torch.int64 if self.wide_ids else torch.int32
        device = expect.device
        self.slot_rows = torch.tensor(list(route.slot_rows), dtype=torch.int64, device=device)
        sizes = [edges[-1] for edges in route.unit_boundaries]
        self.block_sizes = torch.tensor(sizes, dtype=dtype, device=device)
        boundaries = [
            torch.tensor([*edges, *[edges[-1]] * (route.blocks + 1 - len(edges))], dtype=dtype, device=device)
            for edges in route.unit_boundaries
        ]
        self.boundaries = list_of(Tensor, boundaries)
        self.slot_units = list_of(int, [slot.unit for slots in route.slots for slot in slots])
        self.slot_counts = list_of(int, list(route.slot_counts()))
        self.slot_edges = list_of(int, [0, *accumulate(route.slot_counts())])
        self.mine = route.slot_counts()[self.rank]
        self.group_edges = torch.tensor(group_edges(route), dtype=torch.int64, device=device)
        order = [source * self.mine + slot for slot in range(self.mine) for source in range(self.world_size)]
        self.slot_major = torch.tensor(order, dtype=torch.int32, device=device)
        self.faults = list_of(str, FAULTS)
        self.nothing = torch.zeros(0, dtype=torch.int64, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Received:
        """Check, cut and exchange a batch."""
        keys, lengths, values, weights, fault = self.checked(features)
        return self.exchange(keys, lengths, values, weights, fault)

    def structural_fault(self, features: KeyedJaggedTensor) -> int:
        """A number of :data:`FAULTS` that shows without reading a tensor; 0 if there is none."""
        keys = features.keys()
        values, weights = features.values(), features.weights_or_none()
        for feature in self.features:
            if feature not in keys:
                return 2
        if values.dim() != 1 or (values.dtype != torch.int64 and values.dtype != torch.int32):
            return 3
        if self.weighted != (weights is not None):
            return 4
        if weights is not None:
            if not weights.is_floating_point() or weights.numel() != values.numel():
                return 4
            if weights.requires_grad and torch.is_grad_enabled():
                return 7
        if features.variable_stride_per_key():
            return 5
        if features.lengths().numel() != len(keys) * features.stride():
            return 6
        return 0

    def checked(self, features: KeyedJaggedTensor) -> tuple[list[str], Tensor, Tensor, Tensor | None, Tensor]:
        """Keys, (F, B) int32 lengths, ids, weights, and the number of the fault; of empty bags if there is one."""
        fault = self.structural_fault(features)
        if fault != 0:
            none = self.nothing.to(torch.float32) if self.weighted else None
            lengths = self.nothing.to(torch.int32).view(len(self.features), 0)
            ids = self.nothing.to(torch.int64 if self.wide_ids else torch.int32)
            return self.features, lengths, ids, none, torch.full_like(self.nothing.sum(), fault)
        keys = features.keys()
        limits: list[int] = []
        unused = False
        for key in keys:
            limit = self.no_limit
            for number, feature in enumerate(self.features):
                if feature == key:
                    limit = self.limits[number]
            unused = unused or limit == self.no_limit
            limits.append(limit)
        lengths = features.lengths().view(len(keys), -1 if len(keys) > 0 else 0)
        values = features.values()
        device = values.device
        valid = are_sound(lengths, values, torch.tensor(limits, dtype=torch.int64, device=device), unused)
        weights = features.weights_or_none()
        values = values.to(torch.int64 if self.wide_ids else torch.int32)
        if not values.is_cuda and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values = values[:0]
            if weights is not None:
                weights = weights[:0]
        if weights is not None:
            weights = weights.detach().to(torch.float32).contiguous()
        lengths = (lengths.to(torch.int32) * valid).contiguous()
        return keys, lengths, values.contiguous(), weights, valid.logical_not().to(torch.int64)

    def exchange(
        self, keys: list[str], lengths: Tensor, values: Tensor, weights: Tensor | None, fault: Tensor
    ) -> Received:
        """Cut the batch, tell the sizes, and send the ids.

        Args:
            keys: F features.
            lengths: (F, B) int32.
            values: (N,), in the dtype that :meth:`checked` gives them.
            weights: (N,) float32, or None.
            fault: 0-d int64, a number of :data:`FAULTS`.
        """
        batch = lengths.size(1)
        units: list[int] = []
        for unit in self.unit_keys:
            units.append(keys.index(unit))
        device = values.device
        positions: Tensor | None = None
        if self.per_id:
            positions = torch.arange(values.numel(), dtype=torch.int32, device=device)
        rows = self.slot_rows
        if self.blocks > 1:
            order = torch.tensor(units, dtype=torch.int32, device=device)
            if positions is not None:
                positions = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, positions, None, None)[1]
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights, None)
            lengths, values, weights, _, place = torch.ops.fbgemm.block_bucketize_sparse_features(
                lengths.reshape(-1),
                values,
                False,
                self.per_id,
                self.block_sizes,
                self.blocks,
                weights,
                block_bucketize_pos=self.boundaries,
            )
            lengths = lengths.view(self.blocks * len(units), batch)
            if positions is not None:
                assert place is not None
                positions = torch.empty_like(positions).index_copy_(0, place.to(torch.int64), positions)
        else:
            of_slots: list[int] = []
            for unit_number in self.slot_units:
                of_slots.append(units[unit_number])
            rows = torch.tensor(of_slots, dtype=torch.int64, device=device)
        lengths_SB = lengths.index_select(0, rows)
        slot_ids = lengths_SB.sum(dim=1, dtype=torch.int64)
        if self.per_id:
            lengths_SB = slot_ids.to(torch.int32).unsqueeze(1)
        ends = torch.ops.fbgemm.asynchronous_complete_cumsum(slot_ids)
        counts = ends.index_select(0, self.group_edges).diff().view(self.world_size, self.groups)
        numbers = self.exchange_header(counts, fault, lengths_SB.size(1))
        went: list[list[int]] = []
        came: list[list[int]] = []
        sizes: list[int] = []
        width = 3 + self.groups
        first = self.world_size * self.groups
        for rank in range(self.world_size):
            went.append(numbers[rank * self.groups : (rank + 1) * self.groups])
            header = numbers[first + rank * width : first + (rank + 1) * width]
            sizes.append(header[2])
            came.append(header[3:])
        total = 0
        for part in went:
            for one in part:
                total += one
        order = rows.to(torch.int32)
        _, ids, sent_weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights, total)
        if positions is not None:
            positions = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, positions, None, total)[1].to(
                torch.int64
            )
        if self.world_size == 1:
            return lengths_SB, ids, sent_weights, sizes, came, went, positions, slot_ids
        all_lengths, all_ids, all_weights = self.exchange_payload(lengths_SB, ids, sent_weights, sizes, came, went)
        return all_lengths, all_ids, all_weights, sizes, came, went, positions, slot_ids

    def exchange_header(self, counts: Tensor, fault: Tensor, batch: int) -> list[int]:
        """Numbers sent (W·G), then the headers received (W, 3 + G): fault, mode, batch size, ids per group."""
        mode = 1 if torch.is_grad_enabled() else 0
        header = counts.new_zeros([self.world_size, 3 + self.groups])
        header[:, 0] = fault
        header[:, 1] = mode
        header[:, 2] = batch
        header[:, 3:] = counts
        received = header
        if self.world_size > 1:
            ones = [1] * self.world_size
            pending = torch.ops._c10d_functional.all_to_all_single(header, ones, ones, self.group_name)
            received = torch.ops._c10d_functional.wait_tensor(pending)
        numbers: list[int] = torch.cat([counts.flatten(), received.flatten()]).tolist()
        first = self.world_size * self.groups
        wrong = ""
        modes = 0
        for rank in range(self.world_size):
            number = numbers[first + rank * (3 + self.groups)]
            modes += numbers[first + rank * (3 + self.groups) + 1]
            if number != 0:
                wrong += f"rank {rank}: {self.faults[number]}; "
        if wrong != "":
            raise RuntimeError("bad input: " + wrong)
        if modes != 0 and modes != self.world_size:
            raise RuntimeError("bad input: gradients are on for some ranks and off for others")
        return numbers

    def exchange_payload(
        self,
        lengths: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        sizes: list[int],
        came: list[list[int]],
        went: list[list[int]],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lengths (S_mine, B_all), ids (n,) and weights (n,), slot by slot and in a slot rank by rank.

        TorchScript cannot read a tensor's bits as another dtype. So weights travel by themselves, and wide ids take the
        lengths with them to 64 bits.
        """
        dtype = torch.int64 if self.wide_payload else torch.int32
        ids = ids.to(dtype)
        parts: list[Tensor] = []
        words_out: list[int] = []
        words_in: list[int] = []
        departed: list[int] = []
        arrived: list[int] = []
        start = 0
        for rank in range(self.world_size):
            count, other = 0, 0
            for group in range(self.groups):
                count += went[rank][group]
                other += came[rank][group]
            departed.append(count)
            arrived.append(other)
            parts.append(lengths[self.slot_edges[rank] : self.slot_edges[rank + 1]].reshape(-1).to(dtype))
            parts.append(ids[start : start + count])
            start += count
            words_out.append(self.slot_counts[rank] * lengths.size(1) + count)
            words_in.append(self.mine * sizes[rank] + other)
        pending = torch.ops._c10d_functional.all_to_all_single(torch.cat(parts), words_in, words_out, self.group_name)
        found_weights: Tensor | None = None
        if weights is not None:
            pending_weights = torch.ops._c10d_functional.all_to_all_single(weights, arrived, departed, self.group_name)
            found_weights = torch.ops._c10d_functional.wait_tensor(pending_weights)
        buffer = torch.ops._c10d_functional.wait_tensor(pending)
        all_lengths: list[Tensor] = []
        all_ids: list[Tensor] = []
        block_lengths: list[Tensor] = []
        start, total = 0, 0
        for rank in range(self.world_size):
            bags = start + self.mine * sizes[rank]
            part = buffer[start:bags].view(self.mine, sizes[rank]).to(torch.int32)
            all_lengths.append(part)
            block_lengths.append(part.sum(dim=1, dtype=torch.int32))
            start += words_in[rank]
            all_ids.append(buffer[bags:start])
            total += arrived[rank]
        found = torch.cat(all_ids)
        if self.mine > 1 and total > 0:
            _, found, found_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self.slot_major, torch.cat(block_lengths), found, found_weights, total
            )
        return torch.cat(all_lengths, dim=1), found, found_weights


def exchange_rows(flat: Tensor, into: list[int], out: list[int], group_name: str) -> Tensor:
    """Issue the all-to-all of float rows, whose gradient goes the same way back, as a mean over the ranks.

    Args:
        flat: float32, the parts for each rank one after the other.
        into: elements from each rank.
        out: elements to each rank.
        group_name: of the process group.
    """
    world_size = len(out)
    if world_size == 1:
        return flat
    if torch.is_grad_enabled():
        # A rank whose rows need no gradient still takes its part in the others' backward.
        if not flat.requires_grad:
            flat = flat.detach().requires_grad_(True)
        flat = mean_gradient(flat, world_size)
    pending: Tensor = torch.ops._c10d_functional_autograd.all_to_all_single(flat, into, out, group_name)
    return pending


def mean_gradient(values: Tensor, world_size: int) -> Tensor:
    """``values``, whose gradient is divided by the number of ranks (see :mod:`shardrec.exchange.output`)."""
    return values.detach() + (values - values.detach()) / world_size


def arrived_rows(pending: Tensor, world_size: int) -> Tensor:
    """Wait for :func:`exchange_rows`."""
    if world_size == 1:
        return pending
    done: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return done
