"""Models that publish on their ranks, models that follow them, and what the ones and the others hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec import Publisher, shard
from shardrec.checkpoint.parts import Rect
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedModel
from shardrec.serve import Follower, ServedModel, quantize
from shardrec.serve.lookup import served_memory
from shardrec.serve.published import version_name, versions_in
from shardrec.serve.row_bytes import HEAD_BYTES
from tests.batches import random_bags
from tests.checkpoint.models import CUTS, ROWS, adam, make
from tests.ids.oracle import DIM, dynamic_step, model_of, raw_batches
from tests.plans import cut_plan

__all__ = ["CUTS", "DYNAMIC_CUTS", "Held", "assert_same", "follower_of", "held", "reveal", "trainer", "weights_of"]

IDS = {"users": 96, "goods": 160, "plain": 40}
DYNAMIC_CUTS = ("table_wise", "row_wise", "column_wise")

Held = dict[str, list[tuple[Rect | None, Tensor]]]
"""By name, parts: the rectangle of columns (None: all of the tensor) and bytes of rows, ids or dense values."""


def dynamic(optimizer: str, plan: Any) -> ShardedModel:
    options = {"users": DynamicIds(evict="lru", fallback_rows=1), "goods": DynamicIds(admit_after=2)}
    return shard(model_of(True, optimizer, IDS), plan, dynamic_ids=options)


def dynamic_plan(cut: str, world_size: int) -> ShardingPlan:
    sizes = {f"sparse.{name}": (rows, DIM) for name, rows in IDS.items()}
    return cut_plan(cut, Random(1), sizes, Topology(ranks_per_host=world_size))


def trainer(kind: str, cut: str, optimizer: str, device: str = "cpu") -> tuple[ShardedModel, Callable[[Random], None]]:
    """A model on all ranks, and a step of it."""
    if kind == "dynamic":
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        model = dynamic(optimizer, dynamic_plan(cut, world_size))

        def dynamic_steps(rng: Random) -> None:
            (of_step,) = raw_batches(rng, 1, world_size, ids=200)
            dynamic_step(model, of_step[dist.get_rank() if dist.is_initialized() else 0], rng.randrange(1000))

        return model, dynamic_steps
    model = make(cut, optimizer, device=device)
    ordinary = adam(model)

    def step(rng: Random) -> None:
        ordinary.zero_grad()
        (model(random_bags(rng, ROWS, 2).kjt().to(torch.device(device))) - 1.0).square().mean().backward()
        ordinary.step()

    return model, step


def weights_of(model: ShardedModel) -> list[Tensor]:
    """This rank's shards."""
    tables = [table for child in model.sharded_collections for table in child.tables().values()]
    return [values.detach() for table in tables for values in table.locals.values()]


def held(served: ServedModel, source: ShardedModel | None = None) -> Held:
    """What a served model holds on this rank; the ids and the dense part of ``source``, if that was trained."""
    found: Held = {}
    for child in served.sharded_collections:
        for key, rows in served_memory(child).items():
            name = key if isinstance(key, str) else key.table
            found.setdefault(name, []).append((None if isinstance(key, str) else Rect.of(key), rows.clone()))
    model = source or served
    for child in model.sharded_collections:
        for table in child.id_maps.options if child.id_maps is not None else ():
            for (place, *_), id_map in child.id_maps.blocks(table):
                records = torch.stack([id_map.records[:, 0], id_map.records[:, 1].clamp(max=1)], dim=1)
                if not place.col_start:
                    found.setdefault(f"ids of {table}", []).append(
                        (Rect(place.row_start, place.row_end, 0, 2), records)
                    )
    dense = {name: value for name, value in model.module.named_parameters() if "embedding" not in name}
    for name, value in (dense | dict(model.module.named_buffers())).items():
        if "embedding" not in name and "weights" not in name.split(".")[-1]:
            found[name] = [(None, value.detach().clone())]
    return found


def assert_same(served: ServedModel, of_ranks: list[Held]) -> None:
    """A served model on one rank holds what the ranks together hold; of what each of them has, what the first has."""
    own, theirs = whole(served, [held(served)]), whole(served, of_ranks)
    assert own.keys() == theirs.keys()
    for name, values in own.items():
        assert torch.equal(values, theirs[name]), name


def whole(served: ServedModel, of_ranks: list[Held]) -> dict[str, Tensor]:
    """The tensors put together, each value of which was there; each column stripe has the row's scale and bias."""
    tensors: dict[str, Tensor] = {}
    for name in set().union(*of_ranks):
        parts = [part for one in of_ranks for part in one.get(name, [])]
        if parts[0][0] is None:
            tensors[name] = parts[0][1]
            continue
        form = served.formats.get(name)
        head = HEAD_BYTES if form is not None and form.is_quantized else 0
        bits = 64 if form is None else form.bits
        rows, columns = max(place.row_end for place, _ in parts), max(place.col_end for place, _ in parts)
        values = torch.zeros((rows, head + columns * bits // 8), dtype=torch.uint8)
        seen = torch.zeros_like(values)
        for place, part in parts:
            target = values[place.row_start : place.row_end]
            as_bytes = part.contiguous().view(torch.uint8)
            if seen[place.row_start : place.row_end, :head].all():
                assert torch.equal(target[:, :head], as_bytes[:, :head]), name
            here = slice(head + place.col_start * bits // 8, head + place.col_end * bits // 8)
            target[:, :head], target[:, here] = as_bytes[:, :head], as_bytes[:, head:]
            seen[place.row_start : place.row_end, :head] = 1
            seen[place.row_start : place.row_end, here] = 1
        assert seen.all(), name
        tensors[name] = values
    return tensors


def follower_of(kind: str, weights: str, folder: Path, cut: str, size: int) -> tuple[ServedModel, Follower]:
    """A served model on one rank, and its follower, which looks only when it is told to."""
    model = dynamic("sgd", dynamic_plan(cut, size).on_one_rank()) if kind == "dynamic" else make("table_wise", "sgd")
    served = quantize(model, weights)
    return served, Follower(served, served.formats, folder, interval=1.0)


def reveal(source: Path, version: int, target: Path) -> None:
    """Make a version visible in another folder."""
    target.mkdir(exist_ok=True)
    for path in source.glob("data-*"):
        if not (target / path.name).exists():
            (target / path.name).symlink_to(path)
    shutil.copy(source / version_name(version), target / "partial")
    (target / "partial").rename(target / version_name(version))


def publish_some(folder: Path, kind: str, cut: str, weights: str, optimizer: str, seed: int) -> list[tuple[int, Held]]:
    """Steps and edits by chance, alike on all ranks, and versions; returns what quantize gives at each."""
    rng = Random(seed)
    model, step = trainer(kind, cut, optimizer)
    publisher = Publisher(model, folder, weights, keep_bases=9, most_deltas=rng.choice([2, 100]))
    versions = []
    for number in range(7):
        for _ in range(rng.randrange(3)):
            own, what = (
                Random(rng.randrange(2**30) + (dist.get_rank() if dist.is_initialized() else 0)),
                rng.randrange(3),
            )
            if what == 0:
                step(rng)
                continue
            for values in weights_of(model):  # behind everyone's back
                row = own.randrange(len(values))
                if what == 1:
                    values[row, 0] = own.choice([0.0, -0.0, 1.5])
                elif own.random() < 0.5:
                    values[row] += 0.5
        if number == 4:
            model.eval()
        pending = publisher.publish(full=number == 5, wait=rng.random() < 0.5, extra={"number": number})
        if rng.random() < 0.5:
            step(rng) if model.training else None
            pending.wait()
            continue
        expected = held(quantize(model, weights), model)
        pending.wait()
        versions.append((publisher.version, expected))
    assert len(versions_in([path.name for path in folder.iterdir()])) == publisher.version
    return versions
