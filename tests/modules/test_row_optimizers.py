"""Optimizers in backward that torch or fbgemm's CPU build lack, on every cut, beside the unsharded model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import PlanError
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from tests import row_references
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 12, 8
SETTINGS = {"lr": 0.1, "betas": (0.6, 0.8), "weight_decay": 0.25}
OPTIMIZERS: dict[str, tuple[type[Any], type[torch.optim.Optimizer]]] = {
    "AdamW": (torch.optim.AdamW, row_references.AdamW),
    "PartialRowWiseAdam": (torchrec.optim.PartialRowWiseAdam, row_references.PartialRowWiseAdam),
    "LAMB": (torchrec.optim.LAMB, row_references.LAMB),
    "Lion": (row_references.Lion, row_references.Lion),
}


def tables() -> nn.Module:
    torch.manual_seed(3)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{number}"])
            for number in range(4)
        ]
    )


def layout(cut: str, name: str) -> TableLayout:
    everyone = range(dist.get_world_size())
    match cut:
        case "row_wise":
            return cuts.row_wise(name, ROWS, DIM, ranks=everyone)
        case "column_wise":
            return cuts.column_wise(name, ROWS, DIM, ranks=everyone)
        case "table_wise":
            return cuts.table_wise(name, ROWS, DIM, rank=1)
    return cuts.data_parallel(name, ROWS, DIM)


def sharded(optimizer: str, update: str, cut_of: list[str]) -> shardrec.ShardedModel:
    model = tables()
    apply_optimizer_in_backward(OPTIMIZERS[optimizer][0], model.parameters(), dict(SETTINGS))
    layouts = tuple(layout(cut, f"t{number}") for number, cut in enumerate(cut_of))
    plan = ShardingPlan(topology=Topology(ranks_per_host=dist.get_world_size()), tables=layouts)
    return shardrec.shard(model, plan, update=update)  # type: ignore[arg-type]


def features(generator: torch.Generator) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Of this rank, and of all."""
    ids = torch.randint(ROWS, (4, 2 * dist.get_world_size()), generator=generator)
    mine = ids[:, 2 * dist.get_rank() :][:, :2]
    keys = [f"f{number}" for number in range(4)]
    of_rank, of_all = (
        KeyedJaggedTensor(keys, part.reshape(-1), lengths=torch.ones(part.numel(), dtype=torch.int32))
        for part in (mine, ids)
    )
    return of_rank, of_all


def furthest(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of this rank's rows and the unsharded ones."""
    most = 0.0
    for name, whole in reference.state_dict().items():
        value = model.state_dict()[name]
        if not hasattr(value, "local_shards"):
            most = max(most, float((value - whole).abs().max()))
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            most = max(most, float((shard.tensor - whole[row : row + rows, column : column + columns]).abs().max()))
    return most


def train(model: shardrec.ShardedModel, reference: nn.Module | None, seed: int, optimizers: list[Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        of_rank, of_all = features(generator)
        # Random targets, so that no gradient of a row that was looked up is zero.
        target = torch.randn(DIM * 4, generator=generator)
        (model(of_rank).values() - target).square().mean().backward()
        if reference is not None:
            (reference(of_all).values() - target).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def compare(optimizer: str, update: str, cut_of: list[str], folder: str) -> tuple[float, float]:
    """How far the model is from the unsharded one, and one that goes on from its checkpoint, cut otherwise, from it."""
    reference = tables()
    theirs = OPTIMIZERS[optimizer][1](reference.parameters(), **SETTINGS)  # type: ignore[arg-type]
    model = sharded(optimizer, update, cut_of)
    train(model, reference, 1, [theirs, *([model.fused_optimizer] * (update == "step"))])
    first = furthest(model, reference)
    shardrec.save_checkpoint(folder, model)
    other = sharded(optimizer, update, cut_of[::-1])
    shardrec.load_checkpoint(folder, other)
    again = copy.deepcopy(reference)
    ours = OPTIMIZERS[optimizer][1](again.parameters(), **SETTINGS)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    train(other, again, 2, [ours, *([other.fused_optimizer] * (update == "step"))])
    return first, furthest(other, again)


@pytest.mark.some(4)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_cut_makes_the_unsharded_steps_and_goes_on_cut_otherwise(
    optimizer: str, update: str, tmp_path: Path
) -> None:
    cut_of = ["row_wise", "table_wise", "row_wise" if optimizer == "LAMB" else "column_wise", "data_parallel"]
    for first, resumed in ranks(2, compare, optimizer, update, cut_of, str(tmp_path / "saved")):
        assert first < 1e-5
        assert resumed < 1e-5


def refusal() -> str:
    try:
        sharded("LAMB", "backward", ["row_wise", "row_wise", "column_wise", "row_wise"])
    except PlanError as error:
        return str(error)
    return ""


def planned() -> bool:
    model = tables()
    apply_optimizer_in_backward(torchrec.optim.LAMB, model.parameters(), {"lr": 0.1})
    plan = shardrec.plan(model, Topology(ranks_per_host=2), batch_size=1 << 16)
    return all(len(table.stripes()) < 2 for table in plan.tables)


def test_lamb_takes_no_column_stripes() -> None:
    for text in ranks(2, refusal):
        assert "table 't2' is cut into column stripes of 4, 4 columns; LAMB takes the norms of whole rows" in text
    assert planned(), "the planner makes none"
