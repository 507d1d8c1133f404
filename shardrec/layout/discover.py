"""Finds the embedding collections and tables of a model, before it is sharded."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


# By name: importing the second module takes time, and its users have imported it.
_REMAPPERS = {
    ("torchrec.modules.mc_modules", "ManagedCollisionModule"),
    ("torchrec.modules.itep_modules", "GenericITEPModule"),
}


def qualified_name(path: str, table: str) -> str:
    """The name of a table in a plan: the path of its collection in the model, a dot, and the table's own name."""
    return f"{path}.{table}" if path else table


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """The unsharded collections of a model, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
    }


def configs_of(collection: Collection) -> list[BaseEmbeddingConfig]:
    """The configs of a collection's tables."""
    pooled = isinstance(collection, EmbeddingBagCollection)
    configs: list[BaseEmbeddingConfig]
    configs = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    return configs


def tables_of(collection: Collection) -> dict[str, Any]:
    """The modules of a collection's tables, by the tables' own names."""
    pooled = isinstance(collection, EmbeddingBagCollection)
    return dict((collection.embedding_bags if pooled else collection.embeddings).items())


def default_device(model: nn.Module, group: dist.ProcessGroup | None = None) -> torch.device:
    """The default device for planning and sharding: the model's device, or one that its process group supports."""
    for parameter in model.parameters():
        if parameter.is_cuda:
            return parameter.device
    if dist.is_available() and dist.is_initialized() and dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def remappers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by path, that map ids to rows and change the map when they see ids (managed collision, pruning)."""
    return {path: module for path, module in model.named_modules() if is_a(module, *_REMAPPERS)}


def is_a(module: nn.Module, *classes: tuple[str, str]) -> bool:
    """Whether a module is of one of these classes, by the name of the class and of its module."""
    return any((cls.__module__, cls.__name__) in classes for cls in type(module).__mro__)


def table_configs(model: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    """The config per table in a model's unsharded collections, by the table's name in a plan."""
    configs: dict[str, BaseEmbeddingConfig] = {}
    for path, collection in collections_of(model).items():
        for config in configs_of(collection):
            configs[qualified_name(path, config.name)] = config
    return configs


def table_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """``(num_embeddings, embedding_dim)`` per table of a model's collections, by its name in a plan."""
    return {name: (config.num_embeddings, config.embedding_dim) for name, config in table_configs(model).items()}
