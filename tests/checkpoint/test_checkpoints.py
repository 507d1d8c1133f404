"""A folder of checkpoints: the last good one, a few kept, and saves behind the training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardrec import CheckpointError, Checkpoints, ConfigError
from shardrec.checkpoint.manifest import MANIFEST
from tests.checkpoint.models import adam, make, train_alike
from tests.ranks import ranks


def tensors(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_saves_behind_the_training_are_of_their_own_step(tmp_path: Path) -> None:
    def rank_main() -> None:
        model = make("row_wise", "adam")
        optimizer = adam(model)
        checkpoints = Checkpoints(tmp_path / "run", keep_last=2)
        assert checkpoints.load_last(model, optimizer) is None
        values = {}
        for step in range(4):
            train_alike(model, optimizer, range(step, step + 1))
            values[step] = tensors(model)
            state = {"seed": torch.tensor([step, dist.get_rank()])}
            pending = checkpoints.save(step, model, optimizer, {"step": step}, rank_state=state, wait=False)
        pending.wait()
        assert pending.done
        assert list(checkpoints.paths()) == [2, 3]
        for step in (3, 2):
            train_alike(model, optimizer, range(7, 8))
            loaded = checkpoints.load_last(model, optimizer)
            assert loaded is not None
            assert (loaded.step, loaded.extra) == (step, {"step": step})
            assert loaded.rank_state["seed"].tolist() == [step, dist.get_rank()]
            assert all(map(torch.equal, tensors(model), values[step]))
            dist.barrier()
            if dist.get_rank() == 0:
                (loaded.path / MANIFEST).unlink()
            dist.barrier()
        assert checkpoints.load_last(model, optimizer) is None

    ranks(2, rank_main)


def test_a_damaged_one_is_named_and_skipped(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 10):
        train_alike(model, adam(model), range(1))
        checkpoints.save(step, model)
    for step in (10, 5):
        (file,) = checkpoints.paths()[step].glob("data-*/*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        if step == 10:
            with pytest.warns(UserWarning, match=r"step 10 is skipped: .*rank-00000\.safetensors has .* bytes"):
                loaded = checkpoints.load_last(model)
            assert loaded is not None
            assert loaded.step == 5
    with (
        warnings.catch_warnings(),
        pytest.raises(CheckpointError, match=r"none of the 2 .*\n.*step-.*10.*\n.*step-.*5"),
    ):
        warnings.simplefilter("ignore")
        checkpoints.load_last(model)


def test_a_checkpoint_of_another_model_is_not_skipped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make("row_wise", "adagrad"))
    with pytest.raises(ConfigError, match="another model"):
        checkpoints.load_last(make("row_wise", "adam"))


def test_what_was_never_complete_is_removed(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    (tmp_path / "step-000000000007" / "data-0123456789abcdef").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for step in (4, 6, 6, 5):
        checkpoints.save(step, model)
    # Going back does not remove what lies beyond.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000000000005", "step-000000000006"]
    assert all(len(list(path.iterdir())) == 2 for path in checkpoints.paths().values())


@pytest.mark.parametrize("keep_last", [0, -1])
def test_settings_are_checked(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigError, match=f"keep_last={keep_last}"):
        Checkpoints(tmp_path, keep_last=keep_last)
    with pytest.raises(ConfigError, match="step=-1"):
        Checkpoints(tmp_path).save(-1, make("row_wise", "adagrad"))
