"""One table of a sharded collection: the parameters this rank holds of it, and their place in a state_dict.

The state_dict of a sharded model has the unsharded model's keys. On several ranks a cut table's value is a
:class:`~torch.distributed._shard.sharded_tensor.ShardedTensor`, which ``torch.distributed.checkpoint`` saves and loads
at any world size; on one rank, and for a replicated table, it is the (rows, dim) tensor itself. Loading accepts both,
and an unsharded model's (rows, dim) tensor.

[Note: DistributedDataParallel]
It sends rank 0's parameters to all ranks when it is made. Trainers put it around whatever module they are given, and it
reads what to leave alone from the outermost module only: so it is noticed where it registers its module, before that.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import add, is_, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _state_dict_utils
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardrec.errors import ConfigError
from shardrec.exchange.fault_flags import FaultFlags
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.full_tables import gathered


class StateDictError(ConfigError, RuntimeError):
    """A state_dict has values that tables cannot take; also a RuntimeError, as torch's."""


class ShardedTable(nn.Module):
    """Holds the local parameters of one table under the unsharded names.

    Args:
        layout: of the table.
        parameters: this rank's parameters: one per local shard, or the replica.
        group: the process group that the table is sharded over. None on one rank.
        dtype: of the weights, for ranks without a shard.
        has_optimizer: whether shardrec updates the table, in backward or at the step, unless it is frozen.
    """

    def __init__(
        self,
        layout: TableLayout,
        parameters: Mapping[Shard | None, nn.Parameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype = torch.float32,
        *,
        has_optimizer: bool = False,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.dtype = dtype
        self.group = group
        self.locals = dict(parameters)
        self.settle: Callable[..., None] | None = None  # of rows that may be in a cache
        self._has_optimizer = has_optimizer
        self.kept: list[tuple[str, nn.Parameter, int, bool]] = []  # name, parameter, memory, requires_grad
        for shard, parameter in self.locals.items():
            alone = shard is None or len(self.locals) == 1
            name = "weight" if alone else f"weight_r{shard.row_start}_c{shard.col_start}"  # type: ignore[union-attr]
            self.register_parameter(name, parameter)
            self.kept.append((name, parameter, parameter.data_ptr(), parameter.requires_grad))
        if "weight" not in self._parameters:
            self.weight = None  # torch.distributed.checkpoint.state_dict looks up each key on each rank

    def fault(self) -> str:
        """What was done to a parameter that the kernels, which read its memory, do not see; "" for nothing."""
        now = self._parameters
        for name, parameter, memory, requires_grad in self.kept:
            is_kept = now.get(name) is parameter and parameter.data_ptr() == memory
            if is_kept and parameter.requires_grad is requires_grad:
                continue
            if not is_kept:
                return (
                    f"{name} of table {self.layout.name!r} is another tensor than shardrec.shard gave it (of "
                    "torch.func.functional_call, of an assignment, or of .data =), which its lookups do not read: copy "
                    "values into the parameter, with torch.no_grad(): parameter.copy_(values)"
                )
            # A table without an optimizer may be frozen later. One that was frozen before is sent no gradients.
            if torch.is_grad_enabled() and (self._has_optimizer or not requires_grad):
                was, remedy = ("frozen", ", or call it in torch.no_grad()") if requires_grad else ("unfrozen", "")
                return (
                    f"{name} of table {self.layout.name!r} was {was} (requires_grad) after shardrec.shard, and "
                    "backward continues as before: save a checkpoint, and give it to shardrec.warm_start with a model "
                    f"whose table is {was} before it is sharded{remedy}"
                )
        return ""

    def tensors(self, *, to_write: bool = False) -> dict[Shard | None, Tensor]:
        """This rank's weights as views, to read them or ``to_write`` them before the next forward."""
        if self.settle is not None:
            self.settle(self.locals, to_write=to_write)
        return {shard: parameter.detach() for shard, parameter in self.locals.items()}

    def extra_repr(self) -> str:
        return f"{self.layout.num_embeddings}, {self.layout.embedding_dim}, cut={self.layout.cut}, dtype={self.dtype}"

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        tensors = self.tensors(to_write=True)  # which the caller may do
        destination[prefix + "weight"] = as_one_tensor(self.layout, tensors, self.group, dtype=self.dtype)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if strict:
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name != key]
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        if fault := self.value_fault(state_dict[key]):
            error_msgs.append(f"{key}: {fault}")
        else:
            self.write(state_dict[key])

    def value_fault(self, value: Any) -> str:
        """Why :meth:`write` does not take a value; "" if it does. Of a ShardedTensor all ranks say the same."""
        layout = self.layout
        shape = (layout.num_embeddings, layout.embedding_dim)
        if tuple(value.shape) != shape:
            return f"the value has shape {tuple(value.shape)} and the table {shape}. Load a table of that shape"
        if not value.dtype.is_floating_point:
            return f"the value is {value.dtype} and the table {self.dtype}. Load its floating-point rows"
        if isinstance(value, ShardedTensor):
            ranks = dict(enumerate([0] if self.group is None else dist.get_process_group_ranks(self.group)))
            planned = {(s.row_start, s.col_start, s.rows, s.cols): ranks.get(s.rank) for s in layout.shards}
            shards = value.metadata().shards_metadata
            if {(*s.shard_offsets, *s.shard_sizes): s.placement.rank() for s in shards} != planned:  # type: ignore[union-attr]
                return (
                    f"the value is sharded in another way than this plan ({layout.cut}, {len(layout.shards)} shards). "
                    "Load it with shardrec.load_checkpoint, which cuts it again"
                )
        return ""

    def write(self, value: Any) -> None:
        """Set the table's values. This rank takes its shards of them.

        Args:
            value: (num_embeddings, embedding_dim), or a ShardedTensor of it; without :meth:`value_fault`.
        """
        load_table(self.tensors(to_write=True), value)


class TableWatch:
    """Notices what is done to the parameters of tables, in as little time as a step can spare."""

    def __init__(self, tables: Sequence[ShardedTable]) -> None:
        self._tables = tables
        kept = [(table._parameters, *entry) for table in tables for entry in table.kept]
        self._holders = [holder for holder, *_ in kept]
        self._names = [name for _, name, *_ in kept]
        self._parameters = [parameter for _, _, parameter, *_ in kept]
        self._memory = [memory for *_, memory, _ in kept]
        self._trains = [requires_grad for *_, requires_grad in kept]

    def fault(self) -> str:
        """What was done to a parameter that lookups cannot follow; "" for nothing."""
        parameters = self._parameters
        if (
            all(map(is_, map(dict.get, self._holders, self._names), parameters))
            and list(map(Tensor.data_ptr, parameters)) == self._memory
            and list(map(_REQUIRES_GRAD, parameters)) == self._trains
        ):
            return ""
        return next(filter(None, (table.fault() for table in self._tables)), "")


_VALUES = methodcaller("values")
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModuleWatch:
    """Notices that a module has other parameters or modules in it than before, in as little time as it can."""

    def __init__(self, module: nn.Module) -> None:
        self._holders = [holder for child in module.modules() for holder in (child._parameters, child._modules)]
        self._held: list[object] = list(chain.from_iterable(map(_VALUES, self._holders)))

    def is_as_before(self) -> bool:
        """Whether all are those that the module had."""
        present = list(chain.from_iterable(map(_VALUES, self._holders)))
        return len(present) == len(self._held) and all(map(is_, present, self._held))


def averaged_parameters(module: nn.Module, held: list[nn.Parameter], *, dense: bool) -> list[nn.Parameter]:
    """Append the parameters of replicated tables, and of the ``dense`` part, in the order of registration."""
    if dense:
        held += [parameter for parameter in module._parameters.values() if parameter is not None]
    for child in module._modules.values():
        if isinstance(child, ShardedTable):
            held += child.parameters() if child.layout.replicated else ()
        elif child is not None:
            averaged_parameters(child, held, dense=dense)
    return held


def as_one_tensor(
    layout: TableLayout,
    tensors: Mapping[Shard | None, Tensor],
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype = torch.float32,
    per_row: bool = False,
) -> Tensor | ShardedTensor:
    """A table's local parts as the value of a state_dict, which shares their memory.

    Args:
        layout: where the table lives.
        tensors: (rows, cols) per local shard, or the replica under None; (rows,) if ``per_row``.
        group: the process group. None on one rank.
        dtype: of the tensors, on every rank.
        per_row: whether the tensors have a number per row, which every column stripe has alike.

    Returns:
        A plain tensor if this rank holds the whole table, else a ShardedTensor.
    """
    if layout.replicated:
        return tensors[None]
    size = (layout.num_embeddings, layout.embedding_dim)[: 1 if per_row else 2]
    if group is None:
        first = next(iter(tensors.values()))
        ends = [first.data_ptr(), *(tensor.data_ptr() + tensor.nbytes for tensor in tensors.values())]
        if any(end != tensor.data_ptr() for end, tensor in zip(ends, tensors.values(), strict=False)):
            raise ConfigError(f"table {layout.name!r} is cut by columns on one rank. Give it plan.on_one_rank()")
        return first.as_strided(size, first.stride())  # row blocks, one after the other
    device = next((tensor.device.type for tensor in tensors.values()), "cpu")
    shards, local = list(layout.shards), []
    if per_row:
        shards, tensors = _row_blocks(layout, tensors)
    for shard, tensor in tensors.items():
        if shard is not None:
            local.append(TensorShard(tensor, _metadata(shard, group, tensor.device.type, len(size))))
    metadata = ShardedTensorMetadata(
        shards_metadata=[_metadata(shard, group, device, len(size)) for shard in shards],
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=dtype),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=group)


def _row_blocks(
    layout: TableLayout, tensors: Mapping[Shard | None, Tensor]
) -> tuple[list[Shard], dict[Shard | None, Tensor]]:
    """The rows of a table, cut at the boundaries of all column stripes, and what this rank holds of them.

    A block is here on this rank if any of its stripes has it, so that a rank saves and loads all its rows; of equal
    blocks of several ranks ``torch.distributed.checkpoint`` saves one.
    """
    stripes = layout.stripes()
    bounds = sorted({bound for stripe in stripes for bound in stripe.boundaries})
    blocks: list[Shard] = []
    local: dict[Shard | None, Tensor] = {}
    for start, end in pairwise(bounds):
        holders = [stripe.shards[bisect(stripe.boundaries, start) - 1] for stripe in stripes]
        shard = next((holder for holder in holders if holder in tensors), holders[0])
        blocks.append(replace(shard, row_start=start, row_end=end))
        if shard in tensors:
            local[blocks[-1]] = tensors[shard][start - shard.row_start : end - shard.row_start]
    return blocks, local


def _metadata(shard: Shard, group: dist.ProcessGroup, device: str, dims: int) -> ShardMetadata:
    # A plan counts the ranks of its group, a placement the ranks of the world.
    rank = dist.get_global_rank(group, shard.rank)
    placement = f"rank:{rank}/{device}"
    if device == "cuda":
        placement += f":{rank % torch.cuda.device_count()}"
    offsets, sizes = [shard.row_start, shard.col_start], [shard.rows, shard.cols]
    return ShardMetadata(shard_offsets=offsets[:dims], shard_sizes=sizes[:dims], placement=placement)


def local_parts(value: Tensor | ShardedTensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor]:
    """What this rank has of a state_dict's value, by first and last indices (exclusive). A plain tensor is one part."""
    if not isinstance(value, ShardedTensor):
        return {((0,) * value.dim(), tuple(value.shape)): value}
    return {
        (tuple(offsets), tuple(map(add, offsets, shard.metadata.shard_sizes))): shard.tensor
        for shard in value.local_shards()
        for offsets in [shard.metadata.shard_offsets]
    }


def copy_rows(target: Tensor, shard: Shard | None, value: Tensor | ShardedTensor) -> None:
    """Copy a number per row into a shard's, or the replica's, from what this rank has of a state_dict's value."""
    first, last = (0, len(target)) if shard is None else (shard.row_start, shard.row_end)
    for ((start,), (end,)), rows in local_parts(value).items():
        top, bottom = max(first, start), min(last, end)
        if top < bottom:
            target[top - first : bottom - first].copy_(rows[top - start : bottom - start])


def settle(flags: FaultFlags, lookup: ShardLookup, shards: Iterable[Shard | None], *, to_write: bool) -> None:
    """:meth:`ShardLookup.settle`, unless a faulty batch was looked up, which raises."""
    flags.check()
    lookup.settle(shards, to_write=to_write)


def load_table(tensors: Mapping[Shard | None, Tensor], value: Tensor | ShardedTensor) -> None:
    """Copy a state_dict's value into a table's local parts, rounded to their dtype if it differs."""
    parts = local_parts(value)
    for shard, tensor in tensors.items():
        if shard is None:  # the replica is whole
            tensor.copy_(value)
            continue
        place = (shard.row_start, shard.col_start), (shard.row_end, shard.col_end)
        tensor.copy_(parts[place] if place in parts else value[tuple(map(slice, *place))])


def _refuse_ddp(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise on every rank for DistributedDataParallel around shards. See [Note: DistributedDataParallel]."""
    if not isinstance(wrapper, DistributedDataParallel) or module is None or wrapper.process_group.size() == 1:
        return
    for table in module.modules():
        if type(table) is ShardedTable and not table.layout.replicated:
            raise ConfigError(
                f"DistributedDataParallel around {type(module).__name__} would write rank 0's rows over the other "
                f"ranks' shards of table {table.layout.name!r}: use what shardrec.shard returns without it, which "
                "averages dense gradients by itself, or with dense='none' put it around dense layers before"
            )


_state_dict_utils._all_gather_sharded_tensor = gathered  # type: ignore[assignment,unused-ignore]
register_module_module_registration_hook(_refuse_ddp)
