"""Derives the planner's description of a table from its shape and the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardrec.errors import ConfigError
from shardrec.planner.cost import Growth, Histogram, TableLoad

if TYPE_CHECKING:
    from torch import nn
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from shardrec.lookup.optimizers import FusedOptimizer


class PlannedTable(NamedTuple):
    """A table of a collection: its name in the plan. ``pooled``, or a row per id, where each distinct id of a batch
    is sent once (``dedup``). Raw ids, which are spread evenly over its rows (``dynamic``)."""

    name: str
    config: BaseEmbeddingConfig
    optimizer: FusedOptimizer | None
    pooled: bool
    dedup: bool
    dynamic: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Statistics of a feature in sample batches.

    Args:
        pooling: ids of a sample.
        growth: how the distinct ids grow. None if there was no id.
        ids: (N,) all of them.
    """

    pooling: float
    growth: Growth | None
    ids: NDArray[np.int64]


def table_loads(
    model: nn.Module,
    *,
    poolings: Mapping[str, float] | None = None,
    sampled: Mapping[str, Sampled] | None = None,
    dedup: bool = True,
) -> dict[str, TableLoad]:
    """The planner's description per table in a model's collections.

    Args:
        model: holds unsharded collections.
        poolings: ids of a sample, by feature or by table name. Default: 1.
        sampled: statistics of sample batches, by feature. ``poolings`` overrides them.
        dedup: sequence collections send each distinct id of a table once per batch.

    Raises:
        ConfigError: for a pooling of no feature and no table.
    """
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    # With torch and torchrec, which the planner of tables does without.
    from shardrec.layout.discover import collections_of, configs_of, qualified_name, tables_of
    from shardrec.lookup.optimizers import fused_optimizer_of

    tables = []
    for path, collection in collections_of(model).items():
        modules, pooled = tables_of(collection), isinstance(collection, EmbeddingBagCollection)
        for config in configs_of(collection):
            name = qualified_name(path, config.name)
            optimizer = (
                fused_optimizer_of(modules[config.name].get_parameter("weight"), name)
                if config.name in modules
                else None
            )
            tables.append(PlannedTable(name, config, optimizer, pooled, dedup))
    return loads_of(tables, poolings=poolings, sampled=sampled)


def loads_of(
    tables: Iterable[PlannedTable],
    *,
    poolings: Mapping[str, float] | None = None,
    sampled: Mapping[str, Sampled] | None = None,
) -> dict[str, TableLoad]:
    """The same of tables of any collections."""
    import torch  # which the planner of tables does without

    from shardrec.lookup.fbgemm_kernel import has_fused_kernel  # with torch
    from shardrec.lookup.optimizers import OptimizerKind  # with torch

    pooling_of = dict(poolings or {})
    used: set[str] = set()
    loads = {}
    for name, config, optimizer, pooled, dedup, dynamic in tables:
        growth = None
        poolings_here, ids = [], []
        for feature in config.feature_names:
            value = pooling_of.get(feature, pooling_of.get(name))
            used |= {feature, name} & pooling_of.keys()
            seen = (sampled or {}).get(feature)
            poolings_here.append(value if value is not None else seen.pooling if seen else 1.0)
            if seen is not None:
                growth = growth or seen.growth
                ids.append(seen.ids)
        states, row_states = ((), ()) if optimizer is None else (optimizer.states, optimizer.row_states)
        loads[name] = TableLoad(
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            poolings=tuple(map(float, poolings_here)),
            growth=growth,
            histogram=Histogram.of_ids(np.concatenate(ids), config.num_embeddings) if ids and not dynamic else None,
            pooled=pooled,
            dedup=dedup,
            weight_bytes=2 if "16" in str(config.data_type) else 4,
            state_bytes=4 * (len(states) - len(row_states)),
            row_state_bytes=4 * len(row_states),
            whole_row_state=bool(row_states),
            cuts_columns=optimizer is None or optimizer.kind is not OptimizerKind.LAMB,
            fused=optimizer is not None,
            leaves_device=optimizer is not None
            and "BF16" not in str(config.data_type)
            and has_fused_kernel(optimizer, torch.device("cuda"), torch.float32, [config.embedding_dim]),
        )
    unknown = sorted(pooling_of.keys() - used)
    if unknown:
        raise ConfigError(f"poolings names {unknown[0]!r}, which is not a feature or a table of the model")
    return loads


def sampled_features(batches: Iterable[KeyedJaggedTensor]) -> dict[str, Sampled]:
    """Ids per sample, growth of the distinct ids and the ids, by feature, from batches as one rank gets them.

    The growth is Heaps' law through two points: the first batch, and all of them; and locally, through each half.
    """
    import torch

    samples = 0
    ids: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        samples += batch.stride()
        for key in list(batch.keys()):
            ids.setdefault(key, []).append(batch[key].values())
    if not samples:
        raise ConfigError("sample_batches holds no sample. Give batches as they are trained on, or leave it out")
    sampled = {}
    for key, parts in ids.items():
        everything = torch.cat(parts)
        growth = None
        if len(everything):
            first, total = len(parts[0]), len(everything)
            distinct = len(everything.unique())
            power = 1.0
            if len(parts) > 1 and 0 < first < total:
                power = min(1.0, log(distinct / len(parts[0].unique())) / log(total / first))
            elif distinct < total:
                power = log(max(distinct, 2)) / log(max(total, 3))
            new = np.sort(np.unique(everything.cpu().numpy(), return_index=True)[1])
            sizes = [total >> halvings for halvings in range(max(1, total.bit_length() - 4))]  # at least 16 ids
            points = tuple((float(size), float(np.searchsorted(new, size))) for size in reversed(sizes))
            growth = Growth(scale=distinct / total**power, power=power, points=points)
        numbers = everything.to(device="cpu", dtype=torch.int64).numpy()
        sampled[key] = Sampled(pooling=len(everything) / samples, growth=growth, ids=numbers)
    return sampled
