"""Sharded training is unsharded training on the joined batch: models, plans and optimizers drawn at random.

The product of all that a table can be asked for is in tests/parity; here the models are small and of every kind.
"""

from __future__ import annotations

from random import Random

import pytest
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.models import OPTIMIZERS, table_sizes
from tests.modules.parity import Case, check, random_case
from tests.plans import CUTS, cut_plan, topologies_of
from tests.ranks import ranks

CHUNK = 16


def check_seeds(first: int, world_size: int) -> None:
    for seed in range(first, first + CHUNK):
        check(random_case(seed, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_plans(world_size: int) -> None:
    ranks(world_size, check_seeds, 0, world_size)


def check_odd_widths(world_size: int) -> None:
    """Each cut with each optimizer, on tables whose rows fbgemm's kernels do not take."""
    optimizers = sorted(OPTIMIZERS)
    configs = [
        EmbeddingBagConfig(name=f"t{dim}", num_embeddings=7, embedding_dim=dim, feature_names=[f"f{dim}", "shared"])
        for dim in (1, 3, 6, 10, 17)
    ]
    for number, cut in enumerate(CUTS):
        check(
            Case(
                name=cut,
                configs=configs,
                plan=cut_plan(cut, Random(number), table_sizes(configs), topologies_of(world_size)[-1]),
                optimizers=[optimizers[(number + table) % len(optimizers)] for table in range(len(configs))],
                weighted=number % 2 == 1,
                seed=number,
            )
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_widths_that_are_no_multiple_of_4_train_as_the_unsharded_tables(world_size: int) -> None:
    ranks(world_size, check_odd_widths, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CHUNK, 16 * CHUNK, CHUNK))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_more_random_plans(world_size: int, first: int) -> None:
    ranks(world_size, check_seeds, first, world_size)
