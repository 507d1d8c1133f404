"""Every pair of plans and numbers of ranks: what was saved under one is loaded under the other, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardrec import load_checkpoint, save_checkpoint
from tests.checkpoint.models import CUTS, Held, adam, held, make, train, whole
from tests.ranks import ranks

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "none")
WORLDS = (1, 2, 4)


def save_all(folder: Path, name: str, cuts: tuple[str, ...]) -> dict[str, Held]:
    found = {}
    for cut in cuts:
        model = make(cut, name)
        optimizer = adam(model)
        train(model, optimizer, 2, seed=1)
        save_checkpoint(folder / cut, model, optimizer)
        found[cut] = held(model, optimizer)
    return found


def load_all(folders: list[Path], name: str, cut: str) -> list[Held]:
    model = make(cut, name)
    optimizer = adam(model)
    found = []
    for number, folder in enumerate(folders):
        # So that nothing is left of the one before; and a fresh optimizer has no states yet.
        train(model, optimizer, min(number, 1), seed=2 + number)
        load_checkpoint(folder, model, optimizer)
        found.append(held(model, optimizer))
    return found


def check_pairs(folder: Path, name: str, saved: dict[int, tuple[str, ...]], loaded: dict[int, tuple[str, ...]]) -> int:
    expected = {}
    for world_size, cuts in saved.items():
        of_ranks = ranks(world_size, save_all, folder / str(world_size), name, cuts)
        expected |= {folder / str(world_size) / cut: whole([one[cut] for one in of_ranks]) for cut in cuts}
    count = 0
    for world_size, cuts in loaded.items():
        for cut in cuts:
            of_ranks = ranks(world_size, load_all, list(expected), name, cut, timeout=300)
            for number, (path, values) in enumerate(expected.items()):
                actual = whole([one[number] for one in of_ranks])
                assert actual.keys() == values.keys()
                for key, value in values.items():
                    assert actual[key].dtype is value.dtype, key
                    assert torch.equal(actual[key], value), (path.name, world_size, cut, key)
                # Also where every rank has a copy.
                for key, place, part in (entry for one in of_ranks for entry in one[number]):
                    assert place is not None or torch.equal(part, values[key]), key
                count += 1
    return count


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("rowwise_adagrad", {2: ("column_wise", "row_wise_uneven"), 1: ("grid",)}, {2: ("data_parallel", "row_wise")}),
        ("adam", {2: ("row_wise", "data_parallel")}, {4: ("grid",), 1: ("table_wise",)}),
        ("none", {4: ("column_wise",)}, {2: ("row_wise", "data_parallel"), 1: ("column_wise",)}),
    ],
    ids=["rowwise_adagrad", "adam", "none"],
)
def test_some_pairs(
    tmp_path: Path, name: str, saved: dict[int, tuple[str, ...]], loaded: dict[int, tuple[str, ...]]
) -> None:
    check_pairs(tmp_path, name, saved, loaded)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_pairs(tmp_path: Path, name: str) -> None:
    every = dict.fromkeys(WORLDS, CUTS)
    assert check_pairs(tmp_path, name, every, every) == (len(CUTS) * len(WORLDS)) ** 2
