"""A load gives rows to other ids: what backwards have left, or are to bring, for the ids that lose them is dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec import DynamicIds, load_checkpoint, native, save_checkpoint
from shardrec.checkpoint import export_ids, import_ids
from shardrec.errors import ConfigError
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.ids.maps import IdMaps
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")

ROWS, DIM = 6, 4


class Pooled(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["a"])
        config.init_fn = partial(nn.init.constant_, val=0.25)
        self.bags = EmbeddingBagCollection(tables=[config])

    def forward(self, features: KeyedJaggedTensor, scale: Tensor | None = None) -> Tensor:
        pooled: Tensor = self.bags(features).values()
        return pooled if scale is None else pooled * scale


def sharded(*, fused: bool = True, update: Any = "step") -> Any:
    model = Pooled()
    if fused:
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    return shardrec.shard(model, dynamic_ids={"bags.t": DynamicIds(evict="never")}, update=update)


def features(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def values_of(model: Any, *ids: int) -> list[float]:
    model.eval()
    found: list[float] = model(features(*ids))[:, 0].tolist()
    model.train()
    return found


def has_ids(folder: Path, *ids: int) -> Path:
    """A checkpoint with these ids, at their first values."""
    model = sharded()
    model(features(*ids))
    save_checkpoint(folder / "checkpoint", model)
    export_ids(model, folder / "ids")
    return folder


def step(model: Any, *, fused: bool) -> None:
    (model.fused_optimizer if fused else torch.optim.SGD(model.dense_parameters(), lr=1.0)).step()


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_no_step_has_applied(tmp_path: Path, fused: bool) -> None:
    update = "step" if fused else "backward"
    saved = sharded(fused=fused, update=update)
    saved(features(1, 12, 13))
    save_checkpoint(tmp_path, saved)
    model = sharded(fused=fused, update=update)
    model(features(1, 2, 3)).sum().backward()
    load_checkpoint(tmp_path, model)
    step(model, fused=fused)
    assert values_of(model, 1, 12, 13) == [-0.75, 0.25, 0.25], "id 1 has the row that it had"


def test_ids_of_files(tmp_path: Path) -> None:
    model = sharded()
    model(features(1, 2, 3)).sum().backward()
    import_ids(model, has_ids(tmp_path, 11, 12, 13) / "ids")
    step(model, fused=True)
    assert values_of(model, 11, 12, 13) == [0.25] * 3


@pytest.mark.parametrize("load", [load_checkpoint, import_ids])
def test_a_backward_of_a_step_before(tmp_path: Path, load: Callable[[Any, Any], Any]) -> None:
    folder = has_ids(tmp_path, 11, 12, 13)
    model = sharded(update="backward")
    loss = model(features(1, 2, 3)).sum()
    again = checkpoint(model, features(4, 5), torch.ones((), requires_grad=True), use_reentrant=True)
    if load is import_ids:
        load(model, folder / "ids")
    else:
        load(folder / "checkpoint", model)
    with pytest.raises(ConfigError, match=r"of tables 'bags.t', or follows a load, and ids of the step have lost"):
        loss.backward()
    again.sum().backward()
    assert values_of(model, 11, 12, 13) == [0.25] * 3


def test_averages_of_fallback_rows_begin_again_in_other_blocks() -> None:
    """Each block's rows were changed in steps of their own, so that a mean of averages would be none."""

    def rank_main() -> None:
        module = Pooled(rows=12)
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
        plans = [
            ShardingPlan(topology=Topology(ranks_per_host=2), tables=(layout,))
            for layout in (cuts.row_wise("bags.t", 12, DIM, ranks=[0, 1]), cuts.table_wise("bags.t", 12, DIM, rank=0))
        ]
        options = DynamicIds(evict="never", fallback_rows=1, admit_after=99)
        model = shardrec.shard(module, plans[0], dynamic_ids={"bags.t": options}, update="step")
        (collection,) = model.sharded_collections
        collection.keep_averages(0.5)
        for ids in ([1, 2, 3, 4], [1], [1]):
            model(features(*ids)).sum().backward()
            model.fused_optimizer.step()
        model.reshard(plans[1])
        for rows in collection.keep_averages(0.5):
            for weight, average in rows.averages():
                assert torch.equal(weight[0], average[0])

    ranks(2, rank_main)


def test_plain_ids_beside_dynamic_ones_have_64_bits() -> None:
    large = 2**31 + 10
    layouts = [cuts.table_wise("d", 8, 1, rank=0), cuts.table_wise("p", large, 1, rank=0)]
    slots = [
        Slot(lookup=number, shard=layout.shards[0], unit=number, block=0, group=0)
        for number, layout in enumerate(layouts)
    ]
    maps = IdMaps(slots, {"d": DynamicIds()}, {"d": layouts[0]}, lambda *_: None, torch.device("cpu"))
    for ids, learns, rows in (
        ([7, 9, large - 1, 3], True, [0, 1, large - 1, 3]),
        ([7, 99, large - 1, 3], False, [0, large - 1, 3]),
    ):
        mapped = maps(
            ShardInput(
                lengths=torch.ones((2, 2), dtype=torch.int32),
                ids=torch.tensor(ids),
                weights=None,
                batch_sizes=(2,),
                group_ids=(4,),
                counts=((4,),),
                slot_sizes=(None,),
            ),
            learns,
        )
        assert mapped.shard_input.ids.tolist() == rows
