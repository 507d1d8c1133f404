"""What all ranks are told when a phase of a save or a load fails on some of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import CheckpointError, ConfigError
from shardrec.exchange.agree import on_all_ranks, ranks_of
from tests.ranks import ranks


@pytest.mark.parametrize(
    ("faults", "kind", "text"),
    [
        ({}, "list", "[0, 1, 2]"),
        ({1: ConfigError("lr is -1")}, "ConfigError", "rank 1: lr is -1"),
        (
            {0: ConfigError("lr is -1"), 2: ValueError("no")},
            "CheckpointError",
            "2 ranks failed:\n  rank 0: lr is -1\n  rank 2: ValueError: no",
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
