"""Starting a measurement on its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.harness.config import BenchConfig
from shardrec.errors import ConfigError
from shardrec.launch.run import launched_rank, run_on_ranks

if TYPE_CHECKING:
    from benchmarks.harness.report import ByteReport

__all__ = ["bench"]

_RANKS = 2
"""Ranks to start by default."""


def bench(config: BenchConfig, *, debug: bool = False) -> ByteReport | None:
    """Count the bytes that ``config``'s steps send, on ranks of its own or on those that a launcher started.

    Args:
        config: the workload.
        debug: keep the ranks' tracebacks.

    Returns:
        The report. None on a launcher's ranks other than the first.

    Raises:
        ShardrecError: what went wrong, on whichever rank.
        KeyboardInterrupt: the run was stopped.
    """
    launched = launched_rank()
    nproc = config.nproc or (_RANKS if launched is None else 1)
    ranks = nproc if launched is None else launched[1]
    if ranks % config.hosts:
        raise ConfigError(
            f"hosts (--hosts) is {config.hosts} and there are {ranks} ranks: give a number of hosts that divides them"
        )
    if config.plan is not None:
        # Read again on the ranks. A fault is told before they are started.
        from benchmarks.harness.layouts import given_plan

        given_plan(config.plan, config.workload_tables(), ranks)
    report: ByteReport | None = run_on_ranks(_count_bytes, config.to_mapping(), nproc=nproc, debug=debug)
    return report


def _count_bytes(options: dict[str, Any]) -> ByteReport | None:
    from benchmarks.harness.bytes import count_bytes

    return count_bytes(BenchConfig(**options))
