"""``torch.distributed.checkpoint`` of fused optimizers: under other plans, and TorchRec's own beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed import sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecModel
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 13, 16
OPTIMIZERS: dict[str, Any] = {
    "Adagrad": torch.optim.Adagrad,
    "RowWiseAdagrad": torchrec.optim.RowWiseAdagrad,
    "Adam": torch.optim.Adam,
    "PartialRowWiseAdam": torchrec.optim.PartialRowWiseAdam,
}


def mixed(name: str, first: int) -> TableLayout:
    """Column stripes that are cut into rows at different places; both ranks have parts of each."""
    rectangles = [(0, 5, 0, 8, 0), (5, 13, 0, 8, 1), (0, 7, 8, 12, 1), (7, 13, 8, 12, 0), (0, 13, 12, 16, 0)]
    shards = tuple(
        Shard(table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank ^ first)
        for top, bottom, left, right, rank in rectangles
    )
    return TableLayout(name=name, num_embeddings=ROWS, embedding_dim=DIM, shards=shards)


CUTS: dict[str, Callable[[str, int], TableLayout]] = {
    "table_wise": lambda name, first: cuts.table_wise(name, ROWS, DIM, rank=first),
    "row_wise": lambda name, first: cuts.row_wise(name, ROWS, DIM, ranks=(first, 1 - first)),
    "column_wise": lambda name, first: cuts.column_wise(name, ROWS, DIM, ranks=(first, 1 - first)),
    "four columns": lambda name, first: cuts.column_wise(name, ROWS, DIM, ranks=(first, 1 - first) * 2),
    "mixed": mixed,
    "data_parallel": lambda name, _: cuts.data_parallel(name, ROWS, DIM),
}


def unsharded(optimizer: str) -> nn.Module:
    def init(weight: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view_as(weight) / 100)

    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"], init_fn=init)
        for name in "ab"
    ]
    model = nn.ModuleDict({"m": EmbeddingBagCollection(tables=tables)})
    settings = {"lr": 0.1, "eps": 1e-8} | ({"betas": (0.9, 0.99)} if "Adam" in optimizer else {})
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], model.parameters(), settings)
    return model


PLACES: dict[str, list[dict[str, Any]]] = {
    "table_wise": [{"rank": 0}, {"rank": 1}],
    "row_wise": [{}, {}],
    "column_wise": [{"ranks": [0, 1]}, {"ranks": [1, 0]}],
}
"""Arguments of TorchRec's sharding types."""


def ours(optimizer: str, cut: str) -> Any:
    layouts = tuple(CUTS[cut](name, first) for first, name in enumerate(("m.a", "m.b")))
    return shardrec.shard(unsharded(optimizer), ShardingPlan(topology=Topology(ranks_per_host=2), tables=layouts))


def theirs(optimizer: str, cut: str) -> Any:
    model = unsharded(optimizer)
    per_table = {name: getattr(sharding_plan, cut)(**options) for name, options in zip("ab", PLACES[cut], strict=True)}
    plan = sharding_plan.construct_module_sharding_plan(
        model["m"], per_table, EmbeddingBagCollectionSharder(), local_size=2, world_size=2, device_type="cpu"
    )
    return TorchRecModel(model, device=torch.device("cpu"), plan=TorchRecPlan(plan={"m": plan}))


def train(model: Any, steps: range) -> Tensor:
    """Each row in each step, with gradients that differ by column; returns what the tables' lookups give then."""
    features = KeyedJaggedTensor(["f"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))
    for step in steps:
        values = model.module["m"](features).values()
        (values * torch.sin(torch.arange(values.numel()).view_as(values) * (step + 1.0))).sum().backward()
    with torch.no_grad():
        found: Tensor = model.module["m"](features).values()
    return found.detach().clone()


def save(model: Any, optimizer: KeyedOptimizer, folder: Path) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load(model: Any, optimizer: KeyedOptimizer, folder: Path) -> None:
    target = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(target, checkpoint_id=folder)
    model.load_state_dict(target["model"])
    optimizer.load_state_dict(target["optimizer"])


def whole(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved optimizer, each in one piece."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.zeros(value.size)
        for key, value in saved.items()
        if key.startswith("optimizer.") and hasattr(value, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def plans_after(old: str) -> list[str]:
    """Two plans to go on under: of all of them each comes twice, for what is saved is the same under each."""
    names = [*CUTS]
    place = names.index(old)
    return [names[(place + step) % len(names)] for step in (0, 2)]


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_go_on_under_every_plan(optimizer: str, tmp_path: Path) -> None:
    """Also through TorchRec's wrapper, which copies into the states by itself."""

    def run() -> None:
        saved: dict[str, dict[str, Tensor]] = {}
        for old in CUTS:
            source = ours(optimizer, old)
            train(source, range(3))
            for folder, saver in (
                (tmp_path / old, source.fused_optimizer),
                (tmp_path / f"wrapped {old}", CombinedOptimizer([source.fused_optimizer])),
            ):
                save(source, saver, folder)
            saved[old] = whole(tmp_path / old)
            expected = train(source, range(3, 5))
            for number, new in enumerate(plans_after(old)):
                target = ours(optimizer, new)
                if number:
                    load(target, target.fused_optimizer, tmp_path / old)
                else:
                    load(target, CombinedOptimizer([target.fused_optimizer]), tmp_path / f"wrapped {old}")
                found = train(target, range(3, 5))
                assert torch.allclose(found, expected, atol=1e-6), (old, new)
        for old in CUTS:
            torch.testing.assert_close(saved[old], saved["table_wise"])
        assert all(values.any() for values in saved["table_wise"].values())

    ranks(2, run)


@pytest.mark.parametrize(
    "optimizer",
    # RowWiseAdagrad goes through the same cells, and through the refusal, which Adagrad lacks.
    [pytest.param("Adagrad", marks=pytest.mark.slow), "RowWiseAdagrad"],
)
def test_torchrec_loads_and_saves_the_same(optimizer: str, tmp_path: Path) -> None:
    def run() -> None:
        for old in ("table_wise", "row_wise", "column_wise"):
            source, ours_source = theirs(optimizer, old), ours(optimizer, old)
            for model, folder in ((source, tmp_path / f"theirs {old}"), (ours_source, tmp_path / f"ours {old}")):
                train(model, range(3))
                model.fused_optimizer.save_param_groups(False)
                save(model, model.fused_optimizer, folder)
            apart = optimizer == "RowWiseAdagrad" and old == "column_wise"  # whose sums have another meaning
            if not apart:
                torch.testing.assert_close(whole(tmp_path / f"ours {old}"), whole(tmp_path / f"theirs {old}"))
            expected = train(source, range(3, 5))
            for new in plans_after(old):
                target = ours(optimizer, new)
                target.fused_optimizer.save_param_groups(False)
                if apart:
                    with pytest.raises(CheckpointException, match="Size mismatch"):
                        load(target, target.fused_optimizer, tmp_path / f"theirs {old}")
                    continue
                load(target, target.fused_optimizer, tmp_path / f"theirs {old}")
                torch.testing.assert_close(train(target, range(3, 5)), expected)
            expected = train(ours_source, range(3, 5))
            for new in ("table_wise", "row_wise"):
                target = theirs(optimizer, new)
                load(target, target.fused_optimizer, tmp_path / f"ours {old}")
                torch.testing.assert_close(train(target, range(3, 5)), expected)

    ranks(2, run)


def test_states_share_the_kernels_memory_and_those_of_another_plan_are_refused() -> None:
    def run() -> None:
        for optimizer in OPTIMIZERS:
            for cut in CUTS:
                model = ours(optimizer, cut)
                for states in model.fused_optimizer.state_dict()["state"].values():
                    for name, value in states.items():
                        for part in (
                            [value] if type(value) is Tensor else [shard.tensor for shard in value.local_shards()]
                        ):
                            part.fill_(2.0)
                        assert name.partition(".")[2] in ("momentum1", "exp_avg_sq", "step")
                state = model.fused_optimizer.state_dict()
                model.fused_optimizer.load_state_dict(state)
                (collection,) = model.sharded_collections
                for name, table in collection.tables().items():
                    for state in collection.fused_optimizers()[name].states:
                        for part in collection.fused_state(name, state).values():
                            assert bool((part == 2.0).all()), (optimizer, cut)
                    if "Adam" in optimizer and table.locals:
                        assert collection.step_counts()[table.layout.name] == 2, cut
            other = ours(optimizer, "row_wise")
            with pytest.raises(ConfigError, match=r"or shardrec\.load_checkpoint"):
                other.fused_optimizer.load_state_dict(ours(optimizer, "column_wise").fused_optimizer.state_dict())

    ranks(2, run)
