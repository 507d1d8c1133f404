"""The exchanges as modules of operators and plain data, as TorchScript and torch.export take them.

What :mod:`shardrec.exchange.input` and :mod:`payload` do for one module, by the same routes and in the same order of
slots. Header and payload are of its own: a row of the header is fault | mode | batch size | counts, without a checksum;
weights have an all-to-all of their own; wide ids widen the lengths. Left out, and refused with a fault: a batch size
per feature and weights that take a gradient. Not needed: sums inside hosts (the output is the same without).

Shapes as in those modules: F features of the input, S slots of all ranks, W ranks, G lookup groups, B local batch size.

[Note: faults without Python]
The header carries a number for the fault, so that every rank raises at the same step and says which ranks are at fault
and why, but not which id: the eager model tells that.

[Note: sizes that tracers do not know]
The numbers of ids come from a header, so a tracer has a symbol for each, and cannot answer a question about one. Hence
tensors are split by lists of sizes, whose sums it can prove, and not cut by bounds; what this rank has told itself is
not read back; and nothing is asked of a count except under TorchScript, which has the number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardrec._torchscript import counts_of, list_of
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.cut import in_blocks, permuted
from shardrec.exchange.input import InputExchange
from shardrec.portable.batch import Checked, PortableBatch
from shardrec.portable.group import GroupName

__all__ = ["PortableInput", "Received"]

# Spelled as a call, for TorchScript wants types where an annotation is text.
Received = NamedTuple(  # noqa: UP014
    "Received",
    [
        ("lengths", Tensor),
        ("ids", Tensor),
        ("weights", Tensor | None),
        ("sizes", list[int]),
        ("came", list[list[int]]),
        ("went", list[list[int]]),
        ("positions", Tensor | None),
        ("slot_ids", Tensor),
    ],
)
"""The ids for this rank's shards, and of those that this rank sent, where they were in the batch.

``lengths``: (S_mine, B_all); ``ids``: (n,); ``weights``: (n,) or None; ``sizes``: batch size of each rank; ``came``,
``went``: ids from and to each rank, per group; ``positions``: (N_sent,) int64 where each id gets a row, else None;
``slot_ids``: (S,) number of ids of each slot of all ranks.
"""


class PortableInput(PortableBatch):
    """Checks a batch, cuts it by rank, and exchanges header and payload.

    Args:
        exchange: the eager module's.
        collectives: of the group that the embeddings are sharded over.

    Attributes:
        process_group: its name; a program that loads the saved model may set another.
    """

    def __init__(self, exchange: InputExchange, collectives: Collectives) -> None:
        route, cutter = exchange.route, exchange.cutter
        super().__init__(exchange.expect, wide_ids=cutter.id_dtype is torch.int64, bad_ids=exchange.bad_ids)
        self.process_group = GroupName(collectives)
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.groups = route.groups
        self.per_id = exchange.per_id
        self.unit_keys = list_of(str, list(route.unit_keys))
        self.blocks = route.blocks
        self.wide_payload = route.wide_ids
        self.slot_rows = cutter.slot_rows
        self.block_sizes = cutter.block_sizes
        self.any_dynamic = cutter.dynamic is not None
        self.dynamic = cutter.slot_rows[:0].to(torch.bool) if cutter.dynamic is None else cutter.dynamic
        self.boundaries = list_of(Tensor, cutter.boundaries)
        self.slot_units = list_of(int, [slot.unit for slots in route.slots for slot in slots])
        self.in_order = list_of(int, range(len(self.slot_units.value)))
        self.slot_counts = list_of(int, list(route.slot_counts()))
        self.mine = route.slot_counts()[self.rank]
        self.group_edges = exchange.group_edges
        self.slot_major = exchange.payload.slot_major(self.world_size)

    def exchange(self, checked: Checked, keys: list[str], lengths: Tensor, values: Tensor) -> Received:
        """Cut the batch, tell the sizes, and send the ids.

        Args:
            checked: the batch.
            keys: F features, of what is sent of it.
            lengths: (F, B) int32.
            values: (N,), in the dtype that :meth:`checked` gives them.
        """
        weights = checked.weights
        units = [keys.index(unit) for unit in self.unit_keys]
        device = values.device
        cut_ids: int | None = None
        if not torch.jit.is_scripting() and sorted(units) == list(range(len(keys))):
            cut_ids = values.size(0)
        positions: Tensor | None = None
        if self.per_id:
            positions = torch.arange(values.numel(), dtype=torch.int32, device=device)
        rows = self.slot_rows
        in_place = False
        if self.blocks > 1:
            order = torch.tensor(units, dtype=torch.int32, device=device)
            lengths, values, weights, positions = permuted(order, lengths, values, weights, positions, cut_ids)
            dynamic: Tensor | None = None
            if self.any_dynamic:
                dynamic = self.dynamic
            lengths, values, weights, positions = in_blocks(
                lengths, values, weights, positions, dynamic, self.block_sizes, self.blocks, self.boundaries
            )
        else:
            of_slots = [units[unit] for unit in self.slot_units]
            rows = torch.tensor(of_slots, dtype=torch.int64, device=device)
            # What a backward reads must not be the caller's own memory, which may change before.
            if torch.jit.is_scripting() and not torch.is_grad_enabled():
                in_place = len(keys) == len(of_slots) and of_slots == self.in_order
        lengths_SB = lengths if in_place else lengths.index_select(0, rows)
        slot_ids = lengths_SB.sum(dim=1, dtype=torch.int64)
        if self.per_id:
            lengths_SB = slot_ids.to(torch.int32).unsqueeze(1)
        ends = torch.ops.fbgemm.asynchronous_complete_cumsum(slot_ids)
        counts = ends.index_select(0, self.group_edges).diff().view(self.world_size, self.groups)
        numbers = self.exchange_header(counts, checked.fault, lengths_SB.size(1))
        self.count_bad_ids(checked.bad_ids)
        went, sizes, came = self.sizes(numbers, lengths_SB.size(1))
        total = sum([sum(per_group) for per_group in went])
        ids, sent_weights = values, weights
        if not in_place:
            _, ids, sent_weights, positions = permuted(rows.to(torch.int32), lengths, values, weights, positions, total)
        if positions is not None:
            positions = positions.to(torch.int64)
        if self.world_size == 1:
            return Received(lengths_SB, ids, sent_weights, sizes, came, went, positions, slot_ids)
        all_lengths, all_ids, all_weights = self.exchange_payload(lengths_SB, ids, sent_weights, sizes, came, went)
        return Received(all_lengths, all_ids, all_weights, sizes, came, went, positions, slot_ids)

    def sizes(self, numbers: list[int], batch: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Ids sent per rank and group, batch sizes, and ids received, from what :meth:`exchange_header` gives."""
        went: list[list[int]] = []
        came: list[list[int]] = []
        sizes: list[int] = []
        first = self.world_size * self.groups
        for rank in range(self.world_size):
            went.append(numbers[rank * self.groups : (rank + 1) * self.groups])
            start = first + rank * (1 + self.groups)
            # A tracer has another symbol for each number that it reads: what this rank told itself is known already.
            sizes.append(batch if rank == self.rank else numbers[start])
            came.append(went[rank] if rank == self.rank else numbers[start + 1 : start + 1 + self.groups])
        return went, sizes, came

    def exchange_header(self, counts: Tensor, fault: Tensor, batch: int) -> list[int]:
        """Ids sent (W·G), then per rank what its header says: batch size, ids per group (W, 1 + G).

        Args:
            counts: (W, G) ids for each rank and group.
            fault: 0-d int64.
            batch: size to tell.

        Raises:
            InputError: on every rank, for a fault of any; TorchScript and exported programs raise a RuntimeError.
        """
        if self.world_size == 1 and torch.jit.is_scripting():
            known: list[int] = torch.cat([counts.flatten(), fault.reshape(1)]).tolist()
            if known[-1] != 0:
                raise RuntimeError("bad input: rank 0: " + self.faults[known[-1]])
            both = known[:-1]
            both.append(batch)
            both.extend(known[:-1])
            return both
        mode = 1 if torch.is_grad_enabled() else 0
        header = counts.new_zeros([self.world_size, 3 + self.groups])
        header[:, 0] = fault
        header[:, 1] = mode
        header[:, 2] = batch
        header[:, 3:] = counts
        received = header
        if self.world_size > 1:
            ones = [1] * self.world_size
            pending = torch.ops._c10d_functional.all_to_all_single(header, ones, ones, self.process_group.group_name)
            received = torch.ops._c10d_functional.wait_tensor(pending)
        if not torch.jit.is_scripting():
            return self.asserted(counts, received)
        numbers: list[int] = torch.cat([counts.flatten(), received.flatten()]).tolist()
        first = self.world_size * self.groups
        wrong = ""
        modes = 0
        found = numbers[:first]
        for rank in range(self.world_size):
            start = first + rank * (3 + self.groups)
            number = numbers[start]
            modes += numbers[start + 1]
            found.extend(numbers[start + 2 : start + 3 + self.groups])
            if number != 0:
                wrong += f"rank {rank}: {self.faults[number]}; "
        if wrong != "":
            raise RuntimeError("bad input: " + wrong)
        if modes != 0 and modes != self.world_size:
            raise RuntimeError("bad input: gradients are on for some ranks and off for others")
        return found

    def asserted(self, counts: Tensor, received: Tensor) -> list[int]:
        """:meth:`exchange_header` of an exported program, whose faults are assertions in its graph."""
        # On the CPU, where an assertion that fails is an error; on a GPU it is the end of the process.
        headers = received.cpu()
        # Faults of structure show while tracing; what a program can meet is the one of values.
        for rank in range(self.world_size):
            torch.ops.aten._assert_async.msg(headers[rank, 0] == 0, f"bad input: rank {rank}: {self.faults[1]}")
        return counts_of(torch.cat([counts.flatten().cpu(), headers[:, 2:].flatten()]))

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
        words_out: list[int] = []
        words_in: list[int] = []
        departed = [sum(per_group) for per_group in went]
        arrived = [sum(per_group) for per_group in came]
        pieces: list[int] = []
        for rank in range(self.world_size):
            words_out.append(self.slot_counts[rank] * lengths.size(1) + departed[rank])
            words_in.append(self.mine * sizes[rank] + arrived[rank])
            pieces.extend([self.mine * sizes[rank], arrived[rank]])
        lengths_of = lengths.to(dtype).split(self.slot_counts)
        ids_of = ids.to(dtype).split(departed)
        parts: list[Tensor] = []
        for rank in range(self.world_size):
            parts.append(lengths_of[rank].reshape(-1))
            parts.append(ids_of[rank])
        pending = torch.ops._c10d_functional.all_to_all_single(
            torch.cat(parts), words_in, words_out, self.process_group.group_name
        )
        found_weights: Tensor | None = None
        if weights is not None:
            pending_weights = torch.ops._c10d_functional.all_to_all_single(
                weights, arrived, departed, self.process_group.group_name
            )
            found_weights = torch.ops._c10d_functional.wait_tensor(pending_weights)
        received = torch.ops._c10d_functional.wait_tensor(pending).split(pieces)
        all_lengths: list[Tensor] = []
        all_ids: list[Tensor] = []
        block_lengths: list[Tensor] = []
        for rank in range(self.world_size):
            part = received[2 * rank].view(self.mine, sizes[rank]).to(torch.int32)
            all_lengths.append(part)
            block_lengths.append(part.sum(dim=1, dtype=torch.int32))
            all_ids.append(received[2 * rank + 1])
        found = torch.cat(all_ids)
        if self.mine > 1:
            _, found, found_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self.slot_major, torch.cat(block_lengths), found, found_weights, sum(arrived)
            )
        return torch.cat(all_lengths, dim=1), found, found_weights
