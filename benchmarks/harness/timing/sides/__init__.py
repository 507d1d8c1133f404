"""The sides of a comparison: each makes the same step its own way."""

from __future__ import annotations

from benchmarks.harness.timing.case import Job
from benchmarks.harness.timing.sides.side import Side
from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo

__all__ = ["Side", "make_side"]


def make_side(job: Job, rank_info: RankInfo) -> Side:
    """The job's side, its tables filled with their initial weights.

    Raises:
        ConfigError: for a side that there is not, or that cannot make this case's step.
    """
    match job.side:
        case "shardrec":
            from benchmarks.harness.timing.sides.sharded import ShardrecSide

            return ShardrecSide(job, rank_info)
        case "torchrec":
            from benchmarks.harness.timing.sides.sharded import TorchRecSide

            return TorchRecSide(job, rank_info)
        case "torch":
            from benchmarks.harness.timing.sides.plain import PlainSide

            return PlainSide(job, rank_info)
        case "kernels":
            from benchmarks.harness.timing.sides.kernels import KernelsSide

            return KernelsSide(job, rank_info)
        case "dense":
            from benchmarks.harness.timing.sides.dense import DenseSide

            return DenseSide(job, rank_info)
    raise ConfigError(f"there is no side {job.side!r}")
