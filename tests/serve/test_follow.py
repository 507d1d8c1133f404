"""A model that follows: damaged, missing and reordered versions, publishers that are killed, calls meanwhile, URLs."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import CheckpointError, ConfigError, Publisher, shard
from shardrec.checkpoint.data_files import _Writer
from shardrec.serve import Follower, ServedModel, quantize
from shardrec.serve.published import version_name, versions_in
from tests.serve.ticks import ROWS, models, rows_at, set_tick


def state_of(served: ServedModel) -> int:
    """The tick of the model, all of which must be of the same one."""
    rows = torch.arange(ROWS)
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.cat([rows, rows]), lengths=torch.ones(2 * ROWS).int())
    tick, *tables = served(features)
    for table in tables:
        assert torch.equal(table, rows_at(int(tick))), f"half of {int(tick)}"
    return int(tick)


def flip(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_off(rng: Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(rng: Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def remove(rng: Random, path: Path) -> None:
    path.unlink()


def exchange(rng: Random, path: Path) -> None:
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    other = rng.choice(others or [path])
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def zeros(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    path.write_bytes(data)


DAMAGE: list[Callable[[Random, Path], None]] = [flip, cut_off, lengthen, remove, exchange, zeros]


@pytest.mark.parametrize("cases", [range(60), pytest.param(range(60, 1060), marks=pytest.mark.slow)])
def test_damage_is_never_applied(tmp_path: Path, cases: range) -> None:
    model, publisher, served = models(tmp_path / "good", keep_bases=9)
    for tick in range(1, 9):
        set_tick(model, tick)
        publisher.publish(full=tick == 5)
    good = {path: path.read_bytes() for path in sorted((tmp_path / "good").rglob("*")) if path.is_file()}
    folder = tmp_path / "damaged"
    shutil.copytree(tmp_path / "good", folder)
    applied = refused = 0
    for case in cases:
        rng = Random(case)
        first = rng.randrange(1, 9)
        for path, data in good.items():
            (folder / path.relative_to(tmp_path / "good")).write_bytes(data)
        for version in range(first + 1, 9):
            (folder / version_name(version)).unlink()
        follower = Follower(served, served.formats, folder, interval=1.0)
        assert follower.poll()
        assert (state_of(served), follower.version, follower.faults) == (first, first, 0)
        last = rng.randrange(first, 9)
        for version in rng.sample(range(first + 1, last + 1), rng.randrange(last - first + 1)):  # some in any order
            shutil.copy(tmp_path / "good" / version_name(version), folder)
        for _ in range(rng.randrange(1, 6)):
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            rng.choice(DAMAGE)(rng, rng.choice(files))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            follower.poll()
        there = max(versions_in(os.listdir(folder)), default=0)
        assert state_of(served) == follower.version >= first, case
        if follower.version < there or 0 < there < first:
            assert (follower.faults, len(said)) == (1, 1), case
            assert str(folder) in follower.fault
            refused += 1
        applied += follower.version > first
    assert min(applied, refused) > len(cases) // 20, (applied, refused)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the publisher runs any more."""


@pytest.fixture
def strikes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each operation on files counts ``[0]`` down, and the one that comes to 0 and all later ones are not made."""
    left = [10**9]

    def dying(name: str, owner: Any) -> None:
        operation = getattr(owner, name) if name != "fsync" else lambda _: None  # of a process, not a machine

        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return operation(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for name in ("mkdir", "open", "replace", "unlink"):
        dying(name, Path)
    dying("fsync", os)
    dying("rmtree", shutil)
    dying("write", _Writer)
    yield left


@pytest.mark.some(1)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_publisher_that_is_killed_anywhere(first: int, tmp_path: Path, strikes: list[int]) -> None:
    """At every third operation on files, of bases and deltas: followers see the version before or the one after."""
    model, _, served = models(tmp_path / "none")
    follower = Follower(served, served.formats, tmp_path / "published", interval=1.0)
    tick = survived = 0
    for strike in range(first, 130, 3):
        strikes[0] = strike
        publisher = Publisher(model, tmp_path / "published", "int8", keep_bases=1)  # of a trainer started again
        try:
            for full in (False, False, True):
                tick += 1
                set_tick(model, tick)
                publisher.publish(full=full)
            survived += 1
        except Killed:
            pass
        strikes[0] = 10**9
        before = state_of(served)
        follower.poll()
        assert state_of(served) in (tick, tick - 1) or state_of(served) == before, strike
        assert follower.fault == ""
        assert follower.version == max(versions_in([path.name for path in tmp_path.glob("*/*.json")]), default=0)
    assert 0 < survived < 30
    assert len([path for path in (tmp_path / "published").iterdir() if path.is_dir()]) <= 3


def test_calls_see_whole_versions(tmp_path: Path) -> None:
    """Threads that call the model, one at a time, while versions come: what a call sees is of one version."""
    model, publisher, served = models(tmp_path)
    with pytest.raises(ConfigError, match="follows already"):
        follower = served.follow(tmp_path, interval=0.001)
        served.follow(tmp_path)
    assert (follower.version, follower.age) == (0, float("inf"))
    done, turn, seen = threading.Event(), threading.Lock(), []

    def call() -> None:
        while not done.is_set():
            with turn, served.reading():
                ticks = state_of(served), state_of(served)
            version, _ = follower.seen()
            assert ticks == (version, version)
            seen.append(version)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for tick in range(1, 12):
        set_tick(model, tick)
        publisher.publish()
        while follower.version < tick:
            done.wait(0.001)  # otherwise this thread, too, keeps the follower waiting for the interpreter
            assert all(thread.is_alive() for thread in threads)
    done.set()
    for thread in threads:
        thread.join()
    follower.close()
    assert (follower.faults, state_of(served)) == (0, 11)
    assert set(seen) <= set(range(12))
    assert follower.age < 1000
    set_tick(model, 12)
    publisher.publish()
    assert follower.version == 11


def test_versions_at_a_url(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/published"
    model, publisher, served = models(url, keep_bases=1, most_deltas=2)
    follower = Follower(served, served.formats, url, interval=1.0)
    assert not follower.poll()
    for tick in range(1, 8):
        set_tick(model, tick)
        publisher.publish(extra={"tick": tick})
        if tick % 2:
            assert follower.poll()
            assert (state_of(served), follower.version, follower.extra) == (tick, tick, {"tick": tick})
    names = [Path(path).name for path in fsspec.filesystem("memory").ls(f"/{tmp_path.name}/published", detail=False)]
    assert versions_in(names) == [7]  # 1, 4 and 7 are bases
    assert len(names) == 2
    assert not [path for path in follower._store.folder.rglob("*") if path.is_file()]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, publisher, served = models(tmp_path, "fp16")
    publisher.publish()
    with pytest.raises(ConfigError, match=r"table 'bags.t_a' is published as fp16 and served as int8"):
        quantize(model, "int8").follow(tmp_path)
    other = shard(EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="x", num_embeddings=4, embedding_dim=8)]))
    with pytest.raises(ConfigError, match=r"is published as .* and served as nothing"):
        quantize(other, "fp16").follow(tmp_path)
    with pytest.raises(ConfigError, match="takes a model that is trained"):
        Publisher(served, tmp_path)
    with pytest.raises(ConfigError, match="keep_bases=0"):
        Publisher(model, tmp_path, keep_bases=0)
    with torch.no_grad():
        next(iter(model.module.bags.tables().values())).weight[3] = 1e6
    for _ in range(2):  # the second time it is a base that would have it
        with pytest.raises(ConfigError, match="has a value that fp16 cannot keep"):
            publisher.publish()
    set_tick(model, 3)
    publisher.publish()
    assert versions_in(os.listdir(tmp_path)) == [1, 2]
    follower = served.follow(tmp_path)
    assert (follower.version, state_of(served)) == (2, 3)
    follower.close()


def test_a_failure_is_followed_by_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, publisher, served = models(tmp_path)
    publisher.publish()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    set_tick(model, 1)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr("shardrec.serve.publisher.write_manifest", full)
        publisher.publish()
    pending = publisher.publish(wait=False)
    set_tick(model, 2)
    pending.wait()
    assert len({path.name for path in tmp_path.glob("data-*")}) == 2
    follower = Follower(served, served.formats, tmp_path, interval=1.0)
    assert follower.poll()
    assert (follower.version, state_of(served)) == (2, 1)
    shutil.rmtree(tmp_path)
    with pytest.warns(UserWarning, match=r"has version 1 as its last and the model has 2"):
        Publisher(model, tmp_path, "int8").publish()
        assert not follower.poll()


def test_close_waits_for_a_version_that_is_being_applied(tmp_path: Path) -> None:
    model, publisher, served = models(tmp_path)
    publisher.publish()
    follower = served.follow(tmp_path, interval=0.01)
    set_tick(model, 2)
    with follower.reading():  # for whose end the next version waits
        publisher.publish()
        deadline = time.monotonic() + 60
        while not follower._turnstile.locked():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        closing = threading.Thread(target=follower.close)
        closing.start()
        while not follower.closed:
            time.sleep(0.01)
        assert follower.version == 1
    closing.join()
    assert (follower.version, state_of(served)) == (2, 2)


def test_a_model_follows_again_after_close(tmp_path: Path) -> None:
    _, publisher, served = models(tmp_path)
    publisher.publish()
    first = served.follow(tmp_path, interval=60.0)
    first.close()
    assert first.closed
    second = served.follow(tmp_path, interval=60.0)
    assert second.version == first.version == 1
    second.close()
