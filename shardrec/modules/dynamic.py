"""Finds the tables of a model with dynamic ids, and checks whether their layouts allow it.

TorchRec's managed-collision collections map ids in the model's forward, to rows that each rank would assign on its own.
If ``dynamic_ids`` names their tables, they are replaced by their embedding collection, and ids stay raw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.ids.maps import cut_faults
from shardrec.ids.options import DynamicIds
from shardrec.layout import ShardingPlan
from shardrec.layout.discover import collections_of, is_a, qualified_name, remappers_of, table_configs, tables_of
from shardrec.lookup.optimizers import fused_optimizer_of
from shardrec.modules.overrides import refuse_overrides

_WRAPPER = ("torchrec.modules.mc_embedding_modules", "BaseManagedCollisionEmbeddingCollection")
_EVICT = {"LFU_EvictionPolicy": "lfu", "LRU_EvictionPolicy": "lru", "DistanceLFU_EvictionPolicy": "score"}


class _RawIds(nn.Module):
    """Replaces a managed-collision collection by its embedding collection, which gets raw ids."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        self._embedding_module = wrapper._embedding_module

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, None]:
        """The embeddings, and None, as TorchRec's returns without remapped features."""
        return self._embedding_module(features), None


def without_managed_collision(model: nn.Module, given: Mapping[str, DynamicIds]) -> dict[int, nn.Module]:
    """The replacements of TorchRec's managed-collision collections for tables with dynamic ids, by the modules' ids.

    Raises:
        ConfigError: for a collection that has learned ids, returns remapped ids, or has tables without dynamic ids.
    """
    replacements: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        if not is_a(module, _WRAPPER):
            continue
        inner = f"{path}._embedding_module" if path else "_embedding_module"
        tables = list(table_configs(module))
        table_names = [name.rpartition(".")[2] for name in tables]
        left = [name for name in table_names if name not in given and qualified_name(inner, name) not in given]
        if len(left) == len(table_names):
            continue
        words = (
            f"module {path!r} ({type(module).__name__}) is to have dynamic_ids instead of its own map from ids to rows"
        )
        if left:
            raise ConfigError(f"{words}, and its tables {', '.join(map(repr, left))} are not named. Name all of them")
        if module._return_remapped_features:
            raise ConfigError(f"{words}: set return_remapped_features=False, because dynamic ids produce none")
        ids = [buffer for name, buffer in module.named_buffers() if name.endswith("_mch_sorted_raw_ids")]
        if any(bool((buffer != torch.iinfo(buffer.dtype).max).any()) for buffer in ids):
            raise ConfigError(f"{words}, and has learned ids, which would be lost. Shard the model before it trains")
        refuse_overrides({path: module})
        replacements[id(module)] = _RawIds(module)
    return replacements


def refuse_remappers(model: nn.Module, replaced: Mapping[int, nn.Module], world_size: int) -> None:
    """Raise for modules that would learn a different map from ids to rows on each rank.

    Args:
        model: unsharded.
        replaced: modules with maps that will not be used, by their ids.
        world_size: number of ranks.
    """
    gone = {id(child) for module in model.modules() if id(module) in replaced for child in module.modules()}
    remappers = {path: module for path, module in remappers_of(model).items() if id(module) not in gone}
    if not remappers or world_size == 1:
        return
    path, module = next(iter(remappers.items()))
    remedy = "map the ids before the model sees them, with a hash or a fixed map"
    policy = getattr(module, "_eviction_policy", None)
    if policy is not None:
        table, evict = path.rpartition(".")[2], _EVICT.get(type(policy).__name__, "lfu")
        options = f"shardrec.DynamicIds(evict={evict!r}, fallback_rows=1)"
        remedy = f"give shardrec.shard dynamic_ids={{{table!r}: {options}}}, with all tables of its collection"
    raise ConfigError(
        f"module {path!r} ({type(module).__name__}) keeps a map from ids to rows, and each of {world_size} ranks would "
        f"learn another one for the same tables; {remedy}, or shard the model on one rank"
    )


def dynamic_tables(
    model: nn.Module, plan: ShardingPlan, given: Mapping[str, DynamicIds], replicas: int
) -> tuple[dict[str, DynamicIds], list[str]]:
    """The tables with dynamic ids by their names in the plan, and the faults of their layouts, one sentence each.

    Args:
        model: unsharded.
        plan: of it.
        given: by names in the plan, or by the tables' own names where one collection has them.
        replicas: number of copies of the tables.

    Raises:
        ConfigError: if no table has the name, or several have it.
    """
    weights: dict[str, nn.Parameter] = {}
    full_names: dict[str, list[str]] = {}
    for path, collection in collections_of(model).items():
        for name, module in tables_of(collection).items():
            weights[qualified_name(path, name)] = module.weight
            full_names.setdefault(name, []).append(qualified_name(path, name))
    by_name: dict[str, DynamicIds] = {}
    for name, options in given.items():
        matching = [name] if name in weights else full_names.get(name, [])
        if len(matching) != 1:
            known = f"several of that name: {matching}" if matching else f"the tables {', '.join(map(repr, weights))}"
            raise ConfigError(f"dynamic_ids names table {name!r}, and there are {known}. Name one of them")
        if not isinstance(options, DynamicIds):
            raise ConfigError(f"dynamic_ids of table {name!r} is a {type(options).__name__}. Give a DynamicIds")
        by_name[matching[0]] = options
    faults = []
    if by_name and replicas > 1:
        faults.append(
            f"replicas={replicas} with dynamic_ids: each copy of a table would give its rows to other ids. Leave one "
            "of the two out"
        )
    for name, options in by_name.items():
        layout, weight = plan.by_name.get(name), weights[name]
        faults += [fault for fault in ([] if layout is None else [cut_faults(layout, options)]) if fault]
        if options.evict != "never" and weight.requires_grad and fused_optimizer_of(weight, name) is None:
            faults.append(
                f"table {name!r} with dynamic ids lacks a fused optimizer, and evict={options.evict!r}: an ordinary "
                "optimizer's state of an evicted row would continue for the next id. Give the table an optimizer with "
                "apply_optimizer_in_backward, or evict='never'"
            )
    return by_name, faults
