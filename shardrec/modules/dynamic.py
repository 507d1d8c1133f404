"""Which tables of a model have dynamic ids, and whether their layouts allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError
from shardrec.ids.maps import cut_faults
from shardrec.ids.options import DynamicIds
from shardrec.layout import ShardingPlan
from shardrec.layout.discover import collections_of, qualified_name
from shardrec.lookup.optimizers import fused_optimizer_of

if TYPE_CHECKING:
    from shardrec.planner import Constraint

__all__ = ["constraints_of", "dynamic_tables"]


def constraints_of(given: Mapping[str, DynamicIds]) -> dict[str, Constraint]:
    """What a planner is told of tables with dynamic ids: cuts that give all column stripes the same row blocks."""
    if not given:
        return {}
    from shardrec.planner import Constraint

    cuts = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")
    return {table: Constraint(cuts=cuts) for table in given}


def dynamic_tables(
    model: nn.Module, plan: ShardingPlan, given: Mapping[str, DynamicIds], replicas: int
) -> tuple[dict[str, DynamicIds], list[str]]:
    """The tables with dynamic ids by their names in the plan, and why they cannot have them, one sentence each.

    Args:
        model: unsharded.
        plan: of it.
        given: by names in the plan, or by the tables' own names where one collection has them.
        replicas: number of copies of the tables.

    Raises:
        ConfigError: for a name that is none, or that several tables have.
    """
    weights: dict[str, nn.Parameter] = {}
    own: dict[str, list[str]] = {}
    for path, collection in collections_of(model).items():
        pooled = isinstance(collection, EmbeddingBagCollection)
        for name, module in (collection.embedding_bags if pooled else collection.embeddings).items():
            weights[qualified_name(path, name)] = module.weight
            own.setdefault(name, []).append(qualified_name(path, name))
    found: dict[str, DynamicIds] = {}
    for name, options in given.items():
        matching = [name] if name in weights else own.get(name, [])
        if len(matching) != 1:
            known = f"several of that name: {matching}" if matching else f"the tables {', '.join(map(repr, weights))}"
            raise ConfigError(f"dynamic_ids names table {name!r}, and there are {known}; name one of them")
        if not isinstance(options, DynamicIds):
            raise ConfigError(f"dynamic_ids of table {name!r} is a {type(options).__name__}; give a DynamicIds")
        found[matching[0]] = options
    faults = []
    if found and replicas > 1:
        faults.append(
            f"replicas={replicas} with dynamic_ids: each copy of a table would give its rows to other ids; leave one "
            "of the two out"
        )
    for name, options in found.items():
        layout, weight = plan.by_name.get(name), weights[name]
        faults += [fault for fault in ([] if layout is None else [cut_faults(layout, options)]) if fault]
        if options.evict != "never" and weight.requires_grad and fused_optimizer_of(weight, name) is None:
            faults.append(
                f"table {name!r} with dynamic ids has no fused optimizer, and evict={options.evict!r}: an ordinary "
                "optimizer's state of an evicted row would go on for the next id; give the table an optimizer with "
                "apply_optimizer_in_backward, or evict='never'"
            )
    return found, faults
