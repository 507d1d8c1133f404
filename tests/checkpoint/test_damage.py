"""A damaged checkpoint is refused on every rank, with the file's name and a remedy, before anything changes."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from shardrec import CheckpointError, load_checkpoint, save_checkpoint
from shardrec.checkpoint.manifest import read_manifest
from tests.checkpoint.damage import DAMAGE
from tests.checkpoint.models import adam, held, make, train
from tests.ranks import ranks


def save_two(folder: Path, incremental: int) -> None:
    model = make("row_wise", "adam")
    optimizer = adam(model)
    train(model, optimizer, 1, seed=1)
    for name in ("first", "good", "other"):
        for table in model.module.bags.tables().values():
            for values in table.locals.values():
                values.detach()[0] += 1
        save_checkpoint(folder / name, model, optimizer, extra={"step": 1}, incremental=incremental)


def load_damaged(folder: Path, seeds: range) -> dict[int, tuple[str, str]]:
    """Damage a copy for each seed, and load it; returns the kinds of damage and the messages."""
    model = make("grid", "adam")
    optimizer = adam(model)
    train(model, optimizer, 1, seed=2)
    before = held(model, optimizer)
    found = {}
    target = folder / "damaged"
    for seed in seeds:
        rng = Random(seed)
        damage = DAMAGE[seed % len(DAMAGE)]
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder / "good", target)
            damage(rng, target)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                load_checkpoint(target, model, optimizer)
            except CheckpointError as error:
                found[seed] = (damage.__name__, str(error))
            else:
                raise AssertionError(f"seed {seed}: {damage.__name__} was loaded")
        after = held(model, optimizer)
        assert [one[:2] for one in after] == [one[:2] for one in before], seed
        assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True)), (seed, damage.__name__)
    dist.barrier()
    # And the model is as good as before.
    assert load_checkpoint(folder / "good", model, optimizer) == {"step": 1}
    return found


def check(folder: Path, seeds: range, incremental: int) -> None:
    ranks(3, save_two, folder, incremental)
    assert bool(read_manifest(folder / "good").linked) == bool(incremental)
    one, other = ranks(2, load_damaged, folder, seeds, timeout=1200)
    assert one == other  # every rank says the same
    assert len(one) == len(seeds)
    remedies = ("load an older checkpoint", "give a folder", "move them elsewhere")
    for seed, (kind, text) in one.items():
        assert str(folder / "damaged") in text, (seed, kind, text)
        assert any(remedy in text for remedy in remedies), (seed, kind, text)
    assert not (folder / "mark").exists(), "code from a checkpoint was run"
    if os.environ.get("SHOW_MESSAGES"):
        for kind, text in one.values():
            print(f"{kind}: {text}")


@pytest.mark.parametrize("incremental", [0, 3])
def test_damage_is_found_before_anything_changes(tmp_path: Path, incremental: int) -> None:
    check(tmp_path, range(len(DAMAGE) * (1 if incremental else 3)), incremental)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("incremental", [0, 3])
def test_a_thousand_damaged_checkpoints(tmp_path: Path, incremental: int) -> None:
    check(tmp_path, range(10_000, 11_000), incremental)


def test_files_beside_a_checkpoint_are_named_and_not_read(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    save_checkpoint(tmp_path / "one", model)
    (tmp_path / "one" / ".metadata").write_bytes(b"a pickle")
    with pytest.warns(UserWarning, match=r"one has files that are not the checkpoint's and are not read: \.metadata"):
        load_checkpoint(tmp_path / "one", model)
