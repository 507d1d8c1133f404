"""A model with tables under any cut, fused or ordinary optimizers, BatchNorm and a dense part; and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import shard
from shardrec.layout import Shard
from shardrec.modules import ShardedModel
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import cut_plan, topologies_of

__all__ = ["CUTS", "ROWS", "Click", "adam", "held", "make", "train", "train_alike", "whole"]

CUTS = ("table_wise", "row_wise", "row_wise_uneven", "column_wise", "grid", "data_parallel")
ROWS = {"a": 13, "b": 9, "c": 21}
DIM = 8

Held = list[tuple[str, Shard | None, Tensor]]
"""What a rank holds: name, which shard (None: all of it), numbers."""


class Click(nn.Module):
    def __init__(self, tables: Mapping[str, int] = ROWS) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{key}", num_embeddings=rows, embedding_dim=DIM, feature_names=[key])
                for key, rows in tables.items()
            ]
        )
        self.norm = nn.BatchNorm1d(len(tables) * DIM)
        self.top = nn.Linear(len(tables) * DIM, 2)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        value: Tensor = self.top(self.norm(self.bags(features).values()))
        return value


def make(cut: str, optimizer: str, tables: Mapping[str, int] = ROWS, **kwargs: object) -> ShardedModel:
    """The model on all ranks, its tables by a cut, or the first replicated and the others not, which is ``"mixed"``.

    With the optimizer ``"none"`` the tables are the ordinary optimizer's.
    """
    torch.manual_seed(3)
    module = Click(tables)
    choice = OPTIMIZERS[optimizer]
    if choice.optimizer is not None:
        apply_optimizer_in_backward(choice.optimizer, module.bags.parameters(), dict(choice.settings))
    sizes = {f"bags.t_{key}": (rows, DIM) for key, rows in tables.items()}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    topology = topologies_of(world_size)[0]
    plan = cut_plan("table_wise" if cut == "mixed" else cut, Random(cut), sizes, topology)
    if cut == "mixed":
        first = cut_plan("data_parallel", Random(cut), sizes, topology)
        plan = replace(plan, tables=(first.tables[0], *plan.tables[1:]))
    return shard(module, plan, **kwargs)  # type: ignore[arg-type]


def adam(model: ShardedModel) -> torch.optim.Optimizer:
    """For the parameters without an optimizer of their own."""
    return torch.optim.Adam(model.dense_parameters(), lr=0.01)


def train(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """Each rank has batches of its own, so that BatchNorm's statistics differ."""
    rng = Random(1000 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(random_bags(rng, ROWS, 5).kjt().to(model.context.device)) - 1.0).square().mean().backward()
        optimizer.step()


def train_alike(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The same batch on every rank, so that the losses do not depend on the number of ranks."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (model(random_bags(Random(step), ROWS, 6).kjt()) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def held(model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> Held:
    """All the numbers of this rank: weights, fused states and counts, dense part, buffers, the optimizer's states."""
    bags = model.module.bags
    found: Held = []
    names: dict[Tensor, tuple[str, Shard | None]] = {}
    for name, table in bags.tables().items():
        for place, weight in table.locals.items():
            names[weight] = (f"{name}.weight", place)
        fused = bags.fused_optimizers().get(name)
        for state in fused.states if fused else ():
            found += [(f"{name}.{state}", place, one.clone()) for place, one in bags.fused_state(name, state).items()]
        if fused and fused.counts_steps and table.locals:
            found.append((f"{name}.count", None, torch.tensor(bags.step_counts()[table.layout.name])))
    tables = set(map(id, names))
    names |= {one: (name, None) for name, one in model.named_parameters() if id(one) not in tables}
    found += [(name, place, one.detach().clone()) for one, (name, place) in names.items()]
    found += [(name, None, one.clone()) for name, one in model.named_buffers()]
    for one, states in optimizer.state.items() if optimizer is not None else ():
        name, place = names[one]
        for key, value in states.items():
            found.append((f"{name}/{key}", place if value.dim() else None, value.clone()))
    return found


def whole(of_ranks: list[Held]) -> dict[str, Tensor]:
    """The tensors put together from all ranks' parts; of what each rank has whole, the first rank's."""
    found: dict[str, Tensor] = {}
    for name, place, part in (entry for one in of_ranks for entry in one):
        if place is None:
            found.setdefault(name, part)
            continue
        rows = ROWS[name[2]]
        value = found.setdefault(name, torch.full((rows, DIM)[: part.dim()], float("nan"), dtype=part.dtype))
        columns = (slice(place.col_start, place.col_end),) if part.dim() == 2 else ()
        value[(slice(place.row_start, place.row_end), *columns)] = part
    return found
