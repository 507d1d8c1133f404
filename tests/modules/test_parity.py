"""Sharded training is unsharded training on the joined batch: models, plans and optimizers drawn at random.

The product of all that a table can be asked for is in tests/parity; here the models are small and of every kind.
"""

from __future__ import annotations

import pytest

from tests.modules.parity import check, random_case
from tests.ranks import ranks

CHUNK = 16


def check_seeds(first: int, world_size: int) -> None:
    for seed in range(first, first + CHUNK):
        check(random_case(seed, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_plans(world_size: int) -> None:
    ranks(world_size, check_seeds, 0, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CHUNK, 16 * CHUNK, CHUNK))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_more_random_plans(world_size: int, first: int) -> None:
    ranks(world_size, check_seeds, first, world_size)
