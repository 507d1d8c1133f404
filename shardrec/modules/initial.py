"""The first values of a table, the same as the unsharded module's, one table in memory at a time.

A collection built on a real device already has its values. For one built on ``torch.device("meta")``, whose tables may
be too large for one device, they are drawn here in the order in which the collection draws them on the CPU: torch first
fills each table as ``nn.EmbeddingBag`` does, then each config's ``init_fn`` writes over it. So after
``torch.manual_seed(s)`` a meta collection that is sharded and a collection built on the CPU hold the same values,
whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["first_bag_values", "first_sequence_values"]


def first_bag_values(collection: EmbeddingBagCollection) -> Iterator[tuple[str, Tensor]]:
    """Each table's name and its (num_embeddings, embedding_dim) first values on the CPU or where the table is."""
    configs = collection.embedding_bag_configs()
    weights = {config.name: collection.embedding_bags[config.name].weight for config in configs}
    if not any(weight.is_meta for weight in weights.values()):
        for name, weight in weights.items():
            yield name, weight.detach()
        return
    for weight in weights.values():
        # nn.EmbeddingBag's own draw, which the one below writes over.
        torch.nn.init.normal_(torch.empty(weight.shape, dtype=weight.dtype))
    for config in configs:
        values = torch.empty(weights[config.name].shape, dtype=weights[config.name].dtype)
        assert config.init_fn is not None, "EmbeddingBagConfig always has an init_fn"
        config.init_fn(values)
        yield config.name, values


def first_sequence_values(collection: EmbeddingCollection) -> Iterator[tuple[str, Tensor]]:
    """As :func:`first_bag_values`; ``EmbeddingCollection`` writes over each table's draw before it makes the next."""
    for config in collection.embedding_configs():
        weight = collection.embeddings[config.name].weight
        if not weight.is_meta:
            yield config.name, weight.detach()
            continue
        values = torch.empty(weight.shape, dtype=weight.dtype)
        torch.nn.init.normal_(values)
        assert config.init_fn is not None, "EmbeddingConfig always has an init_fn"
        config.init_fn(values)
        yield config.name, values
