"""A damaged checkpoint is refused on every rank, with the file's name and a remedy, before anything changes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from shardrec import CheckpointError, ConfigError, load_checkpoint, save_checkpoint
from shardrec.checkpoint.data_files import SavedFile
from shardrec.checkpoint.load import verify_checkpoint
from shardrec.checkpoint.manifest import SavedPart, SavedTensor, read_manifest
from shardrec.checkpoint.parts import Rect
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
        assert any(remedy in text.lower() for remedy in remedies), (seed, kind, text)
    assert not (folder / "mark").exists(), "code from a checkpoint was run"
    if os.environ.get("SHOW_MESSAGES"):
        for kind, text in one.values():
            print(f"{kind}: {text}")


@pytest.mark.some(1)
@pytest.mark.parametrize("incremental", [0, 3])
def test_damage_is_found_before_anything_changes(tmp_path: Path, incremental: int) -> None:
    check(tmp_path, range(len(DAMAGE) * (1 if incremental else 3)), incremental)


FORGED = {
    "step_counts": ["x", None, math.nan, -1, 1e30, 1.0, True],
    "numbers": ["x", None, {}],
    "fused_settings": ["x", None, 3, {"lr": "x"}, {"lr": None}, {"lr": math.nan}, {"lr": 10**400}, {"tables": []}],
    "settings": ["x", None, 3, {"lr": "x"}, {"lr": math.inf}, {"betas": [0.9]}, {"betas": [0.9, "x"]}, {"params": []}],
    "dtype": ["I32"],
    "state": [[3, 3, 3], [9]],
}
"""Values that a signed manifest cannot have, by what has them."""


def forge(path: Path, where: str, value: object) -> None:
    body, _, _ = path.read_bytes().rpartition(b',\n"sha256": ')
    values = json.loads(body + b"}")
    match where:
        case "step_counts" | "fused_settings":
            values[where] = dict.fromkeys(values[where], value)
        case "numbers":
            values["numbers"]["optimizer.top.bias.step"] = value
        case "settings":
            values["param_groups"][0]["settings"] = value
        case "dtype":
            values["tensors"]["optimizer.norm.weight.exp_avg"]["dtype"] = value
        case "state":
            name = "optimizer.bags.embedding_bags.t_a.weight.exp_avg"
            values["tensors"][name] = values["tensors"].pop("rank0.state") | {"shape": value}
    body = json.dumps(values).encode().removesuffix(b"}")
    path.write_bytes(body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode())


@pytest.mark.parametrize("where", FORGED)
def test_values_that_a_signed_manifest_cannot_have(tmp_path: Path, where: str) -> None:
    """They are found before the first table is written; that model and optimizer are not fresh shows it."""
    fused = "none" if where in ("state", "settings") else "adam"
    model = make("row_wise", fused)
    optimizer = adam(model)
    train(model, optimizer, 1, seed=1)
    for number, value in enumerate(FORGED[where]):
        size = math.prod(value) if where == "state" else 1
        save_checkpoint(tmp_path / str(number), model, optimizer, rank_state={"state": torch.ones(size)})
    train(model, optimizer, 1, seed=2)
    before = held(model, optimizer)
    for number, value in enumerate(FORGED[where]):
        forge(tmp_path / str(number) / "manifest.json", where, value)
        with pytest.raises(
            (CheckpointError, ConfigError), match=r"[Ll]oad an older checkpoint|[Bb]uild the optimizers"
        ):
            load_checkpoint(tmp_path / str(number), model, optimizer)
        after = held(model, optimizer)
        assert [name for name, *_ in after] == [name for name, *_ in before]
        for (name, _, now), (_, _, then) in zip(after, before, strict=True):
            assert torch.equal(now, then), (name, value)


def test_a_type_that_the_file_does_not_have_is_found_without_a_model(tmp_path: Path) -> None:
    model = make("row_wise", "adam")
    optimizer = adam(model)
    train(model, optimizer, 1, seed=1)
    save_checkpoint(tmp_path, model, optimizer)
    forge(tmp_path / "manifest.json", "dtype", "I32")
    with pytest.raises(CheckpointError, match=r"has F32 at bytes [\d,]+ to [\d,]+, and the manifest says I32"):
        verify_checkpoint(tmp_path)


def test_parts_that_are_there_many_times_are_refused_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is looked at a few times only; comparing them with each other took half a minute."""
    file = SavedFile(name="f", size=1000, header=8, checksums=(0,))
    calls = 0
    extents = SavedPart.extents

    def counted(part: SavedPart, itemsize: int) -> object:
        nonlocal calls
        calls += 1
        return extents(part, itemsize)

    monkeypatch.setattr(SavedPart, "extents", counted)
    for shape in ((1, 2000), (2000, 1)):
        part = SavedPart(rect=Rect(0, 1, 0, 1), file=0, start=8)
        whole = SavedTensor(dtype="F32", shape=shape, parts=(part,) * 2000)
        faults = list(whole.faults("t", [file]))
        assert len(faults) <= 2, faults[:5]
        assert "rows 0:1 are there twice" in faults[-1]
    assert calls == 4000


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
