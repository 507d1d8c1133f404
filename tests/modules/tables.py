"""What a rank holds of tables, beside the unsharded ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardrec.layout import Shard
from shardrec.modules import ShardedEmbeddingBagCollection

__all__ = ["assert_weights_equal", "local_part"]


def local_part(whole: Tensor, place: Shard | None) -> Tensor:
    """A rank's part of a whole table."""
    if place is None:
        return whole
    return whole[place.row_start : place.row_end, place.col_start : place.col_end]


def assert_weights_equal(sharded: nn.Module, reference: nn.Module, where: str) -> None:
    """This rank's shards against the unsharded tables."""
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    for name, table in sharded.tables().items():
        whole = reference.embedding_bags[name].weight.detach()  # type: ignore[index,union-attr]
        for place, parameter in table.locals.items():
            part = local_part(whole, place)
            difference = (parameter.detach() - part).abs().max().item()
            assert torch.allclose(parameter, part, atol=1e-5), f"{where}: {place or name} differs by {difference}"
