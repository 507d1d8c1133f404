"""Tables for ``torch.distributed.checkpoint.state_dict`` with ``full_state_dict=True``.

torch gathers a ShardedTensor there as if each rank had one block of rows, all but the last of one size. Tables are cut
in other ways, and some ranks lack a shard. So :mod:`shardrec.modules.table` replaces torch's
function by one that reads the metadata.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from shardrec.exchange.peers import peers


def gathered(
    sharded: ShardedTensor, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Tensor:
    """All of a ShardedTensor, on every rank. Arguments as torch's function takes them.

    Args:
        sharded: (rows, cols), cut in any way.
        group: is not used, for the tensor has its own.
        device: of the result. Default: the shards' device.
    """
    group, metadata = sharded._process_group, sharded.metadata()  # type: ignore[attr-defined,unused-ignore]
    of_ranks: dict[int, list[tuple[list[int], list[int]]]] = {rank: [] for rank in dist.get_process_group_ranks(group)}
    for shard in metadata.shards_metadata:
        of_ranks[shard.placement.rank()].append((shard.shard_offsets, shard.shard_sizes))  # type: ignore[union-attr,index]
    device = device or torch.device(metadata.shards_metadata[0].placement.device().type)  # type: ignore[union-attr]
    sizes = {rank: sum(rows * cols for _, (rows, cols) in shards) for rank, shards in of_ranks.items()}
    mine = torch.zeros(max(sizes.values()), dtype=metadata.tensor_properties.dtype, device=device)
    local = sorted(sharded.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
    flat = [shard.tensor.detach().reshape(-1).to(device) for shard in local]
    if flat:
        torch.cat(flat, out=mine[: sizes[dist.get_rank()]])
    received = mine.new_empty(len(of_ranks) * len(mine))
    with peers(group, "gathering of a table"):
        dist.all_gather_into_tensor(received, mine, group=group)
    whole = mine.new_empty(metadata.size)
    for values, shards in zip(received.view(len(of_ranks), -1), of_ranks.values(), strict=True):
        start = 0
        for (row, col), (rows, cols) in sorted(shards):
            whole[row : row + rows, col : col + cols] = values[start : start + rows * cols].view(rows, cols)
            start += rows * cols
    return whole
