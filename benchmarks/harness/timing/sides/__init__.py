"""The sides of a comparison: each makes the same step its own way."""

from __future__ import annotations

from benchmarks.harness.timing.case import Job
from benchmarks.harness.timing.sides.side import Side
from shardrec.errors import ConfigError
from shardrec.launch.ranks import Place

__all__ = ["Side", "make_side"]


def make_side(job: Job, place: Place) -> Side:
    """The job's side, its tables filled with their initial weights.

    Raises:
        ConfigError: for a side that there is not, or that cannot make this case's step.
    """
    match job.side:
        case "shardrec":
            from benchmarks.harness.timing.sides.sharded import ShardrecSide

            return ShardrecSide(job, place)
        case "torchrec":
            from benchmarks.harness.timing.sides.sharded import TorchRecSide

            return TorchRecSide(job, place)
        case "torch":
            from benchmarks.harness.timing.sides.plain import PlainSide

            return PlainSide(job, place)
        case "kernels":
            from benchmarks.harness.timing.sides.kernels import KernelsSide

            return KernelsSide(job, place)
        case "dense":
            from benchmarks.harness.timing.sides.dense import DenseSide

            return DenseSide(job, place)
    raise ConfigError(f"there is no side {job.side!r}")
