"""Whole models train by each executor as the unsharded model on the batches of all ranks: outputs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from shardrec.layout import Topology
from shardrec.layout.discover import table_shapes
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection
from tests.batches import random_bags
from tests.executors import EXECUTORS, TRAINING, executed
from tests.models import collection
from tests.modules.tables import local_part
from tests.parity.cases import WORLDS, some_of
from tests.plans import random_plan
from tests.ranks import ranks
from tests.scripting.scorers import Three, Towers

DIM = 8
ROWS = {"a": 11, "b": 7, "c": 30, "d": 5}
STEPS = 5


def bags(features: str) -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS[key], feature_names=[key])
        for key in features
    ]
    return collection(configs, optimizers="adagrad", seed=3)


def dlrm(*, dcn: bool = False) -> nn.Module:
    parts = {
        "embedding_bag_collection": bags("abcd"),
        "dense_in_features": 3,
        "dense_arch_layer_sizes": [6, DIM],
        "over_arch_layer_sizes": [5, 1],
    }
    torch.manual_seed(1)
    return DLRM_DCN(**parts, dcn_num_layers=2, dcn_low_rank_dim=4) if dcn else DLRM(**parts)


def three() -> nn.Module:
    """Two collections of bags and one of rows; the last's tables are the ordinary optimizer's."""
    tables = [
        EmbeddingConfig(name=f"s_{key}", embedding_dim=2 * DIM, num_embeddings=ROWS[key], feature_names=[key])
        for key in "ac"
    ]
    return Three(bags("ab"), bags("cd"), EmbeddingCollection(tables=tables), 4 * DIM, 2 * DIM)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "dlrm": dlrm,
    "dcn": lambda: dlrm(dcn=True),
    "towers": lambda: Towers(bags("ab"), bags("cd"), DIM),
    "three collections": three,
}


def compare(model: ShardedModel, reference: nn.Module, where: str) -> None:
    """This rank's parameters beside the unsharded ones."""
    unsharded = dict(reference.named_parameters())
    for path, module in model.module.named_modules():
        if isinstance(module, ShardedCollection):
            for name, table in module.tables().items():
                (key,) = [key for key in unsharded if key.startswith(path) and f".{name}." in key]
                whole = unsharded.pop(key)
                for place, part in table.locals.items():
                    assert torch.allclose(part, local_part(whole, place), atol=1e-5), f"{where}: {key} {place}"
    for key, expected in unsharded.items():
        parameter = model.get_parameter(f"module.{key}")
        assert torch.allclose(parameter, expected, atol=1e-5), f"{where}: {key}"


def train(name: str, executor: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference, made = MODELS[name](), MODELS[name]()
    made.load_state_dict(reference.state_dict())
    plan = random_plan(Random(4), table_shapes(made), Topology(ranks_per_host=world_size))
    model = shard(made, plan)
    training = executed(model, executor if executor in TRAINING else "eager")
    program = executed(model, executor) if executor not in TRAINING else None
    fused = [one for one in reference.parameters() if hasattr(one, "_in_backward_optimizers")]
    rest = [one for one in reference.parameters() if all(one is not other for other in fused)]
    optimizers = [torch.optim.SGD(model.dense_parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    rng = Random(7)
    for step in range(STEPS):
        where = f"{name}, {executor}, step {step}"
        inputs = [(torch.randn(4, 3), random_bags(rng, ROWS, 4).kjt()) for _ in range(world_size)]
        expected = [reference(*each) for each in inputs]
        if program is not None:
            with torch.no_grad():
                assert torch.allclose(program(*inputs[rank]), expected[rank], atol=1e-5), where
        output = training(*inputs[rank])
        assert torch.allclose(output, expected[rank], atol=1e-5), where
        output.square().mean().backward()
        torch.stack([each.square().mean() for each in expected]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, reference, where)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "executor", "world_size"),
    some_of(
        [list(MODELS), list(EXECUTORS), WORLDS],
        {
            ("dlrm", "eager", 1),
            ("dcn", "live script", 2),
            ("towers", "live script", 2),
            ("three collections", "live script", 2),
            ("three collections", "eager", 4),
            ("three collections", "traced", 2),
            ("towers", "traced", 2),
            ("towers", "portable", 2),
        },
    ),
)
def test_a_model_trains_as_the_unsharded_one(name: str, executor: str, world_size: int) -> None:
    """Also where no dense gradient comes after those of the rows, as in the towers."""
    ranks(world_size, train, name, executor)
