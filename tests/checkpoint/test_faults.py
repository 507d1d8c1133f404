"""Saves and loads that fail: on every rank at once, and whatever happens, a whole checkpoint is left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardrec import (
    CheckpointError,
    Checkpoints,
    ConfigError,
    PeerError,
    load_checkpoint,
    save_checkpoint,
    warm_start,
)
from shardrec.checkpoint import data_files as files
from shardrec.checkpoint import manifest, save
from shardrec.modules import ShardedModel
from tests.checkpoint.models import adam, held, make, train
from tests.ranks import ranks


class Killed(BaseException):
    """As a kill: nothing that the code does after an error is done."""


def kill_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Kill at the ``number``-th step that a disk sees; returns how many were made."""
    made = 0

    def step(function: Any) -> Any:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if made == number:
                raise Killed
            made += 1
            return function(*args, **kwargs)

        return stepped

    for owner, name in (
        (files._Writer, "write"),
        (os, "fsync"),
        (os, "open"),
        (Path, "mkdir"),
        (Path, "replace"),
        (Path, "unlink"),
        (save.shutil, "rmtree"),
        (manifest.Manifest, "to_bytes"),
    ):
        patch.setattr(owner, name, step(getattr(owner, name)))
    return lambda: made


def step_of(path: Path, model: ShardedModel) -> int:
    """The step of the checkpoint, which is whole, and whose weights are that step's."""
    step: int = load_checkpoint(path, model)["step"]
    assert model.module.top.bias.unique().tolist() == [step]
    return step


def test_a_kill_at_any_point_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    model, path = make("row_wise", "adagrad"), tmp_path / "run" / "last"

    def save_step(step: int) -> None:
        torch.nn.init.constant_(model.module.top.bias, step)
        save_checkpoint(path, model, extra={"step": step})

    save_step(0)
    found = []
    for number in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            made = kill_at(patch, number)
            try:
                save_step(number + 1)
            except Killed:
                assert made() == number
            else:
                break
        found.append(step_of(path, model) == number + 1)
        save_step(0)
        # And the next save removes what the killed one has left.
        assert len(list(path.iterdir())) == 2
        assert len(list(path.glob("data-*/*"))) == 1
    # First the old ones, and once the new one is there, it stays.
    assert found == sorted(found)
    assert found.count(False) > 10
    assert found.count(True) >= 3


def test_a_kill_leaves_a_series_that_can_go_on(tmp_path: Path) -> None:
    model, checkpoints = make("row_wise", "adagrad"), Checkpoints(tmp_path / "run", keep_last=1)
    checkpoints.save(1, model)
    kills = 0
    for number in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number)
            try:
                checkpoints.save(2 + number, model)
            except Killed:
                kills += 1
            else:
                break
        loaded = checkpoints.load_last(model)
        assert loaded is not None
        assert loaded.step in (1, 2 + number)
        checkpoints.save(1, model)
        (tmp_path / "run" / f"step-{2 + number:012}" / "manifest.json").unlink(missing_ok=True)
    assert kills > 15
    assert len(list((tmp_path / "run").iterdir())) == 1


def raises_everywhere(n: int, kind: type[Exception], match: str, main: Callable[[], None]) -> None:
    """Every rank raises, of itself and in no time, the same error."""

    def rank_main() -> tuple[str, str]:
        try:
            main()
        except (CheckpointError, ConfigError) as error:
            return type(error).__name__, str(error)
        return "", ""

    results = ranks(n, rank_main, timeout=60)
    assert len(set(results)) == 1
    assert results[0][0] == kind.__name__
    assert re.search(match, results[0][1], re.DOTALL), results[0][1]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def main() -> None:
        save_checkpoint(tmp_path / "file" / "ckpt", make("row_wise", "adagrad"))

    raises_everywhere(2, CheckpointError, r"rank 0: .*/file.*File exists; see that every rank can write", main)


@pytest.mark.parametrize("wait", [True, False])
def test_one_rank_cannot_write(tmp_path: Path, wait: bool) -> None:
    def main() -> None:
        model = make("row_wise", "adagrad")
        save_checkpoint(tmp_path / "ckpt", model, extra={"step": 1})
        if dist.get_rank() == 1:

            def full(path: Path, tensors: object) -> None:
                raise OSError(28, "No space left on device", str(path))

            save.write_file = full  # type: ignore[assignment]
        try:
            save_checkpoint(tmp_path / "ckpt", model, extra={"step": 2}, wait=wait).wait()
        finally:
            save.write_file = files.write_file
            assert len(list((tmp_path / "ckpt").iterdir())) == 2
            assert load_checkpoint(tmp_path / "ckpt", model) == {"step": 1}

    raises_everywhere(
        2, CheckpointError, r"rank 1: .*rank-00001.*: No space left on device \(.* free in .*\); see", main
    )


def test_the_error_of_a_save_behind_the_training_reaches_the_next_save(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_file", lambda *args: 1 / 0)
        pending = save_checkpoint(tmp_path / "ckpt", model, wait=False)
        assert pending._future is not None
        futures.wait([pending._future])
        assert pending.done
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path / "ckpt", model)
    save_checkpoint(tmp_path / "ckpt", model)


@pytest.mark.parametrize("extra", [{"rng": torch.zeros(2)}, {"set": {1}}])
def test_extra_that_is_no_json(tmp_path: Path, extra: dict[str, Any]) -> None:
    def main() -> None:
        try:
            save_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad"), extra=extra)
        finally:
            assert not any(tmp_path.rglob("*.safetensors"))

    raises_everywhere(2, ConfigError, "extra, .* cannot be written as JSON .*tensors as rank_state", main)


def test_a_folder_that_only_one_rank_cannot_see(tmp_path: Path) -> None:
    def main() -> None:
        model = make("row_wise", "adagrad")
        save_checkpoint(tmp_path / "ckpt", model)
        load_checkpoint(tmp_path / ("ckpt" if dist.get_rank() == 0 else "elsewhere"), model)

    raises_everywhere(2, CheckpointError, r"rank 1: .*/elsewhere is not a complete checkpoint", main)


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    def main() -> None:
        model = make("row_wise", "adagrad")
        for name in ("0", "1"):
            save_checkpoint(tmp_path / name, model)
        load_checkpoint(tmp_path / str(dist.get_rank()), model)

    def rank_main() -> None:
        with pytest.raises(CheckpointError, match="the ranks see different checkpoints"):
            main()

    ranks(2, rank_main)


@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_choose_other_tensors(tmp_path: Path, warm: bool) -> None:
    """Each would load its own part of another set of tables, or states of the dense part that others lack."""

    def main() -> None:
        model = make("row_wise", "adagrad")
        save_checkpoint(tmp_path / "ckpt", model, optimizer := adam(model))
        if warm:
            warm_start(tmp_path / "ckpt", model, only=["bags.t_a"] if dist.get_rank() else None)
        else:
            load_checkpoint(tmp_path / "ckpt", model, optimizer if dist.get_rank() else None)

    raises_everywhere(2, CheckpointError, "or choose other tensors of it", main)


def test_ranks_of_which_one_waits_for_its_save(tmp_path: Path) -> None:
    def main() -> None:
        save_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad"), wait=dist.get_rank() == 0)

    raises_everywhere(2, ConfigError, "wait is True, False on the ranks", main)


@pytest.mark.parametrize("phase", ["save", "save behind the training", "load"])
def test_a_rank_that_dies_is_named(tmp_path: Path, phase: str) -> None:
    def rank_main() -> None:
        model = make("row_wise", "adagrad")
        save_checkpoint(tmp_path / "ckpt", model)
        if dist.get_rank() == 1:
            files._Writer.write = lambda *_: os._exit(3)  # type: ignore[method-assign]
            files.OpenFile.verify = lambda *_: os._exit(3)  # type: ignore[method-assign]
        try:
            if phase == "load":
                load_checkpoint(tmp_path / "ckpt", model)
            else:
                save_checkpoint(tmp_path / "ckpt", model, wait=phase == "save").wait()
        except PeerError as error:
            named = error.ranks == (1,) and ("load" if phase == "load" else "save") in str(error)
            os._exit(7 if named else 8)

    results = ranks(2, rank_main, expect_death=range(2), timeout=30.0)
    assert [result.code for result in results] == [7, 3]


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3,\) that the model lacks"):
        save_checkpoint(tmp_path / "ckpt", model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    save_checkpoint(tmp_path / "ckpt", model)
    with pytest.raises(ConfigError, match=r"saved without an optimizer\. Load it without one"):
        load_checkpoint(tmp_path / "ckpt", model, adam(model))
    optimizer = adam(model)
    save_checkpoint(tmp_path / "ckpt", model, optimizer)
    less = torch.optim.Adam(list(model.module.top.parameters()), lr=0.1)
    with pytest.raises(ConfigError, match="parameter group 0 and this optimizer's differ in norm"):
        load_checkpoint(tmp_path / "ckpt", model, less)
    before = held(model, optimizer)
    with pytest.raises(ConfigError, match=r"a parameter of shape \(24,\) that the model lacks"):
        load_checkpoint(tmp_path / "ckpt", make("row_wise", "adagrad"), optimizer)
    train(model, optimizer, 1, seed=1)
    load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert not optimizer.state
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before, held(model, optimizer), strict=True))
