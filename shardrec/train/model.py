"""The click model of a run, built from the data's schema with TorchRec's modules, and its optimizers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import LAMB, PartialRowWiseAdam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from shardrec.data import ClickSchema, FeatureSpec
from shardrec.errors import ConfigError
from shardrec.ids import DynamicIds
from shardrec.layout.discover import table_configs
from shardrec.modules import ShardedModel
from shardrec.modules.dynamic import constraints_of
from shardrec.train.config import TrainConfig, parse_constraint

if TYPE_CHECKING:
    from shardrec.planner import Constraint

__all__ = ["build_model", "dense_optimizer", "dynamic_tables", "fuse_optimizer", "planner_constraints", "table_name"]

_CROSS_LAYERS = 2
_CROSS_RANK = 32

_TABLE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad, {"eps": 1e-8}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {}),
    "lamb": (LAMB, {}),
}
_DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
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
            parameters = [one for one in module.parameters() if not getattr(one, "_optimizer_classes", [])]
            rates = {"lr": config.embedding_lr, "weight_decay": config.embedding_weight_decay}
            apply_optimizer_in_backward(cls, parameters, {**rates, **settings})


def dense_optimizer(model: ShardedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of everything that is not a table."""
    cls: Any = _DENSE_OPTIMIZERS[config.optimizer]
    parameters = model.dense_parameters()
    optimizer: torch.optim.Optimizer = cls(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return optimizer


def planner_constraints(
    config: TrainConfig, model: nn.Module, dynamic: Mapping[str, DynamicIds]
) -> dict[str, Constraint]:
    """The config's constraints as the planner takes them; of two for one pattern the last one holds.

    The name of a feature that one table alone looks up stands for the table, unless a table has this name itself.
    Tables with dynamic ids get the cuts that these allow, where the config says nothing of them.
    """
    tables = _tables_by_feature(model)
    own_names = {name for names in tables.values() for name in names}
    constraints = {}
    for text in config.constraint:
        pattern, limit = parse_constraint(text)
        if pattern not in own_names and len(tables.get(pattern, [])) == 1:
            (pattern,) = tables[pattern]
        constraints[pattern] = limit
    # The first that matches a table counts.
    return constraints | {name: one for name, one in constraints_of(dynamic).items() if name not in constraints}


def dynamic_tables(spec: FeatureSpec, model: nn.Module) -> dict[str, DynamicIds]:
    """The tables of a model's features with dynamic ids, as :func:`shardrec.shard` takes them.

    Raises:
        ConfigError: if the features of a table differ in it.
    """
    asked = {feature.name: feature.dynamic_ids for feature in spec.sparse}
    by_table: dict[str, DynamicIds | None] = {}
    for feature, tables in _tables_by_feature(model).items():
        for table in tables:
            options = asked.get(feature)
            if by_table.setdefault(table, options) != options:
                raise ConfigError(
                    f"feature {feature!r} has dynamic_ids {options} and another feature of its table {table!r} has "
                    f"{by_table[table]}: give all features of a table the same in the features file (--features)"
                )
    return {table: options for table, options in by_table.items() if options is not None}


def _tables_by_feature(model: nn.Module) -> dict[str, list[str]]:
    """The own names of the tables that look each feature up."""
    tables: dict[str, list[str]] = {}
    for config in table_configs(model).values():
        for feature in config.feature_names:
            tables.setdefault(feature, []).append(config.name)
    return tables
