"""The first values of a table, the same as the unsharded module's, one table in memory at a time.

A collection built on a real device already has its values. For one built on ``torch.device("meta")``, whose tables may
be too large for one device, they are drawn here in the order in which the collection draws them on the CPU: torch first
fills each table as ``nn.EmbeddingBag`` does, then each config's ``init_fn`` writes over it. So after
``torch.manual_seed(s)`` a meta collection that is sharded and a collection built on the CPU hold the same values,
whatever the plan.

Cut tables on meta whose shards are to be on a GPU are drawn there instead, each shard by its ``init_fn`` where it lies:
drawing hundreds of gigabytes on the host would take minutes, and a rank needs its own shards only. These values are a
function of torch's seed, the plan and the kind of GPU; they are not those of the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from zlib import crc32

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from shardrec.layout import Shard
from shardrec.layout.discover import configs_of

__all__ = ["draw_in_place", "draw_rows", "first_values"]


def draw_in_place(weight: Tensor, config: BaseEmbeddingConfig, shard: Shard, seed: int) -> None:
    """Draw the first values of a shard where it lies.

    Args:
        weight: (rows, cols) of the shard, on a GPU.
        config: of its table.
        shard: which makes its values other than its neighbours'.
        seed: of the table, alike on ranks that are seeded alike.
    """
    with torch.random.fork_rng([weight.device.index or 0], device_type=weight.device.type):
        torch.manual_seed(seed + crc32(f"{shard.table} {shard.row_start} {shard.col_start}".encode()))
        config.init_fn(weight)


def draw_rows(config: BaseEmbeddingConfig, shard: Shard, count: int, step: int) -> Tensor:
    """Draw rows of a shard anew, on the CPU, from no generator that anybody else draws from.

    Args:
        config: of its table.
        shard: which makes its values other than its neighbours'.
        count: number of rows.
        step: which makes them other than those of another step.

    Returns:
        (count, cols) float32.
    """
    seed = crc32(f"{shard.table} {shard.row_start} {shard.col_start} {step}".encode())
    with torch.random.fork_rng(()):
        torch.default_generator.manual_seed(seed)
        values = torch.empty((count, shard.cols))
        config.init_fn(values)
        return values


def first_values(
    collection: EmbeddingBagCollection | EmbeddingCollection, in_place: Collection[str] = ()
) -> Iterator[tuple[str, Tensor | None]]:
    """Each table's name and its (num_embeddings, embedding_dim) first values on the CPU or where the table is.

    Args:
        collection: unsharded.
        in_place: tables that :func:`draw_in_place` is for, if they are on meta; None is given in place of their values.
    """
    pooled = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if pooled else collection.embeddings
    configs = configs_of(collection)
    on_meta = {config.name for config in configs if tables[config.name].weight.is_meta}
    if pooled and on_meta.isdisjoint(in_place):
        for config in configs:
            if config.name in on_meta:
                # nn.EmbeddingBag's own draw, which the one below writes over.
                torch.nn.init.normal_(torch.empty_like(tables[config.name].weight, device="cpu"))
    for config in configs:
        weight = tables[config.name].weight
        if config.name not in on_meta:
            yield config.name, weight.detach()
            continue
        if config.name in in_place:
            yield config.name, None
            continue
        values = torch.empty_like(weight, device="cpu")
        if not pooled:
            # EmbeddingCollection writes over each table's draw before it makes the next.
            torch.nn.init.normal_(values)
        config.init_fn(values)
        yield config.name, values
