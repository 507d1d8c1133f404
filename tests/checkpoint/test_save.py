"""Checkpoints: saved under one plan, loaded under another, training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardrec import load_checkpoint, save_checkpoint
from shardrec.checkpoint import save
from shardrec.errors import CheckpointError, ConfigError
from shardrec.modules import ShardedModel
from tests.checkpoint.models import ROWS, adam, held, make, train, train_alike
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.ranks import ranks


def save_run(path: Path, kind: str, name: str) -> list[float]:
    model = make(kind, name)
    optimizer = adam(model)
    train_alike(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer, extra={"step": 2})
    return train_alike(model, optimizer, range(2, 5))


def load_run(path: Path, kind: str, name: str) -> list[float]:
    model = make(kind, name)
    optimizer = adam(model)
    train_alike(model, optimizer, range(7, 8))  # so that nothing is left of a fresh start
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    return train_alike(model, optimizer, range(2, 5))


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam", "none"])
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, "row_wise"), (4, "column_wise")), ((2, "column_wise"), (1, "row_wise"))]
)
def test_training_goes_on_under_another_plan(
    tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str], name: str
) -> None:
    path = tmp_path / "ckpt"
    expected = ranks(saved[0], save_run, path, saved[1], name)[0]
    actual = ranks(loaded[0], load_run, path, loaded[1], name)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["adam", "none"])
def test_replicated_tables(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ckpt"
    expected = ranks(2, save_run, path, "mixed", name)[0]
    actual = ranks(2, load_run, path, "mixed", name)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ranks(1, load_run, path, "row_wise", name)[0], expected, rtol=1e-4, atol=1e-5)


def on_the_cpu(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[tuple[str, object], Tensor]:
    """All the numbers of this rank that a checkpoint has: of BatchNorm those of the first rank."""
    buffers = dict(model.named_buffers()) if dist.get_rank() else {}
    return {(name, place): one.cpu() for name, place, one in held(model, optimizer) if name not in buffers}


def save_on_cuda(folder: Path, cut: str, name: str) -> None:
    """In the background, too; loaded on either device, and what the CPU has saved on CUDA."""
    save._PINNED_BYTES = 100  # so that values pass through the block bit by bit
    model = make(cut, name, device="cuda")
    optimizer = adam(model)
    train(model, optimizer, 3, seed=1)
    expected = on_the_cpu(model, optimizer)
    save_checkpoint(folder / "saved", model, optimizer)
    for number in range(2):  # into the memory of the save before
        pending = save_checkpoint(folder / f"saved {number}", model, optimizer, wait=False)
        train(model, optimizer, 2, seed=2 + number)
        pending.wait()
        load_checkpoint(folder / f"saved {number}", model, optimizer)
    for path, device in (("saved", "cpu"), ("saved 0", "cpu"), ("saved 1", "cuda"), ("cpu", "cuda")):
        other = make(cut, name, device=device)
        others_optimizer = adam(other)
        train(other, others_optimizer, 1, seed=4)
        load_checkpoint(folder / path, other, others_optimizer)
        loaded = on_the_cpu(other, others_optimizer)
        assert loaded.keys() == expected.keys()
        wrong = [key for key in loaded if not torch.equal(loaded[key], expected[key])]
        assert not wrong, f"{path} on {device}: {wrong}"
        if device == "cpu":
            save_checkpoint(folder / "cpu", other, others_optimizer)


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("cut", "name"), [("mixed", "adam"), ("grid", "none"), ("row_wise", "rowwise_adagrad")])
def test_on_cuda(cut: str, name: str, world_size: int, tmp_path: Path) -> None:
    cuda_ranks(world_size, save_on_cuda, tmp_path, cut, name)


def test_an_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    for step in range(2):
        save_checkpoint(tmp_path / "ckpt", model, extra={"step": step})
    assert load_checkpoint(tmp_path / "ckpt", model) == {"step": 1}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path, make("row_wise", "adagrad"))


def test_another_model_is_refused_and_keeps_its_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad"))
    bigger = make("row_wise", "adagrad", {**ROWS, "b": 10})
    before = bigger.state_dict()["bags.embedding_bags.t_b.weight"].clone()
    with pytest.raises(ConfigError, match=r"t_b\.weight has shape \(9, 8\)"):
        load_checkpoint(tmp_path / "ckpt", bigger)
    with pytest.raises(ConfigError, match=r"it lacks .*t_d"):
        load_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad", {**ROWS, "d": 5}))
    assert torch.equal(before, bigger.state_dict()["bags.embedding_bags.t_b.weight"])


def test_other_fused_optimizers_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad"))
    with pytest.raises(ConfigError, match="exp_avg"):
        load_checkpoint(tmp_path / "ckpt", make("row_wise", "adam"))
