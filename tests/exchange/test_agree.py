"""Ranks that agree, and what all of them are told when some fail."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import CheckpointError, ConfigError, ShardrecError
from shardrec.exchange.agree import (
    all_gather,
    by_rank,
    on_all_ranks,
    on_first_rank,
    on_threads,
    over_ranks,
    ranks_of,
    same_everywhere,
)
from tests.ranks import ranks


@pytest.mark.parametrize(
    ("faults", "kind", "text"),
    [
        ({}, "list", "[0, 1, 2]"),
        ({1: ConfigError("lr is -1")}, "ConfigError", "rank 1: lr is -1"),
        (
            {0: ConfigError("lr is -1"), 2: MemoryError("no")},
            "CheckpointError",
            "2 ranks failed:\n  rank 0: lr is -1\n  rank 2: MemoryError: no",
        ),
        (
            dict.fromkeys(range(3), OSError(28, "No space left on device")),
            "CheckpointError",
            "[Errno 28] No space left on device; delete something",
        ),
    ],
)
def test_all_ranks_are_told_the_same(faults: dict[int, Exception], kind: str, text: str) -> None:
    def agree() -> tuple[str, str]:
        rank = dist.get_rank()

        def work() -> int:
            if rank in faults:
                raise faults[rank]
            return rank

        try:
            everyone = ranks_of(dist.group.WORLD, torch.device("cpu"))
            results = on_all_ranks(work, everyone, "save", remedy="delete something")
        except (CheckpointError, ConfigError) as error:
            return type(error).__name__, str(error)
        return "list", str(results)

    assert ranks(3, agree) == [(kind, text)] * 3


def test_values_of_ranks_are_those_of_all() -> None:
    def agree() -> tuple[object, ...]:
        everyone = ranks_of(dist.group.WORLD, torch.device("cpu"))
        rank = everyone.rank
        return (
            all_gather((rank, "a" * 2000 * rank), everyone, "test") == [(0, ""), (1, "a" * 2000)],
            same_everywhere(f"of rank {rank}", everyone),
            over_ranks(rank + 1, everyone),
            on_threads(lambda: rank + 7, everyone, "test", 0.01).result(),
            all_gather("", ranks_of(None, torch.device("cpu")), "test"),
        )

    assert ranks(2, agree) == [(True, "of rank 0", 3, 7 + rank, [""]) for rank in range(2)]
    assert by_rank(["", "no", "not here"]) == ["rank 1: no", "rank 2: not here"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("lr is -1"), ["ConfigError: lr is -1"] * 2),
        (ValueError("no"), ["ValueError: no", "ShardrecError: ValueError: no"]),
    ],
)
def test_an_error_of_the_first_rank_is_raised_on_all(error: Exception, told: list[str]) -> None:
    def work() -> int:
        raise error

    def agree() -> tuple[int, str]:
        everyone = ranks_of(dist.group.WORLD, torch.device("cpu"))
        rank = on_first_rank(dist.get_rank, everyone, "test")
        with pytest.raises((ShardrecError, ValueError)) as raised:
            on_first_rank(work, everyone, "test")
        return rank, f"{type(raised.value).__name__}: {raised.value}"

    assert ranks(2, agree) == [(0, text) for text in told]
