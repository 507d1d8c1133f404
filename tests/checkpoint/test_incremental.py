"""Incremental checkpoints: what they hold is what a full one of the same moment holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardrec import Checkpoints, load_checkpoint, native, save_checkpoint, shard
from shardrec.checkpoint.changes import _MAX_CHANGED, SavedBefore, _words, different_rows, shards_of
from shardrec.checkpoint.load import verify_checkpoint
from shardrec.checkpoint.manifest import read_manifest
from shardrec.checkpoint.parts import HeldTensor, Part, Rect
from shardrec.errors import CheckpointError, ConfigError
from shardrec.ids import DynamicIds
from shardrec.layout import Topology
from shardrec.trainer.cli.inspecting import describe
from tests.batches import random_bags
from tests.checkpoint.models import CUTS, ROWS, adam, held, make
from tests.checkpoint.whole import contents
from tests.ids.oracle import DIM, dynamic_step, model_of, raw_batches
from tests.plans import cut_plan
from tests.ranks import ranks

IDS = {"users": 96, "goods": 160, "plain": 40}
SAVES = 6


def weights(model: Any) -> list[Tensor]:
    """This rank's shards."""
    tables = [table for one in model._sharded for table in one.tables().values()]
    return [values.detach() for table in tables for values in table.locals.values()]


def states(model: Any) -> list[Tensor]:
    """Those of the fused optimizers of its shards."""
    return [
        values
        for one in model._sharded
        for name, fused in one.fused_optimizers().items()
        for state in fused.states
        for values in one.fused_state(name, state).values()
    ]


def plain_model(cut: str) -> tuple[Any, torch.optim.Optimizer, Callable[[Random], None]]:
    model = make(cut, "adam")
    optimizer = adam(model)

    def step(rng: Random) -> None:
        optimizer.zero_grad()
        (model(random_bags(rng, ROWS, 2).kjt()) - 1.0).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def dynamic_model(cut: str) -> tuple[Any, None, Callable[[Random], None]]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sizes = {f"sparse.{name}": (rows, DIM) for name, rows in IDS.items()}
    plan = cut_plan(cut, Random(1), sizes, Topology(ranks_per_host=world_size))
    options = {"users": DynamicIds(evict="lru", fallback_rows=1), "goods": DynamicIds(admit_after=2)}
    model = shard(model_of(True, "rowwise_adagrad", IDS), plan, dynamic_ids=options)

    def step(rng: Random) -> None:
        (of_step,) = raw_batches(rng, 1, world_size, ids=200)
        dynamic_step(model, of_step[rank], rng.randrange(1000))

    return model, None, step


def built(kind: str, cut: str) -> tuple[Any, Any, Callable[[Random], None]]:
    return plain_model(cut) if kind == "plain" else dynamic_model(cut)


def save_both(folder: Path, kind: str, cut: str, seed: int) -> None:
    """Steps, edits and saves by chance, alike on all ranks; each save once as the next of a chain and once full."""
    rng = Random(seed)
    model, optimizer, step = built(kind, cut)
    for number in range(SAVES):
        for _ in range(rng.randrange(3)):
            own, what = Random(rng.randrange(2**30) + dist.get_rank()), rng.randrange(4)
            if what == 0:
                step(rng)
                continue
            for values in weights(model) if what < 3 else states(model):  # behind everyone's back
                row = own.randrange(len(values))
                if what == 1:
                    values[row, 0] = own.choice([0.0, -0.0, 1.5])
                else:
                    values[row] += 0.5
        if number == SAVES - 1:
            for values in weights(model)[:1]:
                values[0] = float("nan")
        wait = rng.random() < 0.5
        path = folder / (f"chain{number}" if rng.random() < 0.8 else "chain")
        save_checkpoint(path, model, optimizer, incremental=3, wait=wait).wait()
        if path.name == "chain" and dist.get_rank() == 0:  # that is replaced
            shutil.copytree(path, folder / f"chain{number}")
        save_checkpoint(folder / f"full{number}", model, optimizer)


def reload_both(folder: Path, kind: str, cut: str, number: int) -> None:
    """From the chain, and from the full one, and on to another checkpoint."""
    for name in ("chain", "full"):
        model, optimizer, step = built(kind, cut)
        step(Random(5))
        load_checkpoint(folder / f"{name}{number}", model, optimizer)
        save_checkpoint(folder / f"again {name}", model, optimizer)


def same(one: Path, other: Path) -> bool:
    mine, theirs = contents(one), contents(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


CASES = [("plain", 0, 1, 2), ("plain", 1, 2, 1), ("dynamic", 2, 1, 2), ("dynamic", 3, 2, 1)]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "seed", "saved", "loaded"),
    [
        *CASES,
        *(
            pytest.param(kind, seed + 10 * more, saved, loaded, marks=pytest.mark.slow)
            for more in range(1, 6)
            for kind, seed, saved, loaded in CASES
        ),
    ],
)
def test_a_chain_holds_what_a_full_save_holds(tmp_path: Path, kind: str, seed: int, saved: int, loaded: int) -> None:
    if kind == "dynamic" and not native.has_operators():
        pytest.skip("the C++ operators were not compiled")
    cuts = [cut for cut in CUTS if kind == "plain" or cut in ("table_wise", "row_wise", "column_wise")]
    rng = Random(seed)
    ranks(saved, save_both, tmp_path, kind, rng.choice(cuts), seed)
    for number in range(SAVES):
        assert same(tmp_path / f"chain{number}", tmp_path / f"full{number}"), number
    assert any(read_manifest(tmp_path / f"chain{number}").linked for number in range(SAVES))
    for number in (SAVES - 1, rng.randrange(SAVES)):
        ranks(loaded, reload_both, tmp_path, kind, rng.choice(cuts), number)
        assert same(tmp_path / "again chain", tmp_path / "again full")


def edited(model: Any, row: int) -> None:
    for values in weights(model):
        values[row] += 1


def test_only_changed_rows_are_written_until_there_are_too_many(tmp_path: Path) -> None:
    model = make("table_wise", "adagrad")
    sizes = []
    for number in range(7):
        edited(model, number)
        if number == 3:
            weights(model)[0].add_(1)  # more than half of one table
        save_checkpoint(tmp_path / f"{number}", model, incremental=5)
        manifest = verify_checkpoint(tmp_path / f"{number}")
        found = {
            name: [rows.length for part in one.parts for rows in part.changes] for name, one in manifest.tensors.items()
        }
        sizes.append([found[f"model.bags.embedding_bags.t_{key}.weight"] for key in ROWS])
    # Tables of 13, 9 and 21 rows, of 64 bytes with their states and 8 with their numbers: at most 5, 4 and 9 of them.
    assert _MAX_CHANGED == 0.5
    one = [1]
    assert sizes == [
        [[], [], []],
        [one, one, one],
        [one * 2, one * 2, one * 2],
        [[], one * 3, one * 3],
        [one, one * 4, one * 4],
        [one * 2, [], one * 5],
        [[], [], []],  # the fifth in a row was the last
    ]
    said = describe(tmp_path / "2")
    assert said["is"].startswith("an incremental checkpoint")
    assert said["files of earlier saves"].startswith("2, ")
    assert said["changed rows"].startswith("12 ")
    assert "changed rows" not in describe(tmp_path / "0")


def test_a_chain_outlives_what_it_was_made_from(tmp_path: Path) -> None:
    """``keep_last`` removes what other checkpoints share files with; a file goes with its last name."""
    model = make("row_wise", "adagrad")
    checkpoints = Checkpoints(tmp_path, keep_last=1, incremental=2)
    for step in range(5):
        edited(model, step)
        checkpoints.save(step, model)
        (path,) = checkpoints.paths().values()
        assert len(read_manifest(path).linked) == step % 3
        before = held(model, None)
        edited(model, 3)
        assert checkpoints.load_last(model) is not None
        assert all(torch.equal(a[2], b[2]) for a, b in zip(held(model, None), before, strict=True))
    assert all(path.stat().st_nlink == 1 for path in tmp_path.rglob("*.safetensors"))


def test_a_damaged_file_is_that_of_all_who_share_it(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    checkpoints = Checkpoints(tmp_path, incremental=2)
    for step in range(5):  # all, changes, changes, all, changes
        edited(model, step)
        checkpoints.save(step, model)
    (file,) = checkpoints.paths()[3].glob("data-*/*.safetensors")
    os.truncate(file, 100)
    with pytest.warns(UserWarning, match=r"step [34] is skipped: .*rank-00000.*safetensors has 100 bytes") as said:
        loaded = checkpoints.load_last(model)
    assert loaded is not None
    assert loaded.step == 2
    assert len(said) == 2
    with pytest.raises(CheckpointError, match=r"rank-00000\.0\.safetensors has 100 bytes"):
        verify_checkpoint(checkpoints.paths()[4])
    with pytest.warns(UserWarning, match="has another size than was written; so it cannot be linked"):
        checkpoints.save(5, model)
    assert not read_manifest(checkpoints.paths()[5]).linked


def test_without_links_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted", str(source))

    model = make("row_wise", "adagrad")
    save_checkpoint(tmp_path / "0", model, incremental=3)
    monkeypatch.setattr(os, "link", no_links)
    edited(model, 0)
    with pytest.warns(UserWarning, match="Operation not permitted; so it cannot be linked .*rank 0 writes all"):
        save_checkpoint(tmp_path / "1", model, incremental=3)
    assert not read_manifest(tmp_path / "1").linked
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "1")
    with pytest.warns(UserWarning, match="No such file"):
        save_checkpoint(tmp_path / "2", model, incremental=3)
    load_checkpoint(tmp_path / "2", model)


def test_a_save_that_failed_is_no_base(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    save_checkpoint(tmp_path / "0", model, incremental=3)
    edited(model, 0)
    (tmp_path / "file").touch()
    for wait in (True, False):
        with pytest.raises(CheckpointError, match="file"):
            save_checkpoint(tmp_path / "file", model, incremental=3, wait=wait).wait()
    # Nothing was written then: the last good save still counts.
    save_checkpoint(tmp_path / "1", model, incremental=3)
    assert read_manifest(tmp_path / "1").linked
    assert any(part.changes for one in read_manifest(tmp_path / "1").tensors.values() for part in one.parts)

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    edited(model, 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr("shardrec.checkpoint.save.write_manifest", fails)
        save_checkpoint(tmp_path / "2", model, incremental=3)
    save_checkpoint(tmp_path / "2", model, incremental=3)
    assert not read_manifest(tmp_path / "2").linked


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8]
)
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_each_changed_bit_is_found(dtype: torch.dtype, columns: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(columns)
    words = torch.randint(-128, 128, (40, columns * dtype.itemsize), dtype=torch.int8, generator=generator)
    offset = torch.zeros(40 * columns * dtype.itemsize + dtype.itemsize, dtype=torch.int8)
    offset[dtype.itemsize :] = words.view(-1)
    values = offset[dtype.itemsize :].view(dtype).view(40, columns)  # not aligned to whole words
    assert _words(values).shape[0] == 40
    tensors = {
        "t": HeldTensor(
            shape=(40, columns),
            dtype=dtype,
            parts=(Part(rect=Rect(0, 40, 0, columns), values=values, saved=True),),
            rows_of="t",
        )
    }
    before = SavedBefore()
    ((key, one),) = shards_of(tensors).items()
    assert before._update(key, one) is None
    rng = Random(columns)
    raw = values.view(torch.uint8)
    for _ in range(20):
        rows, copy = sorted(rng.sample(range(40), 3)), values.clone()
        for row in rows:
            raw[row, rng.randrange(raw.size(1))] ^= 1 << rng.randrange(8)
        found = before._update(key, one)
        assert found is not None
        assert found.tolist() == different_rows(values, copy).tolist() == rows
    found = before._update(key, one)
    assert found is not None
    assert found.numel() == 0


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="incremental=-1"):
        Checkpoints(tmp_path, incremental=-1)
    with pytest.raises(ConfigError, match="incremental=-1"):
        save_checkpoint(tmp_path, make("row_wise", "adagrad"), incremental=-1)
