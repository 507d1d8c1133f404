"""What an unsharded collection says of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, TableLayout
from shardrec.layout.discover import qualified_name
from shardrec.lookup.groups import LookupTable
from shardrec.lookup.optimizers import fused_optimizer_of

TABLE_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
"""The weights' dtype for each ``data_type`` of a table that can be sharded."""


@dataclass(frozen=True)
class GivenTables:
    """What an unsharded collection says of its tables, by their own names.

    Args:
        lookup_tables: layout, fused optimizer and dtype per table.
        frozen: those that take no gradient.
        optimizers: those that were given an optimizer in backward. Frozen tables among them, which use none.
    """

    lookup_tables: dict[str, LookupTable]
    frozen: set[str]
    optimizers: set[str]


_AtStep: TypeAlias = Callable[[TableLayout], bool]


def given_tables(
    tables: Any, configs: Sequence[BaseEmbeddingConfig], plan: ShardingPlan, path: str, at_step: _AtStep
) -> GivenTables:
    """What a collection says of its tables.

    Args:
        tables: its modules, by name.
        configs: of the tables.
        plan: their layouts.
        path: of the collection in the model.
        at_step: whether a table of a layout is updated by its optimizer's step.

    Raises:
        PlanError: if the plan does not fit the tables.
        ConfigError: for a table type or an optimizer that cannot be sharded.
    """
    weights: dict[str, nn.Parameter] = {config.name: tables[config.name].weight for config in configs}
    return GivenTables(
        {config.name: _lookup_table(config, weights[config.name], plan, path, at_step) for config in configs},
        {name for name, weight in weights.items() if not weight.requires_grad},
        {name for name, weight in weights.items() if hasattr(weight, "_optimizer_classes")},
    )


def _lookup_table(
    config: BaseEmbeddingConfig, weight: nn.Parameter, plan: ShardingPlan, path: str, at_step: _AtStep
) -> LookupTable:
    name = qualified_name(path, config.name)
    if config.data_type not in TABLE_DTYPES:
        known = ", ".join(data_type.value for data_type in TABLE_DTYPES)
        raise ConfigError(f"table {name!r} is {config.data_type}. Tables that train are {known}: set data_type to one")
    plan.check_tables({name: (config.num_embeddings, config.embedding_dim)}, partial=True)
    # A fused optimizer would update a frozen table. The kernels do not know that it is frozen.
    optimizer = fused_optimizer_of(weight, name) if weight.requires_grad else None
    dtype = TABLE_DTYPES[config.data_type]
    return LookupTable(layout=(layout := plan.by_name[name]), optimizer=optimizer, dtype=dtype, at_step=at_step(layout))
