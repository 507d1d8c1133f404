"""The click model of a run, built from the data's schema with TorchRec's modules, and its optimizers."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from shardrec.data import ClickSchema
from shardrec.errors import ConfigError
from shardrec.modules import ShardedModel
from shardrec.modules.table import ShardedTable
from shardrec.train.config import TrainConfig, parse_constraint

if TYPE_CHECKING:
    from shardrec.planner import Constraint

__all__ = ["build_model", "dense_optimizer", "fuse_optimizer", "planner_constraints", "table_name"]

_CROSS_LAYERS = 2
_CROSS_RANK = 32

_TABLE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad, {"eps": 1e-8}),
    "adam": (torch.optim.Adam, {}),
}
_DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}


def table_name(feature: str) -> str:
    """The name of a feature's own table."""
    return f"t_{feature}"


def build_model(config: TrainConfig, schema: ClickSchema) -> nn.Module:
    """A DLRM (Naumov et al., 2019) or, for ``model="dcn"``, one with DCN v2's cross network (Wang et al., 2021).

    Of ``package.module:Model`` it is what ``Model(schema)`` gives.

    Args:
        config: kind and sizes.
        schema: one table per sparse feature.

    Returns:
        A module from (dense (B, D) float32, sparse KeyedJaggedTensor) to (B,) or (B, 1) logits; TorchRec's has its
        tables on meta, the rest on the CPU.

    Raises:
        ConfigError: if there is no such model, or it makes something else.
    """
    if ":" in config.model:
        return _own_model(config.model, schema)
    dim = config.embedding_dim
    tables = [
        EmbeddingBagConfig(name=table_name(feature), embedding_dim=dim, num_embeddings=rows, feature_names=[feature])
        for feature, rows in zip(schema.sparse_names, schema.num_embeddings, strict=True)
    ]
    parts: dict[str, Any] = {
        "embedding_bag_collection": EmbeddingBagCollection(
            tables=tables, is_weighted=schema.weighted, device=torch.device("meta")
        ),
        "dense_in_features": len(schema.dense_names),
        "dense_arch_layer_sizes": [*config.dense_layers, dim],
        "dense_device": torch.device("cpu"),
    }
    if config.model == "dcn":
        # The cross network's output is as wide as its input, and the last of TorchRec's layers is the logit.
        model: nn.Module = DLRM_DCN(
            **parts,
            over_arch_layer_sizes=[*config.over_layers, 1],
            dcn_num_layers=_CROSS_LAYERS,
            dcn_low_rank_dim=_CROSS_RANK,
        )
    else:
        model = DLRM(**parts, over_arch_layer_sizes=[*config.over_layers, 1])
    return model


def _own_model(name: str, schema: ClickSchema) -> nn.Module:
    """``package.module:Model``, looked for in the working directory, too."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model (--model) is {name!r}: {error}; give package.module:Model") from error
    try:
        model = make(schema)
    except TypeError as error:
        raise ConfigError(
            f"model (--model) is {name!r}: {attribute}(schema) fails ({error}); it takes a shardrec.data.ClickSchema"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model (--model) is {name!r}: it makes a {type(model).__name__}, not an nn.Module")
    return model


def fuse_optimizer(model: nn.Module, config: TrainConfig) -> None:
    """Give every table the config's optimizer; to be called before :func:`shardrec.shard`."""
    cls, settings = _TABLE_OPTIMIZERS[config.embedding_optimizer]
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            # A model of one's own may have given some tables an optimizer already.
            own = [one for one in module.parameters() if not getattr(one, "_optimizer_classes", [])]
            apply_optimizer_in_backward(cls, own, {"lr": config.embedding_lr, **settings})


def dense_optimizer(model: ShardedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of everything that is not a table."""
    in_tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, ShardedTable)
        for parameter in module.parameters()
    }
    parameters = [parameter for _, parameter in model.named_parameters() if id(parameter) not in in_tables]
    cls: Any = _DENSE_OPTIMIZERS[config.optimizer]
    optimizer: torch.optim.Optimizer = cls(parameters, lr=config.lr)
    return optimizer


def planner_constraints(config: TrainConfig, model: nn.Module) -> dict[str, Constraint]:
    """The config's constraints as the planner takes them; of two for one pattern the last one holds.

    The name of a feature that one table alone looks up stands for the table, unless a table has this name itself.
    """
    from shardrec.planner import Constraint

    tables: dict[str, list[str]] = {}
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            configs = (
                module.embedding_bag_configs()
                if isinstance(module, EmbeddingBagCollection)
                else module.embedding_configs()
            )
            for one in configs:
                for feature in one.feature_names:
                    tables.setdefault(feature, []).append(one.name)
    own_names = {name for names in tables.values() for name in names}
    found = {}
    for text in config.constraint:
        pattern, cuts, ranks = parse_constraint(text)
        if pattern not in own_names and len(tables.get(pattern, [])) == 1:
            (pattern,) = tables[pattern]
        found[pattern] = Constraint(cuts=cuts, ranks=ranks)
    return found
