"""Topologies: ranks host by host, and torchrun's description of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.layout import Topology


@given(hosts=st.integers(1, 9), ranks_per_host=st.integers(1, 9))
def test_hosts_share_out_the_ranks_in_order(hosts: int, ranks_per_host: int) -> None:
    topology = Topology(hosts=hosts, ranks_per_host=ranks_per_host)
    ranks = [rank for host in range(hosts) for rank in topology.host_ranks(host)]
    assert ranks == list(range(topology.world_size))
    assert {len(topology.host_ranks(host)) for host in range(hosts)} == {ranks_per_host}


@pytest.mark.parametrize("sizes", [{"hosts": 0}, {"ranks_per_host": 0}, {"hosts": -1, "ranks_per_host": 2}])
def test_needs_a_host_and_a_rank(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least one host and one rank"):
        Topology(**sizes)


@pytest.mark.parametrize("memory", [(1e9,), (1e9, -1.0), (1e9, float("inf")), (1e9, float("nan"))])
def test_the_memory_of_each_rank_is_a_number_of_bytes(memory: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="Give the bytes of each of its 2 ranks"):
        Topology(ranks_per_host=2, rank_memory=memory)


def test_the_memory_of_each_rank_is_kept_with_a_topology() -> None:
    topology = Topology(ranks_per_host=2, rank_memory=(3e9, 1e9))
    assert Topology.from_json(topology.to_json()) == topology
    with pytest.raises(ConfigError, match=r"rank_memory is 'all'\. Give a list of bytes"):
        Topology.from_json({**topology.to_json(), "rank_memory": "all"})


@pytest.mark.parametrize("host", [-1, 2])
def test_unknown_host(host: int) -> None:
    with pytest.raises(ConfigError, match=rf"no host {host}. The topology has hosts 0 to 1"):
        Topology(hosts=2, ranks_per_host=2).host_ranks(host)


@pytest.mark.parametrize(
    ("local", "world_size", "hosts"),
    [(None, 4, 1), ("2", 4, 2), ("4", 4, 1), ("1", 3, 3), ("3", 4, 1), ("8", 4, 1), ("0", 4, 1), ("-2", 4, 1)],
)
def test_of_world(monkeypatch: pytest.MonkeyPatch, local: str | None, world_size: int, hosts: int) -> None:
    """A LOCAL_WORLD_SIZE that cannot be true of the world counts as one host."""
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    topology = Topology.of_world(world_size)
    assert (topology.hosts, topology.world_size) == (hosts, world_size)
