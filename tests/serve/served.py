"""Models to be served, sharded by any plan, and what they have to answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection
from shardrec.serve.lookup import served_memory
from shardrec.serve.row_bytes import HEAD_BYTES, WeightFormat
from shardrec.serve.served_model import ServedModel
from tests.models import collection, random_configs, table_sizes
from tests.plans import cut_plan, random_plan
from tests.scripting.scorers import Scorer

__all__ = ["click_scorer", "decode", "on_grid", "pooled_columns", "served_rows", "some_plan"]


def pooled_columns(configs: Sequence[EmbeddingBagConfig]) -> int:
    """Columns of the pooled output."""
    return sum(config.embedding_dim * len(config.feature_names) for config in configs)


def on_grid(weight: Tensor, rng: Random) -> None:
    """Values that each format keeps exactly, and whose sums are exact in any order: 0, 17, 34 to 255."""
    with torch.no_grad():
        weight.copy_(
            torch.tensor([[17 * rng.randrange(16) for _ in row] for row in weight.tolist()], dtype=torch.float32)
        )
        weight[:, 0] = 0
        weight[:, -1] = 255


def some_plan(rng: Random, sizes: dict[str, tuple[int, int]], topology: Topology, cut: str | None) -> ShardingPlan:
    """By one cut, or by any."""
    return random_plan(rng, sizes, topology) if cut is None else cut_plan(cut, rng, sizes, topology)


def click_scorer(
    rng: Random,
    topology: Topology,
    *,
    cut: str | None = None,
    weighted: bool = False,
    grid: bool = False,
    plan_rng: Random | None = None,
) -> tuple[ShardedModel, list[EmbeddingBagConfig], dict[str, Tensor]]:
    """A sharded model in eval mode, its tables' configs, and the whole tables by their names in the plan.

    Args:
        rng: where the tables are drawn from.
        topology: of the plan.
        cut: of all the tables; None for any.
        weighted: ids come with weights.
        grid: the tables' values are those of :func:`on_grid`.
        plan_rng: where the plan is drawn from, if from elsewhere.
    """
    configs = random_configs(rng, weighted=weighted)
    bags = collection(configs, weighted=weighted, optimizers="sgd")
    for name in bags.embedding_bags if grid else []:
        on_grid(bags.embedding_bags[name].weight, rng)
    whole = {f"sparse.{name}": module.weight.detach().clone() for name, module in bags.embedding_bags.items()}
    plan = some_plan(plan_rng or rng, table_sizes(configs, "sparse"), topology, cut)
    return shard(Scorer(bags, pooled_columns(configs)), plan).eval(), configs, whole


def decode(rows: Tensor, form: WeightFormat) -> Tensor:
    """(n, w) float32: what the bytes (n, b) uint8 stand for."""
    if form is WeightFormat.FP32:
        return rows.contiguous().view(torch.float32)
    if form is WeightFormat.FP16:
        return rows.contiguous().view(torch.float16).to(torch.float32)
    scale, bias = rows[:, :HEAD_BYTES].contiguous().view(torch.float16).to(torch.float32).split(1, dim=1)
    codes = rows[:, HEAD_BYTES:]
    if form is WeightFormat.INT4:
        # Two to a byte, the first one in the low half.
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    found: Tensor = scale * codes.to(torch.float32) + bias
    return found


def served_rows(model: ServedModel) -> list[tuple[str, slice, slice, Tensor]]:
    """Table, rows, columns and (rows, columns) values of each part of a table that this rank holds."""
    found = []
    for child in model.module.modules():
        if not isinstance(child, ShardedCollection):
            continue
        memory = served_memory(child)
        for layout in child.table_layouts.values():
            form = model.formats[layout.name]
            if layout.replicated:
                found.append((layout.name, slice(None), slice(None), decode(memory[layout.name], form)))
            for shard_ in layout.on_rank(child.context.collectives.rank):
                rows, columns = slice(shard_.row_start, shard_.row_end), slice(shard_.col_start, shard_.col_end)
                found.append((layout.name, rows, columns, decode(memory[shard_], form)))
    return found
