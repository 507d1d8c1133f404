"""The sides of a comparison: each makes the same step its own way."""

from __future__ import annotations

from shardrec.bench.timing.case import Job
from shardrec.bench.timing.sides.side import Side
from shardrec.errors import ConfigError
from shardrec.train.ranks import Place

__all__ = ["Side", "make_side"]


def make_side(job: Job, place: Place) -> Side:
    """The job's side, its tables filled with their initial weights.

    Raises:
        ConfigError: for a side that there is not, or that cannot make this case's step.
    """
    match job.side:
        case "shardrec":
            from shardrec.bench.timing.sides.sharded import ShardrecSide

            return ShardrecSide(job, place)
        case "torchrec":
            from shardrec.bench.timing.sides.sharded import TorchRecSide

            return TorchRecSide(job, place)
        case "torch":
            from shardrec.bench.timing.sides.plain import PlainSide

            return PlainSide(job, place)
        case "kernels":
            from shardrec.bench.timing.sides.kernels import KernelsSide

            return KernelsSide(job, place)
        case "dense":
            from shardrec.bench.timing.sides.dense import DenseSide

            return DenseSide(job, place)
    raise ConfigError(f"there is no side {job.side!r}")
