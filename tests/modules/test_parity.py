"""Sharded training is unsharded training: every cut with every optimizer, and 200 random plans, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from tests.models import OPTIMIZERS
from tests.modules.parity import check, cut_case, random_case
from tests.plans import CUTS
from tests.ranks import ranks

PLANS = 200
CHUNK = 50


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("cut", sorted(CUTS))
def test_every_cut_with_every_optimizer(cut: str, world_size: int) -> None:
    def rank_main() -> None:
        for optimizer in OPTIMIZERS:
            check(cut_case(cut, optimizer, world_size))

    ranks(world_size, rank_main)


@pytest.mark.parametrize("first", range(0, PLANS, CHUNK))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_plans(world_size: int, first: int) -> None:
    def rank_main() -> None:
        for seed in range(first, first + CHUNK):
            check(random_case(seed, world_size))

    ranks(world_size, rank_main)
