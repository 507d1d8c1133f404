"""Programs that run without shardrec find the ids that were learned."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor

import shardrec
from shardrec import native, shard
from shardrec.errors import ConfigError
from shardrec.ids import DynamicIds
from shardrec.layout import Topology
from shardrec.portable.frozen_ids import FrozenMaps
from shardrec.serve import load_package, package, quantize
from tests.ids.oracle import DIM, ROWS, Batches, dynamic_step, kjt, model_of, raw_batches
from tests.plans import cut_plan, randoms
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")

SIZES = {f"sparse.{name}": (rows, DIM) for name, rows in ROWS.items()}


def trained(cut: str, world_size: int, pooled: bool, seed: int = 0) -> Any:
    rng = Random(seed)
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    options = {"users": DynamicIds(), "goods": DynamicIds(fallback_rows=2)}
    plan = cut_plan(cut, rng, SIZES, Topology(ranks_per_host=world_size))
    model = shard(model_of(pooled, "sgd"), plan, dynamic_ids=options, dedup=False)
    for step, of_step in enumerate(raw_batches(rng, 6, world_size)):
        dynamic_step(model, of_step[rank], step)
    return model.eval()


def batch(seed: int) -> Any:
    (of_step,) = raw_batches(Random(seed), 1, 1)
    return kjt(of_step[0])


@pytest.mark.some(1)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("cut", "world_size"),
    [("table_wise", 1), ("row_wise", 2), pytest.param("column_wise", 2, marks=pytest.mark.slow)],
)
def test_a_saved_program_serves_raw_ids(cut: str, world_size: int, pooled: bool) -> None:
    def run() -> None:
        model = trained(cut, world_size, pooled)
        loaded = shardrec.script(model)
        if not dist.is_initialized() or dist.get_rank() == 0:  # to load a program takes torch seconds
            saved = io.BytesIO()
            torch.jit.save(loaded, saved)
            saved.seek(0)
            loaded = torch.jit.load(saved)
        for seed in range(4):
            with torch.no_grad():
                torch.testing.assert_close(loaded(batch(seed)), model(batch(seed)), rtol=1e-6, atol=1e-6)

    if world_size == 1:
        run()
    else:
        ranks(world_size, run)


@pytest.mark.parametrize("pooled", [True, False])
def test_ids_without_a_row_beside_values_that_are_not_finite(pooled: bool) -> None:
    """Such weights do not count. A row 0 that is not finite does, in sums: a graph cannot leave ids out."""
    model = trained("table_wise", 1, pooled)
    program, batches = shardrec.script(model), {"f": [[]], "g": [[]], "h": [[]], "p": [[]]}
    for value in (1.0, torch.inf):
        with torch.no_grad():
            for weight in model.parameters():
                weight[0] = value
            features = kjt({**batches, "f": [[-77777]]})
            found, expected = program(features), model(features)
        assert bool(expected.isfinite().all())
        assert bool(found.isfinite().all()) == (value == 1.0 or not pooled)


@pytest.mark.slow
def test_a_package_serves_raw_ids(tmp_path: Path) -> None:
    model = trained("table_wise", 1, True)
    loaded = load_package(package(quantize(model, "fp32"), tmp_path / "ids.pt2", (batch(0),)))
    for seed in range(4):
        given = batch(seed)
        tensors = {"values": given.values(), "lengths": given.lengths()}
        found = loaded(*(tensors[one.name] for one in loaded.tensors))
        torch.testing.assert_close(found, model(given).detach(), rtol=1e-6, atol=1e-6, check_stride=False)


def test_a_quantized_model_has_maps_of_its_own() -> None:
    model = trained("table_wise", 1, True)
    served = quantize(model, "fp32")
    expected = [model(batch(seed)) for seed in range(4)]
    model.train()
    for step, of_step in enumerate(raw_batches(Random(77), 5, 1)):
        dynamic_step(model, of_step[0], step)
    for seed, values in enumerate(expected):
        torch.testing.assert_close(served(batch(seed)), values.detach())


@given(rng=randoms())
def test_as_the_live_maps(rng: Random) -> None:
    model = trained("table_wise", 1, True, seed=rng.randrange(3))
    maps = model._sharded[0].id_maps
    assert maps is not None
    frozen = FrozenMaps(maps, torch.device("cpu"))
    for one, slots in maps.runs():
        if one is None:
            continue
        known = one.records[one.records[:, 1] > 0, 0].tolist()
        ids = torch.tensor([*rng.sample(known, min(3, len(known))), rng.getrandbits(63), -rng.getrandbits(63)])
        before = sum(count for other, count in maps.runs()[: [each for each, _ in maps.runs()].index(one)])
        lengths = torch.zeros((sum(count for _, count in maps.runs()), 1), dtype=torch.int64)
        lengths[before + rng.randrange(slots)] = ids.numel()
        rows, kept = frozen(lengths, ids)
        expected = torch.empty(ids.numel(), dtype=torch.int32)
        one.look_up(ids, expected, step=99, assign_new_ids=False)
        assert torch.equal(kept == 0, expected < 0)
        assert rows.tolist() == expected.clamp(min=0).tolist()


def test_maps_are_replaced() -> None:
    """What a program that follows a publisher does."""
    before, after = (trained("row_wise", 1, True, seed=seed)._sharded[0].id_maps for seed in range(2))
    frozen, expected = (FrozenMaps(maps, torch.device("cpu")) for maps in (before, after))
    assert not torch.equal(frozen.keys, expected.keys)
    scripted = torch.jit.script(frozen)
    assert scripted.blocks == list(after.maps)
    scripted.replace(scripted.prepared([id_map.records[:, :2] for id_map in after.maps.values()]))
    for name in ("keys", "owners", "rows", "salts"):
        assert torch.equal(getattr(scripted, name), getattr(expected, name)), name


def test_an_id_that_two_rows_have_is_refused() -> None:
    """It would be looked for without end, by a program that follows a publisher."""
    records = torch.tensor([[3, 1], [5, 1], [3, 1], [7, 0], [7, 0]])
    frozen = FrozenMaps(trained("row_wise", 1, True, seed=0)._sharded[0].id_maps, torch.device("cpu"))
    others = [torch.zeros((0, 2), dtype=torch.int64)] * (frozen.plain - 1)
    for of_map in (frozen, torch.jit.script(frozen)):
        with pytest.raises(Exception, match="two rows of a table have the same id"):
            of_map.prepared([records, *others])


def in_both_modes(run: Any, model: Any, batches: Batches) -> list[Tensor]:
    """Outputs in training and, each third step, in evaluation; then the weights and the records of the maps."""
    found = []
    for step, of_step in enumerate(batches):
        bags = of_step[torch.distributed.get_rank()]
        run.train(step % 3 != 2)
        if run.training:
            found.append(dynamic_step(run, bags, step))
        else:
            with torch.no_grad():
                found.append(run(kjt(bags)))
    (collection,) = model._sharded
    return [*found, *model.parameters(), *(one.records for one in collection.id_maps.maps.values())]


@pytest.mark.some(1)
@pytest.mark.parametrize(("pooled", "dedup"), [(True, False), (False, True), (False, False)])
def test_a_live_program_learns_in_its_own_training_mode(pooled: bool, dedup: bool) -> None:
    """As the eager model does, to the bit, whatever mode that is in."""

    def run() -> None:
        rng = Random(1)
        options = {"users": DynamicIds(evict="lru"), "goods": DynamicIds(admit_after=2, fallback_rows=2)}
        plan = cut_plan("row_wise", rng, SIZES, Topology(ranks_per_host=2))
        eager, model = (shard(model_of(pooled, "adagrad"), plan, dynamic_ids=options, dedup=dedup) for _ in range(2))
        batches = raw_batches(rng, 9, 2)
        expected = in_both_modes(eager, eager, batches)
        scripted = shardrec.script(model.eval(), portable=False)
        assert not scripted.training
        torch.testing.assert_close(in_both_modes(scripted, model, batches), expected, rtol=0, atol=0)
        assert not model.training
        assert model.id_stats() == eager.id_stats()
        assert eager.id_stats()["sparse.users"]["evictions"]

    ranks(2, run)


def test_what_a_program_cannot_do() -> None:
    plan = cut_plan("table_wise", Random(0), SIZES, Topology())
    distinct = shard(model_of(False, "sgd"), plan, dynamic_ids={"goods": DynamicIds()}).eval()
    with pytest.raises(ConfigError, match="dedup=False"):
        shardrec.script(distinct)
