"""A batch checked, cut and exchanged by operators and plain data, as TorchScript and torch.export take them.

What :mod:`shardrec.step.begin` and :mod:`shardrec.step.id_exchange` do for one module, by the same routes and in the
same order of slots. Header and payload differ from the live driver's: a row of the header is fault | batch size |
counts, without a checksum. Weights have a separate all-to-all. Wide ids widen the lengths. A batch size per feature is
not supported and raises a fault. Sums inside hosts are not needed (the output is the same without them).

Shapes as in those modules: F features of the input, S slots of all ranks, W ranks, G lookup groups, B local batch size.

[Note: faults without Python]
The header carries a number for the fault, so that every rank raises at the same step and names the ranks at fault and
the reason, but not the id, which the eager model names.

[Note: sizes that tracers do not know]
The numbers of ids come from a header, so a tracer has a symbol for each, and cannot answer a question about one. Hence
tensors are split by lists of sizes, whose sums it can prove, and not cut by bounds. What this rank has told itself is
not read back; and nothing is asked of a count except under TorchScript, which has the number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import counts_of, dict_of, list_of
from shardrec.exchange.bad_ids import DROPPED, POLICIES, mend
from shardrec.exchange.batch import NO_LIMIT, fit
from shardrec.exchange.check import add_up, are_sound
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.cut import in_blocks, permuted
from shardrec.exchange.to_device import staged
from shardrec.step.input_plan import InputPlan

FAULTS = [
    "",
    "an id is outside its table, or lengths and ids do not fit (call the eager model with this batch: it says which)",
    "the input lacks a feature that a table looks up",
    "the ids are not int32 or int64, or not one-dimensional",
    "the collection is weighted and the input lacks a floating-point weight for each id, or the other way around",
    "the features have a batch size each, which portable programs do not take",
    "there is not exactly one length for each feature and sample",
    "there are ids and no samples",
    "the lengths (or offsets) are not int32 or int64",
    "the offsets do not begin at 0, or do not match the lengths that the input also has",
    "a feature that a table looks up comes more than once among the keys",
]
"""What a header's number says is wrong."""


# Spelled as a call, for TorchScript wants types where an annotation is text.
Checked = NamedTuple(  # noqa: UP014
    "Checked",
    [
        ("keys", list[str]),
        ("lengths", Tensor),
        ("values", Tensor),
        ("weights", Tensor | None),
        ("fault", Tensor),
        ("bad_ids", Tensor),
        ("dropped", bool),
        ("given", Tensor),
        ("looked_up", Tensor),
        ("kept", Tensor),
    ],
)
"""A batch as the lookups take it: checked, without its bad ids, and of empty bags if it is faulty.

``keys``: F of the input, and ``DROPPED`` where ids may have been taken out. ``lengths``: (F, B) or (F + 1, B) int32.
``values``: (N,) ids. ``weights``: (N,) float32 or None. ``fault``: 0-d int64, a number of :data:`FAULTS`. ``bad_ids``:
(U,) int64, bad ids per feature that were not an error. Empty if there can be none. ``dropped``: ids may have been taken
out; of the batch as it was given then ``given``: (F, B) int32 lengths, ``looked_up``: (N,) ids, 0 where they were taken
out, and ``kept``: (N,) bool, whether they were not.
"""

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

``lengths``: (S_mine, B_all). ``ids``: (n,). ``weights``: (n,) or None. ``sizes``: batch size per rank. ``came``,
``went``: ids from and to each rank, per group. ``positions``: (N_sent,) int64 where each id gets a row, else None.
``slot_ids``: (S,) number of ids per slot of all ranks.
"""


class PortableInput(nn.Module):
    """Checks a batch, cuts it by rank, and exchanges header and payload.

    Attributes:
        group_name: of the process group. A process that loads the saved program may set another.
    """

    def __init__(self, exchange: InputPlan, collectives: Collectives) -> None:
        super().__init__()
        route, cutter, expect = exchange.route, exchange.cutter, exchange.expect
        self.policies = dict_of(int, {feature: POLICIES.index(policy) for feature, policy in expect.on_bad_id.items()})
        self.mends = len(expect.on_bad_id) > 0
        self.drops = "zero" in expect.on_bad_id.values()
        self.dropped_key = DROPPED
        self.bad_ids = exchange.bad_ids
        self.weighted = expect.weighted
        self.features = list_of(str, list(expect.features))
        self.limits = dict_of(int, {feature: expect.rows(feature) for feature in expect.features})
        self.no_limit = NO_LIMIT
        self.wide_ids = cutter.id_dtype is torch.int64
        self.faults = list_of(str, FAULTS)
        self.nothing = torch.zeros(0, dtype=torch.int64, device=expect.device)
        self.group_name = collectives.group_name
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.groups = route.groups
        self.per_id = exchange.per_id
        self.unit_keys = list_of(str, list(route.unit_keys))
        self.blocks = route.blocks
        self.wide_payload = route.wide_ids
        self.slot_rows = cutter.slot_rows
        self.block_sizes = cutter.block_sizes
        self.dynamic: Any = torch.jit.Attribute(cutter.dynamic, Tensor | None)
        self.boundaries = list_of(Tensor, cutter.boundaries)
        self.slot_units = list_of(int, [slot.unit for slots in route.slots for slot in slots])
        self.slot_counts = list_of(int, list(route.slot_counts()))
        self.mine = route.slot_counts()[self.rank]
        self.group_edges = exchange.group_edges
        self.slot_major = exchange.payload.slot_major(self.world_size)

    def structural_fault(self, features: KeyedJaggedTensor) -> int:
        """A number of :data:`FAULTS` that shows without reading a tensor. 0 for none."""
        keys = features.keys()
        values, weights = features.values(), self.weights_of(features)
        for feature in self.features:
            times = keys.count(feature)
            if times != 1:
                return 2 if times == 0 else 10
        if values.dim() != 1 or (values.dtype != torch.int64 and values.dtype != torch.int32):
            return 3
        if self.weighted != (weights is not None):
            return 4
        if weights is not None:  # noqa: SIM102  # TorchScript refines the Optional so
            if not weights.is_floating_point() or weights.dim() != 1 or weights.numel() != values.numel():
                return 4
        if features.variable_stride_per_key():
            return 5
        if features.lengths().dtype != torch.int64 and features.lengths().dtype != torch.int32:
            return 8
        if features.lengths().numel() != len(keys) * features.stride():
            return 6
        # Of an exported program no size is asked (the answer would hold for all): its check of the sums tells.
        if not is_exported() and features.lengths().numel() == 0 and values.numel() > 0:
            return 7
        return 0

    def weights_of(self, features: KeyedJaggedTensor) -> Tensor | None:
        """The weights of the ids. Those given to a collection that is not weighted are ignored."""
        return features.weights_or_none() if self.weighted else None

    def checked(self, features: KeyedJaggedTensor) -> Checked:
        """The batch as the lookups take it.

        Raises:
            RuntimeError: in training mode.
        """
        if self.training:
            raise RuntimeError(
                "this program is in training mode, and portable programs only infer: call eval() on it; to train, call "
                "shardrec.script(model) in the process of the sharded model, in training mode"
            )
        fault = self.structural_fault(features)
        if fault != 0:
            none = self.nothing.to(torch.float32) if self.weighted else None
            # Of as many samples: a tracer continues with the model's other layers before the fault is raised.
            lengths = self.nothing.new_zeros([len(self.features), features.stride()], dtype=torch.int32)
            ids = self.nothing.to(torch.int64 if self.wide_ids else torch.int32)
            told = torch.full_like(self.nothing.sum(), fault)
            return Checked(
                self.features, lengths, ids, none, told, self.nothing, False, lengths, ids, ids.to(torch.bool)
            )
        keys = features.keys()
        limits = [self.limits.get(key, self.no_limit) for key in keys]
        unused = self.no_limit in limits
        given_lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
        lengths = features.lengths().view(len(keys), -1 if len(keys) > 0 else 0)
        values = features.values()
        weights = self.weights_of(features)
        limits_F = constant(limits, torch.int64, values.device)
        looked_up, whole, kept, bad_ids, dropped = values, lengths, self.nothing.to(torch.bool), self.nothing, False
        valid = are_sound(lengths, values, limits_F, unused, torch.jit.is_scripting())
        # If all ids are good, the lookups can be told immediately, where the host may ask.
        good = False
        if torch.jit.is_scripting() and self.mends and not values.is_cuda:
            good = values.numel() == 0 or bool(valid)
        if self.mends and not good:
            policies = [self.policies.get(key, 0) for key in keys]
            policies_F = constant(policies, torch.int64, values.device)
            sums_F = lengths.sum(dim=1, dtype=torch.int64)
            whole, looked_up, order, kept, bad_F = mend(lengths, values, limits_F, policies_F, self.drops)
            values = looked_up
            keys, dropped, limits_W = list(keys), self.drops, limits_F
            if self.drops:
                values = looked_up.index_select(0, order)
                keys.append(self.dropped_key)
                limits_W = torch.cat([limits_F, torch.full_like(limits_F[:1], self.no_limit)])
                if weights is not None:
                    weights = weights.index_select(0, order)
            valid = add_up(lengths, sums_F, values.size(0))
            valid = valid & are_sound(whole, values, limits_W, unused or self.drops, torch.jit.is_scripting())
            places = [keys.index(feature) for feature in self.features]
            bad_ids = bad_F.index_select(0, constant(places, torch.int64, values.device))
        told = valid.logical_not().to(torch.int64)
        if offsets is not None:
            fits = fit(offsets, given_lengths)
            told = torch.where(fits, told, 9)
            valid = valid & fits
        dtype = torch.int64 if self.wide_ids else torch.int32
        values, looked_up = values.to(dtype), looked_up.to(dtype)
        if not torch.jit.is_scripting():
            # A batch of as many ids, all in its first bag: a tracer cannot have it become a shorter one.
            values, looked_up = values * valid, looked_up * valid
            lengths, whole = in_first_bag(lengths, values, valid), in_first_bag(whole, values, valid)
        else:
            lengths, whole = lengths.to(torch.int32) * valid, whole.to(torch.int32) * valid
        if torch.jit.is_scripting() and not values.is_cuda and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths. Those of CUDA read by the lengths alone.
            values = values[:0]
            if weights is not None:
                weights = weights[:0]
        if weights is not None:
            weights = weights.detach().to(torch.float32).contiguous()
        return Checked(
            keys, whole.contiguous(), values.contiguous(), weights, told, bad_ids, dropped, lengths, looked_up, kept
        )

    def exchange(self, checked: Checked, keys: list[str], lengths: Tensor, values: Tensor) -> Received:
        """Cut the batch, tell the sizes, and send the ids.

        Args:
            checked: the batch.
            keys: F features of the part that is sent.
            lengths: (F, B) int32.
            values: (N,), in the dtype that :meth:`checked` gives them.
        """
        weights = checked.weights
        units = [keys.index(unit) for unit in self.unit_keys]
        device = values.device
        cut_ids: int | None = None
        if values.is_cuda:
            # An upper bound, for which the host does not wait.
            cut_ids = values.size(0) * max([units.count(unit) for unit in units] + [0])
        elif not torch.jit.is_scripting() and sorted(units) == list(range(len(keys))):
            cut_ids = values.size(0)
        positions: Tensor | None = None
        if self.per_id:
            positions = torch.arange(values.numel(), dtype=torch.int32, device=device)
        rows = self.slot_rows
        in_place = False
        if self.blocks > 1:
            order = constant(units, torch.int32, device)
            lengths, values, weights, positions = permuted(order, lengths, values, weights, positions, cut_ids)
            lengths, values, weights, positions = in_blocks(
                lengths, values, weights, positions, self.dynamic, self.block_sizes, self.blocks, self.boundaries
            )
        else:
            of_slots = [units[unit] for unit in self.slot_units]
            rows = constant(of_slots, torch.int64, device)
            if torch.jit.is_scripting():
                in_place = of_slots == list(range(len(keys)))
        lengths_SB = lengths if in_place else lengths.index_select(0, rows)
        slot_ids = lengths_SB.sum(dim=1, dtype=torch.int64)
        if self.per_id:
            lengths_SB = slot_ids.to(torch.int32).unsqueeze(1)
        ends = torch.ops.fbgemm.asynchronous_complete_cumsum(slot_ids)
        counts = ends.index_select(0, self.group_edges).diff().view(self.world_size, self.groups)
        numbers = self.exchange_header(counts, checked.fault, lengths_SB.size(1))
        # An exported program lacks state to count them in.
        if not is_exported() and checked.bad_ids.numel() > 0:
            self.bad_ids.add_(checked.bad_ids)
        went, sizes, came = self.sizes(numbers, lengths_SB.size(1))
        total = sum([sum(per_group) for per_group in went])
        if not in_place:
            _, values, weights, positions = permuted(rows.to(torch.int32), lengths, values, weights, positions, total)
        if positions is not None:
            positions = positions.to(torch.int64)
        if self.world_size > 1:
            lengths_SB, values, weights = self.exchange_payload(lengths_SB, values, weights, sizes, came, went)
        return Received(lengths_SB, values, weights, sizes, came, went, positions, slot_ids)

    def sizes(self, numbers: list[int], batch: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Ids sent per rank and group, batch sizes, and ids received, from the result of :meth:`exchange_header`."""
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
            InputError: on every rank, for a fault of any. TorchScript and exported programs raise a RuntimeError.
        """
        if self.world_size == 1 and torch.jit.is_scripting():
            known: list[int] = torch.cat([counts.flatten(), fault.reshape(1)]).tolist()
            number = known.pop()
            if number != 0:
                raise RuntimeError("bad input: rank 0: " + self.faults[number])
            return known + [batch] + known  # noqa: RUF005 - TorchScript has no *
        header = counts.new_zeros([self.world_size, 2 + self.groups])
        header[:, 0] = fault
        header[:, 1] = batch
        header[:, 2:] = counts
        received = header
        if self.world_size > 1:
            ones = [1] * self.world_size
            pending = torch.ops._c10d_functional.all_to_all_single(header, ones, ones, self.group_name)
            received = torch.ops._c10d_functional.wait_tensor(pending)
        if not torch.jit.is_scripting():
            return self.asserted(counts, received)
        numbers: list[int] = torch.cat([counts.flatten(), received.flatten()]).tolist()
        first = self.world_size * self.groups
        wrong = ""
        all_counts = numbers[:first]
        for rank in range(self.world_size):
            start = first + rank * (2 + self.groups)
            number = numbers[start]
            all_counts.extend(numbers[start + 1 : start + 2 + self.groups])
            if number != 0:
                wrong += f"rank {rank}: {self.faults[number]}; "
        if wrong != "":
            raise RuntimeError("bad input: " + wrong)
        return all_counts

    def asserted(self, counts: Tensor, received: Tensor) -> list[int]:
        """:meth:`exchange_header` of an exported program. Its faults are assertions in its graph."""
        # On the CPU, where an assertion that fails is an error; on a GPU it is the end of the process.
        headers = received.cpu()
        # Faults of structure show while tracing. A program can meet only faults of values.
        for rank in range(self.world_size):
            torch.ops.aten._assert_async.msg(headers[rank, 0] == 0, f"bad input: rank {rank}: {self.faults[1]}")
        return counts_of(torch.cat([counts.flatten().cpu(), headers[:, 1:].flatten()]))

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
        departed = [sum(per_group) for per_group in went]
        arrived = [sum(per_group) for per_group in came]
        words_out = [self.slot_counts[rank] * lengths.size(1) + count for rank, count in enumerate(departed)]
        words_in = [self.mine * sizes[rank] + count for rank, count in enumerate(arrived)]
        lengths_of = lengths.to(dtype).split(self.slot_counts)
        ids_of = ids.to(dtype).split(departed)
        parts: list[Tensor] = []
        for rank in range(self.world_size):
            parts.append(lengths_of[rank].reshape(-1))
            parts.append(ids_of[rank])
        pending = torch.ops._c10d_functional.all_to_all_single(torch.cat(parts), words_in, words_out, self.group_name)
        arrived_weights: Tensor | None = None
        if weights is not None:
            pending_weights = torch.ops._c10d_functional.all_to_all_single(weights, arrived, departed, self.group_name)
            arrived_weights = counted(torch.ops._c10d_functional.wait_tensor(pending_weights), sum(arrived))
        pieces: list[int] = []
        for rank in range(self.world_size):
            pieces.extend([self.mine * sizes[rank], arrived[rank]])
        received = counted(torch.ops._c10d_functional.wait_tensor(pending), sum(words_in)).split(pieces)
        all_lengths: list[Tensor] = []
        all_ids: list[Tensor] = []
        block_lengths: list[Tensor] = []
        for rank in range(self.world_size):
            part = received[2 * rank].view(self.mine, sizes[rank]).to(torch.int32)
            all_lengths.append(part)
            block_lengths.append(part.sum(dim=1, dtype=torch.int32))
            all_ids.append(received[2 * rank + 1])
        arrived_ids = torch.cat(all_ids)
        if self.mine > 1:
            _, arrived_ids, arrived_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self.slot_major, torch.cat(block_lengths), arrived_ids, arrived_weights, sum(arrived)
            )
        return torch.cat(all_lengths, dim=1), arrived_ids, arrived_weights


def counted(received: Tensor, count: int) -> Tensor:
    """What an exchange brought, if it has ``count`` elements.

    TorchScript leaves out what is not used: on a rank without tables, an exchange that the others make. What is checked
    is used.
    """
    if torch.jit.is_scripting():  # noqa: SIM102 - TorchScript takes it for known
        if received.numel() != count:
            raise RuntimeError(
                f"{received.numel()} elements came in an exchange and {count} were expected. The ranks have come "
                "apart: every rank must call the same modules in the same order"
            )
    return received


def in_first_bag(lengths: Tensor, values: Tensor, valid: Tensor) -> Tensor:
    """Lengths as int32. If the batch is not valid, lengths with all ids in the first bag."""
    ids = values.size(0) * valid.logical_not().to(torch.int32)
    first = torch.arange(lengths.numel(), device=lengths.device).view(lengths.size()) == 0
    return lengths.to(torch.int32) * valid + ids * first


def constant(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,) numbers that depend on the input's keys alone, on ``device``. A tracer keeps them in its graph."""
    if is_exported():
        return torch.tensor(values, dtype=dtype, device=device)
    return staged(values, dtype, device)


def is_exported() -> bool:
    """Whether torch.export makes a program of this call."""
    exported = False
    if not torch.jit.is_scripting():
        exported = torch.compiler.is_exporting()
    return exported
