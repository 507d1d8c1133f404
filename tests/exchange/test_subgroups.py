"""New groups of some ranks: members in different numbers of groups meet, and again after a group is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.exchange import peers
from shardrec.exchange.subgroups import subgroup
from tests.ranks import ranks

CPU = torch.device("cpu")


def sums(group: dist.ProcessGroup) -> float:
    """The sum of the members' ranks."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=group)
    return float(value)


def test_members_that_are_in_other_groups() -> None:
    def run() -> list[float]:
        rank = dist.get_rank()
        of_torch = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        whole = dist.group.WORLD
        assert whole is not None
        of_these = partial(subgroup, whole, device=CPU, what="test")
        found = [sums(of_these([1, 2]))] if rank else []
        found += [sums(of_these([0, 2]))] if rank != 1 else []
        for _ in range(2):
            pair = of_these([0, 1]) if rank != 2 else None
            found += [sums(pair)] if pair is not None else []
            if pair is not None:
                dist.destroy_process_group(pair)
        within = [subgroup(of_torch[1], [0, 1], CPU, what="test")] if rank else []
        return [*found, *map(sums, (of_these(range(3)), *within))]

    assert ranks(3, run) == [[2.0, 1.0, 1.0, 3.0], [3.0, 1.0, 1.0, 3.0, 3.0], [3.0, 2.0, 3.0, 3.0]]


def test_a_group_is_as_the_one_around_it() -> None:
    def run() -> None:
        whole = dist.new_group(timeout=timedelta(seconds=1))
        group = subgroup(whole, [0, 1], CPU, what="test")
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=1)
        assert dist.get_backend(group) == dist.get_backend(whole) == "gloo"
        if dist.get_rank() == 0:
            late = pytest.raises(PeerError, match=r"waited .* for rank 1 .*to take part in the test")
            with late, mock.patch.object(peers, "_LOOK_S", 0.2):
                subgroup(whole, [0, 1], CPU, what="test")
        dist.barrier()

    ranks(2, run)


def test_a_group_that_another_thread_makes_has_torch_s_name() -> None:
    """It is made while this thread is in ``new_group``, whose name it must not take."""

    def run() -> None:
        new_group, names = dist.new_group, []

        def new_groups(*args: Any, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                names.append(pool.submit(new_group, [0], use_local_synchronization=True).result().group_name)
            return new_group(*args, **kwargs)

        whole = dist.group.WORLD
        assert whole is not None
        with mock.patch.object(dist, "new_group", new_groups):
            names.append(subgroup(whole, [0], CPU, what="test").group_name)
        assert len(set(names)) == 2
        assert dist.new_group([0], use_local_synchronization=True).group_name not in names

    ranks(1, run)
