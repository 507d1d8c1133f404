"""Runs that are broken off and go on: to the bit what they had been, on as many ranks; and on fewer."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from shardrec import Checkpoints
from shardrec.checkpoint.manifest import read_manifest
from shardrec.errors import ConfigError, DataError, ShardrecError
from shardrec.launch.ranks import RankInfo
from shardrec.layout import ShardingPlan
from shardrec.trainer.data import ClickBatch
from shardrec.trainer.run import RunStopped, TrainConfig, load_config
from shardrec.trainer.run.source import Source
from tests.campaign.results import differences
from tests.ranks import raises_on_all, ranks
from tests.trainer.run.broken_off import broken_off

SMALL = TrainConfig(
    samples=3_000,
    epochs=2,
    holdout_samples=1_000,
    max_embeddings=60,
    embedding_dim=4,
    dense_layers=(8,),
    over_layers=(8,),
    embedding_optimizer="adam",
    embedding_lr=0.01,
    batch_size=128,
    evaluations=5,
    checkpoint_every="6",
    threads=1,
)
"""48 steps of 24 an epoch, the last of an epoch with fewer rows."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert broken_off(SMALL.changed(out=str(folder))) == list(range(1, 49))
    return folder


@pytest.mark.some(2, of="to the bit")
@pytest.mark.parametrize("cut", [31, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (3, 6, 23, 24, 48))])
def test_a_run_that_is_broken_off_goes_on_as_if_nothing_had_happened(
    cut: int, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint, at one, at the ends of both epochs, and in the second."""
    config = SMALL.changed(out=str(tmp_path))
    assert broken_off(config, cut_after=cut) == list(range(1, cut + 1))
    assert broken_off(config, resume=True) == list(range(cut // 6 * 6 + 1, 49))
    assert (f"{tmp_path} has no checkpoint to continue from" in capsys.readouterr().out) == (cut < 6)
    assert differences(tmp_path, undisturbed) == []


@pytest.mark.slow
def test_a_run_goes_on_from_an_incremental_checkpoint(tmp_path: Path) -> None:
    config = SMALL.changed(max_embeddings=3_000, checkpoint_incremental=3)
    broken_off(config.changed(checkpoint_incremental=0, out=str(tmp_path / "whole")))
    config = config.changed(out=str(tmp_path / "parts"))
    assert broken_off(config, cut_after=19) == list(range(1, 20))
    for path in Checkpoints(tmp_path / "parts" / "checkpoints").paths().values():
        assert any(part.changes for one in read_manifest(path).tensors.values() for part in one.parts)
    assert broken_off(config, resume=True) == list(range(19, 49))
    # Which tells the options, of which one is another.
    assert differences(tmp_path / "parts", tmp_path / "whole") == ["metrics.json differs"]


def test_sigterm_saves_first(undisturbed: Path, tmp_path: Path) -> None:
    config = SMALL.changed(out=str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStopped) as stopped:
        broken_off(config, told_in=9)
    assert (stopped.value.step, stopped.value.folder) == (9, str(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert broken_off(config, resume=True)[0] == 10
    assert differences(tmp_path, undisturbed) == []


def test_checkpoints_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec.trainer.run import saving

    monkeypatch.setattr(saving, "_AGREE_S", 0.0)  # the ranks look at it after each step
    config = SMALL.changed(samples=640, epochs=1, checkpoint_every="0.000001m", keep_checkpoints=9, out=str(tmp_path))
    assert broken_off(config) == [1, 2, 3, 4, 5]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        f"step-{n:012}" for n in range(1, 6)
    ]
    later = config.changed(checkpoint_every="1000m", out=str(tmp_path / "later"))
    broken_off(later)
    assert [path.name for path in (tmp_path / "later" / "checkpoints").iterdir()] == ["step-000000000005"]


def test_checkpoints_with_each_point(tmp_path: Path) -> None:
    config = SMALL.changed(samples=500, epochs=1, evaluations=2, checkpoint_every="point", out=str(tmp_path))
    assert broken_off(config) == [1, 2, 3, 4]
    assert sorted(Checkpoints(tmp_path / "checkpoints").paths()) == [2, 4]


def test_a_finished_run_that_is_resumed_tells_its_results_again(undisturbed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(undisturbed, tmp_path / "copy")
    (copy / "metrics.json").unlink()
    assert broken_off(SMALL.changed(out=str(copy)), resume=True) == []
    assert differences(copy, undisturbed) == []


@pytest.mark.some(2, of="to the bit")
def test_a_file_of_rows_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its broken rows are counted once."""
    from shardrec.trainer.data import write_criteo_tsv

    file = tmp_path / "rows.tsv"
    write_criteo_tsv(file, 1_000, seed=1)
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[10], lines[900] = "broken", "broken"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = SMALL.changed(data=str(file), samples=None, holdout_samples=None, on_bad_row="skip", batch_size=64)
    whole, later = (config.changed(out=str(tmp_path / name)) for name in ("whole", "later"))
    steps = broken_off(whole)
    broken_off(later, cut_after=20)
    assert broken_off(later, resume=True) == steps[18:]
    assert differences(tmp_path / "later", tmp_path / "whole") == []
    assert json.loads((tmp_path / "later" / "metrics.json").read_text())["skipped_rows"] != {}


def rows_of_steps(config: TrainConfig, **options: object) -> dict[tuple[int, int], list[int]]:
    """Checksums of this rank's rows in each step of a run that may be broken off, by (epoch, step)."""
    import zlib

    from shardrec.trainer.run.source import Source

    rows: dict[tuple[int, int], list[int]] = {}
    original = Source.train_batches

    def train_batches(source: Source, first_step: int = 0, epoch: int = 0, **given: Any) -> Iterator[ClickBatch]:
        for step, batch in enumerate(original(source, first_step, epoch, **given), first_step):
            rows[epoch, step] = [zlib.crc32(row.tobytes()) for row in batch.dense.numpy()]
            yield batch

    Source.train_batches = train_batches  # type: ignore[method-assign]
    try:
        broken_off(config, **options)  # type: ignore[arg-type]
    finally:
        Source.train_batches = original  # type: ignore[method-assign]
    return rows


@pytest.fixture(scope="module")
def made_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row groups of several sizes, one of them empty, and text that cannot be entered in its middle."""
    from shardrec.trainer.data import write_criteo_tsv, write_parquet

    folder = tmp_path_factory.mktemp("rows")
    write_parquet(folder / "a.parquet", 900, seed=1)
    table = pq.read_table(folder / "a.parquet")
    with pq.ParquetWriter(folder / "a.parquet", table.schema) as writer:
        for start, stop in ((0, 100), (100, 100), (100, 150), (150, 600), (600, 900)):
            writer.write_table(table.slice(start, stop - start))
    write_parquet(folder / "b.parquet", 150, seed=2)
    write_criteo_tsv(folder / "c.tsv.gz", 333, seed=3)
    return folder


@pytest.fixture
def rows(made_rows: Path, tmp_path: Path) -> Path:
    """These files, which a test may change."""
    return shutil.copytree(made_rows, tmp_path / "rows")


@pytest.mark.slow
def test_steps_have_the_same_rows_of_files_when_the_number_of_ranks_changes(tmp_path: Path, rows: Path) -> None:
    config = SMALL.changed(
        **{"data": str(rows), "samples": None, "holdout_samples": None, "shuffle": 300},
        **{"global_batch_size": 96, "checkpoint_every": "4", "out": str(tmp_path / "whole")},
    )
    (whole,) = ranks(1, rows_of_steps, config)
    assert len(whole) > 20
    moved = config.changed(out=str(tmp_path / "moved"))
    for world_size, options in ((2, {"cut_after": 5}), (4, {"cut_after": 14, "resume": True}), (1, {"resume": True})):
        every = ranks(world_size, rows_of_steps, moved, **options)
        assert every[0]
        for step in every[0]:
            assert [row for rows in every for row in rows.get(step, [])] == whole[step], step
    assert max(every[0]) == max(whole)


def test_a_run_does_not_go_on_with_other_files(tmp_path: Path, rows: Path) -> None:
    config = SMALL.changed(data=str(rows), samples=None, holdout_samples=None, out=str(tmp_path / "run"))
    broken_off(config, cut_after=7)
    table = pq.read_table(rows / "b.parquet")
    pq.write_table(table.slice(1), rows / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet is not the file with which the run was started \(checksum"):
        broken_off(config, resume=True)


def test_a_broken_row_of_one_rank_ends_all(tmp_path: Path, rows: Path) -> None:
    """Of a model with buffers, which are broadcast before the first header of a step."""

    def message(config: TrainConfig) -> str:
        try:
            broken_off(config)
        except ShardrecError as error:
            return str(error)
        raise AssertionError("the broken row was read")

    lines = gzip.decompress((rows / "c.tsv.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "rows.tsv").write_bytes(b"".join([*lines[:300], b"broken\n", *lines[301:]]))
    config = SMALL.changed(data=str(tmp_path / "rows.tsv"), samples=None, holdout_samples=None, holdout=0.01)
    messages = ranks(2, message, config.changed(batch_size=16, out=str(tmp_path / "run")))
    assert all("rows.tsv:301: the line has 1 of 40 columns" in message for message in messages), messages


def test_files_that_a_version_read_in_another_order_are_not_gone_on_with(rows: Path) -> None:
    config = SMALL.changed(data=str(rows), samples=None, holdout_samples=None, batch_size=64)
    source = Source(config, RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1))
    source.count()
    source.check_resumes(source.digests())
    saved = {
        name: [[path, "1f00d5e7" if digest.endswith("-rows") else digest] for path, digest in files]
        for name, files in source.digests().items()
    }
    with pytest.raises(ConfigError, match=r"data file .*c\.tsv\.gz was read in another order .*\(--init-from\)"):
        source.check_resumes(saved)


def as_plain(folder: Path) -> Path:
    """The results of a run that worked ahead, which differ in that option, as those of one that did not."""
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8"))
    assert metrics["config"].pop("pipeline") > 0
    path.write_text(json.dumps({**metrics, "config": {**metrics["config"], "pipeline": 0}}), encoding="utf-8")
    return folder


@pytest.mark.some(2, of="to the bit")
@pytest.mark.filterwarnings("error:TrainPipeline exchanges no ids")
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_works_ahead_is_the_plain_run_to_the_bit(depth: int, undisturbed: Path, tmp_path: Path) -> None:
    """Broken off with batches under way, and going on."""
    config = SMALL.changed(pipeline=depth, out=str(tmp_path))
    broken_off(config, cut_after=20)
    assert broken_off(config, resume=True) == list(range(19, 49))
    assert differences(as_plain(tmp_path), undisturbed) == []


# ----------------------------------------------------------------------------------------------------------- options


def test_the_options_of_the_run_are_the_defaults_when_it_goes_on(undisturbed: Path) -> None:
    found = load_config(flags={"out": str(undisturbed), "checkpoint_every": "2m"}, resume=True)
    expected = SMALL.changed(out=str(undisturbed), global_batch_size=128, checkpoint_every="2m")
    assert found == expected
    assert load_config(flags={"out": str(undisturbed)}) == TrainConfig(out=str(undisturbed))


def test_an_option_that_makes_another_run_is_named_with_both_values(undisturbed: Path) -> None:
    changed = SMALL.changed(out=str(undisturbed), lr=0.1, embedding_dim=8, evaluations=2)
    with pytest.raises(ConfigError) as caught:
        broken_off(changed, resume=True)
    said = str(caught.value)
    assert "embedding_dim (--embedding-dim) is 8 and the run in" in said
    assert "lr (--lr) is 0.1" in said
    assert "was started with 0.005: leave it out" in said
    assert "evaluations" not in said


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec.trainer.run.folder import locked

    monkeypatch.setattr("shardrec.trainer.run.folder._LOCK_S", 0.05)
    with locked(tmp_path, 0.0) as mine, locked(tmp_path, 0.0, "alone", "shared") as other:
        assert (mine, other) == ("alone", None)
        with pytest.raises(ConfigError, match=r"out \(--out\).*another run writes to it"):
            broken_off(SMALL.changed(out=str(tmp_path)))
    assert broken_off(SMALL.changed(out=str(tmp_path), samples=200, epochs=1)) == [1, 2]


# ------------------------------------------------------------------------------------------------------- several ranks


def test_a_rank_with_other_options_is_named(tmp_path: Path) -> None:
    """As of a host that was started with other options: nothing is written."""
    config = SMALL.changed(out=str(tmp_path / "run"))

    def start(config: TrainConfig) -> None:
        other = {"checkpoint_every": "5", "lr": 0.1, "threads": 2, "out": "elsewhere"} if dist.get_rank() else {}
        broken_off(config.changed(**other))

    messages = raises_on_all(
        2, ConfigError, r"lr \(--lr\) is 0.1 on rank 1 and 0.005 on rank 0: give all", start, config
    )
    assert all("checkpoint_every (--checkpoint-every) is '5' on rank 1 and '6'" in message for message in messages)
    assert not any("threads" in message or "elsewhere" in message for message in messages)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_three_ranks_go_on_to_the_bit(tmp_path: Path) -> None:
    """Of three numbers the order of a sum matters, and with it where a gradient lies in a bucket."""
    config = SMALL.changed(batch_size=40, epochs=1)
    whole, broken = (config.changed(out=str(tmp_path / name)) for name in ("whole", "broken"))
    assert ranks(3, broken_off, whole, resume=True)[0] == list(range(1, 26))  # from nothing
    ranks(3, broken_off, broken, cut_after=13)
    assert ranks(3, broken_off, broken, resume=True)[0] == list(range(13, 26))
    assert differences(tmp_path / "broken", tmp_path / "whole") == []


@pytest.mark.slow
def test_ranks_that_work_ahead_make_the_plain_run_to_the_bit(tmp_path: Path) -> None:
    """Told to end with ids under way between the ranks, and going on at another depth."""

    def told_to_end(config: TrainConfig) -> int:
        try:
            broken_off(config, told_in=9, rank=1)
        except RunStopped as stopped:
            return stopped.step
        raise AssertionError("the run was not stopped")

    config = SMALL.changed(batch_size=64, epochs=1, constraint=("t_*=row_wise",))
    whole, ahead = (config.changed(out=str(tmp_path / name)) for name in ("whole", "ahead"))
    steps = ranks(2, broken_off, whole)[0]
    assert ranks(2, told_to_end, ahead.changed(pipeline=2)) == [9, 9]
    assert ranks(2, broken_off, ahead.changed(pipeline=1), resume=True)[0] == steps[9:]
    assert differences(as_plain(tmp_path / "ahead"), tmp_path / "whole") == []


@pytest.mark.some(2, of="to the bit")
@pytest.mark.parametrize(("before", "after"), [pytest.param(3, 2, marks=pytest.mark.slow), (2, 1), (1, 2)])
def test_another_number_of_ranks_makes_the_same_steps(
    before: int, after: int, undisturbed: Path, tmp_path: Path
) -> None:
    """Each row once, in the same global batches; the plan is made anew."""
    config = SMALL.changed(global_batch_size=128, batch_size=7, out=str(tmp_path))
    ranks(before, broken_off, config, cut_after=20)
    assert ShardingPlan.load(tmp_path / "plan.json").world_size == before
    assert ranks(after, broken_off, config, resume=True)[0] == list(range(19, 49))
    assert ShardingPlan.load(tmp_path / "plan.json").world_size == after
    metrics, wanted = (
        json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in (tmp_path, undisturbed)
    )
    assert metrics["training"]["samples"] == wanted["training"]["samples"] == 6_000
    assert metrics["final"]["rows"] == wanted["final"]["rows"]
    assert metrics["final"]["logloss"] == pytest.approx(wanted["final"]["logloss"], abs=2e-3)
    for point, other in zip(metrics["curve"], wanted["curve"], strict=True):
        assert point["logloss"] == pytest.approx(other["logloss"], abs=2e-3)


def test_a_signal_for_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    def stop_one(config: TrainConfig) -> tuple[int, str]:
        try:
            broken_off(config, told_in=4, rank=1)
        except RunStopped as stopped:
            return stopped.step, stopped.folder
        raise AssertionError("the run was not stopped")

    config = SMALL.changed(batch_size=16, out=str(tmp_path), checkpoint_every="1000")
    assert ranks(2, stop_one, config) == [(4, str(tmp_path))] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000004"]
