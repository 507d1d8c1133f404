"""Published versions: applied one after the other, or some at once, they give what a full export gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from shardrec import Publisher, native
from shardrec.checkpoint.manifest import read_manifest
from shardrec.errors import ConfigError
from shardrec.serve import Follower, quantize
from shardrec.serve.published import version_name
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.ids.oracle import kjt, raw_batches
from tests.ranks import ranks
from tests.serve.published import (
    CUTS,
    DYNAMIC_CUTS,
    Held,
    assert_same,
    follower_of,
    held,
    publish_some,
    reveal,
    trainer,
    weights_of,
)


def publish_on_cuda(folder: Path, cut: str, weights: str) -> None:
    """Those that follow on either device have what a full export has, to the last bit."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, step = trainer("plain", cut, "adagrad", "cuda")
    publisher, rng = Publisher(model, folder, weights=weights), Random(rank)
    followers = []
    for device in ("cpu", "cuda"):
        served = quantize(trainer("plain", cut, "sgd", device)[0], weights)
        followers.append((served, Follower(served, served.formats, folder, interval=1.0)))
    for version in range(4):
        step(rng)
        publisher.publish(full=version == 2)
        full = held(quantize(model, weights))
        for served, follower in followers if world_size == 1 else ():  # a follower is one rank
            assert follower.poll()
            found = held(served)
            assert found.keys() == full.keys()
            for name, parts in full.items():
                for (_, values), (_, others) in zip(parts, found[name], strict=True):
                    assert torch.equal(values.cpu(), others.cpu()), (
                        f"{name}, version {version}, {served.context.device}"
                    )


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("cut", "weights"), [("row_wise", "int8"), ("mixed", "int4")])
def test_on_cuda(cut: str, weights: str, world_size: int, tmp_path: Path) -> None:
    cuda_ranks(world_size, publish_on_cuda, tmp_path, cut, weights)


CASES = [("plain", 0, 1), ("plain", 1, 2), ("plain", 2, 4), ("dynamic", 3, 2), ("dynamic", 4, 1)]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "seed", "size"),
    [
        *CASES,
        *(
            pytest.param(kind, seed + 10 * more, size, marks=pytest.mark.slow)
            for more in range(1, 8)
            for kind, seed, size in CASES
        ),
    ],
)
def test_deltas_give_what_a_full_export_gives(tmp_path: Path, kind: str, seed: int, size: int) -> None:
    if kind == "dynamic" and not native.has_operators():
        pytest.skip("the C++ operators were not compiled")
    rng = Random(seed)
    weights = rng.choice(["fp32", "fp16", "int8", "int4"])
    cut = rng.choice([*CUTS, "mixed"] if kind == "plain" else DYNAMIC_CUTS)
    optimizer = rng.choice(["sgd", "adagrad", "rowwise_adagrad", "adam"])
    folder, shown = tmp_path / "published", tmp_path / "shown"
    of_ranks = ranks(size, publish_some, folder, kind, cut, weights, optimizer, seed)
    manifests = [read_manifest(folder, version_name(version)) for version, _ in of_ranks[0]]
    if (kind, seed, size) in CASES:  # by chance, others may keep whole versions alone
        parts = [part for manifest in manifests for tensor in manifest.tensors.values() for part in tensor.parts]
        assert any(part.changes for part in parts)
    served, follower = follower_of(kind, weights, shown, cut, size)
    assert not follower.poll()
    for number, (version, _) in enumerate(of_ranks[0]):
        reveal(folder, version, shown)
        assert follower.poll(), follower.fault
        assert (follower.version, follower.faults) == (version, 0)
        assert_same(served, [versions[number][1] for versions in of_ranks])
        assert not follower.poll()


@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
def test_fallback_rows_need_the_trainers_row_blocks(tmp_path: Path) -> None:
    """Else ids without a row would take the fallback of another block."""
    ranks(2, publish_some, tmp_path, "dynamic", "row_wise", "fp32", "sgd", 3)
    _, follower = follower_of("dynamic", "fp32", tmp_path, "table_wise", 1)
    with pytest.raises(ConfigError, match=r"table 'sparse.users' with dynamic ids are cut at .*on_one_rank"):
        follower.poll()
    served, follower = follower_of("dynamic", "fp32", tmp_path, "row_wise", 2)
    assert follower.poll()
    (batch,) = raw_batches(Random(7), 1, 1, ids=400)
    assert served(kjt(batch[0])).isfinite().all()


def publish_a_few_rows(folder: Path, weights: str) -> list[tuple[int, Held]]:
    """Each version changes a few rows; after some a shard is written whole, and in the end there is a new base."""
    model, _ = trainer("plain", "column_wise", "sgd")
    publisher = Publisher(model, folder, weights, keep_bases=9)
    versions = []
    for number in range(9):
        for values in weights_of(model):
            values[number % len(values)] += 0.5 + number
        publisher.publish(full=number == 7).wait()
        versions.append((publisher.version, held(quantize(model, weights))))
    return versions


@pytest.mark.some(1)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_that_have_not_changed_keep_their_scale(tmp_path: Path, weights: str) -> None:
    """A row of a table that is cut by columns is quantized as a whole, also where a delta or a base has all rows."""
    folder, shown = tmp_path / "published", tmp_path / "shown"
    of_ranks = ranks(2, publish_a_few_rows, folder, weights)
    served, follower = follower_of("plain", weights, shown, "column_wise", 2)
    for number, (version, _) in enumerate(of_ranks[0]):
        reveal(folder, version, shown)
        assert follower.poll(), follower.fault
        assert_same(served, [versions[number][1] for versions in of_ranks])
