"""The exchanges as modules of operators and plain data, which TorchScript, torch.compile and torch.export take alike.

What :mod:`shardrec.exchange.input`, :mod:`payload` and :mod:`output` do for one module, in the same order and layouts,
with collectives that carry gradients by themselves. Left out, and refused with a fault: a batch size per feature and
weights that take a gradient. Not needed: sums inside hosts (the output is the same without).

Shapes as in those modules: F features of the input, S slots of all ranks, W ranks, G lookup groups, B local batch size.

[Note: faults without Python]
The header carries a number for the fault, so that every rank raises at the same step and says which ranks are at fault
and why, but not which id: the eager model tells that, and a compiled one, which has Python at hand (``self.agree``).

[Note: sizes that tracers do not know]
The numbers of ids come from a header, so a tracer has a symbol for each, and cannot answer a question about one. Hence
tensors are split by lists of sizes, whose sums it can prove, and not cut by bounds; what this rank has told itself is
not read back; and nothing is asked of a count except under TorchScript, which has the number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import list_of
from shardrec.exchange.batch import Expectation
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.input import group_edges
from shardrec.exchange.route import Route
from shardrec.portable.batch import Checked, ScriptedBatch
from shardrec.portable.group import GroupName

__all__ = ["Received", "ScriptedInput"]

Received = tuple[Tensor, Tensor, Tensor | None, list[int], list[list[int]], list[list[int]], Tensor | None, Tensor]
"""Lengths (S_mine, B_all), ids (n,), weights (n,), batch sizes, ids per rank and group that came and that went, and,
where each id gets a row, positions (N_sent,) and number of ids per slot (S,)."""


class ScriptedInput(ScriptedBatch):
    """Checks a batch, cuts it by rank, and exchanges header and payload.

    Args:
        route: where the ids of each lookup go.
        expect: what the input must look like.
        collectives: of the group that the embeddings are sharded over.
        bad_ids: where the eager module counts bad ids that are no error.
        per_id: all of a rank's samples go as one, and the positions of the ids are kept.

    Attributes:
        process_group: its name; a program that loads the saved model may set another.
    """

    def __init__(
        self,
        route: Route,
        expect: Expectation,
        collectives: Collectives,
        bad_ids: Tensor,
        *,
        per_id: bool = False,
    ) -> None:
        rows = max((edges[-1] for edges in route.unit_boundaries), default=0)
        super().__init__(expect, wide_ids=rows > 2**31 - 1, bad_ids=bad_ids)
        self.process_group = GroupName(collectives)
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.groups = route.groups
        self.per_id = per_id
        self.unit_keys = list_of(str, list(route.unit_keys))
        self.blocks = route.blocks
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
        self.mine = route.slot_counts()[self.rank]
        self.group_edges = torch.tensor(group_edges(route), dtype=torch.int64, device=device)
        order = [source * self.mine + slot for slot in range(self.mine) for source in range(self.world_size)]
        self.slot_major = torch.tensor(order, dtype=torch.int32, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Received:
        """Check, cut and exchange a batch."""
        checked = self.checked(features)
        return self.exchange(features, checked, checked.keys, checked.lengths, checked.values)

    def exchange(
        self,
        features: KeyedJaggedTensor,
        checked: Checked,
        keys: list[str],
        lengths: Tensor,
        values: Tensor,
    ) -> Received:
        """Cut the batch, tell the sizes, and send the ids.

        Args:
            features: as they came, for words about a fault.
            checked: the same, checked.
            keys: F features, of what is sent of it.
            lengths: (F, B) int32.
            values: (N,), in the dtype that :meth:`checked` gives them.
        """
        weights = checked.weights
        batch = lengths.size(1)
        units: list[int] = []
        for unit in self.unit_keys:
            units.append(keys.index(unit))
        device = values.device
        cut_ids: int | None = None
        if not torch.jit.is_scripting() and sorted(units) == list(range(len(keys))):
            cut_ids = values.size(0)
        positions: Tensor | None = None
        if self.per_id:
            positions = torch.arange(values.numel(), dtype=torch.int32, device=device)
        rows = self.slot_rows
        if self.blocks > 1:
            order = torch.tensor(units, dtype=torch.int32, device=device)
            if positions is not None:
                positions = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, positions, None, cut_ids)[1]
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights, cut_ids)
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
                places = place.to(torch.int64)
                if values.is_cuda:
                    # Of a batch that is refused there are no places, and its lengths are 0.
                    same = torch.arange(places.size(0), device=device)
                    places = torch.where(same < lengths.sum(), places, same)
                positions = torch.empty_like(positions).index_copy_(0, places, positions)
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
        numbers = self.exchange_header(counts, checked.fault, features, lengths_SB.size(1))
        self.count_bad_ids(checked.bad_ids)
        went, sizes, came = self.sizes(numbers, lengths_SB.size(1))
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

    def sizes(self, numbers: list[int], batch: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Ids sent per rank and group, batch sizes, and ids received, from what :meth:`exchange_header` gives."""
        if not torch.jit.is_scripting():
            for number in numbers:
                torch._check(number >= 0)
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

    def exchange_header(self, counts: Tensor, fault: Tensor, features: KeyedJaggedTensor, batch: int) -> list[int]:
        """Ids sent (W·G), then per rank what its header says: batch size, ids per group (W, 1 + G).

        Args:
            counts: (W, G) ids for each rank and group.
            fault: 0-d int64.
            features: as they came.
            batch: size to tell.

        Raises:
            InputError: on every rank, for a fault of any; TorchScript and exported programs raise a RuntimeError.
        """
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
        found: list[int] = torch.cat([counts.flatten().cpu(), headers[:, 2:].flatten()]).tolist()
        return found

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
        departed: list[int] = []
        arrived: list[int] = []
        pieces: list[int] = []
        for rank in range(self.world_size):
            count, other = 0, 0
            for group in range(self.groups):
                count += went[rank][group]
                other += came[rank][group]
            departed.append(count)
            arrived.append(other)
            words_out.append(self.slot_counts[rank] * lengths.size(1) + count)
            words_in.append(self.mine * sizes[rank] + other)
            pieces.append(self.mine * sizes[rank])
            pieces.append(other)
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
        total = 0
        for rank in range(self.world_size):
            part = received[2 * rank].view(self.mine, sizes[rank]).to(torch.int32)
            all_lengths.append(part)
            block_lengths.append(part.sum(dim=1, dtype=torch.int32))
            all_ids.append(received[2 * rank + 1])
            total += arrived[rank]
        found = torch.cat(all_ids)
        if self.mine > 1:
            _, found, found_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self.slot_major, torch.cat(block_lengths), found, found_weights, total
            )
        return torch.cat(all_lengths, dim=1), found, found_weights
