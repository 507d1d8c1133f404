"""In how many steps loads are counted, and which parts are bound to hosts."""

from __future__ import annotations

from shardrec.planner.solve.encode import Block, Encoded

__all__ = ["GRID", "host_blocks"]

GRID = 400
"""G, steps of the most load. More steps prove more in the end, and take longer to."""


def host_blocks(encoded: Encoded) -> tuple[int, set[int]]:
    """Ranks of a host, and the kinds of parts that have a piece on each of a host's ranks, on any host."""
    found: dict[tuple[frozenset[int], ...], set[int]] = {}
    for number, kind in enumerate(encoded.blocks):
        hosts = _partition(kind, encoded.ranks)
        if hosts:
            found.setdefault(hosts, set()).add(number)
    if not found:
        return 1, set()
    hosts = max(found, key=lambda hosts: len(found[hosts]))
    return len(hosts[0]), found[hosts]


def _partition(kind: Block, ranks: int) -> tuple[frozenset[int], ...]:
    """The sets of ranks of a kind's places, if these are all the ranks in equal parts; else nothing."""
    if kind.single or len(kind.names) < 2:
        return ()
    hosts = dict.fromkeys(frozenset(place) for place in kind.names)
    if len(hosts) * len(kind.loads) != ranks or len(frozenset().union(*hosts)) != ranks:
        return ()
    return tuple(hosts)
