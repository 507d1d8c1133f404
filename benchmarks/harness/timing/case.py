"""``Case``: what is timed, and ``Job``: one measurement of it, on one side, in processes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness.workload import WorkloadTable, parse_tables

__all__ = ["Case", "Job", "Kernels", "Mode", "Side", "Transport", "fits"]

Mode = Literal["forward", "train", "dlrm"]
"""``forward``: the sharded embeddings without gradients. ``train``: their forward, backward and fused update, no dense
part. ``dlrm``: a step of a whole DLRM."""

Side = Literal["shardrec", "torchrec", "torch", "kernels"]
"""Who makes the step. ``torch``: ``nn.EmbeddingBag`` for each table, replicated where there are several ranks.
``kernels``: one rank's bare fbgemm calls."""

Transport = Literal["auto", "group"]
"""``shardrec.shard``'s: shared memory between ranks of a host, or the process group (gloo) alone, as between hosts."""

Kernels = Literal["own", "fbgemm"]
"""What shardrec looks rows up and updates them with on the CPU: its own, or fbgemm's, as the other sides."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, and how it is run. All the sides are given the same.

    Args:
        workload: a preset of :data:`benchmarks.harness.workload.PRESETS`, or tables as ``NUMBERxROWSxDIM[xIDS]``.
        layout: how the tables are cut, see :mod:`benchmarks.harness.timing.plans`.
        batch_size: samples per rank.
        mode: of :data:`Mode`.
        ids: ``"uniform"`` or ``"zipf"``.
        optimizer: of the tables, fused into backward.
        malloc: of :data:`~benchmarks.harness.timing.environment.MALLOC`.
        transport: of :data:`Transport`. How shardrec's ranks exchange.
        kernels: of :data:`Kernels`. Shardrec's.
        ranks: number of them.
        max_rows: most rows of a preset's table.
        sides: of :data:`Side`, in the order in which they take turns.
        group: of the summary that it counts for. Default: that of its mode, malloc, transport and kernels.
    """

    workload: str
    layout: str
    batch_size: int
    mode: str = "train"
    ids: str = "uniform"
    optimizer: str = "rowwise_adagrad"
    malloc: str = "default"
    transport: str = "auto"
    kernels: str = "own"
    ranks: int = 2
    max_rows: int = 100_000
    sides: tuple[str, ...] = ("shardrec", "torchrec")
    group: str = ""

    @property
    def tables(self) -> tuple[WorkloadTable, ...]:
        """Of the workload, named t0, t1 and so on."""
        return parse_tables([self.workload], max_rows=self.max_rows)

    @property
    def trains(self) -> bool:
        """Whether a step has a backward."""
        return self.mode != "forward"

    @property
    def turns(self) -> tuple[str, ...]:
        """The sides, and ``dense`` where the floor needs to know what a model's dense part takes alone."""
        return (*self.sides, "dense") if self.mode == "dlrm" else self.sides

    @property
    def key(self) -> str:
        """Tells it from every other case. The sides are not part of it."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _NOT_IN_KEY)
        return "/".join(map(str, values))

    @property
    def surroundings(self) -> list[str]:
        """What is not as it comes: malloc, transport, kernels."""
        found = [f"malloc {self.malloc}"] * (self.malloc != "default")
        found += [self.transport] * (self.transport != "auto")
        return found + [f"{self.kernels} kernels"] * (self.kernels != "own")

    @property
    def input_key(self) -> str:
        """Of cases with the same batches."""
        return f"{self.workload}-{self.max_rows}-{self.batch_size}-{self.ids}-{self.ranks}"

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {**dataclasses.asdict(self), "sides": list(self.sides)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case that :meth:`to_json` gave."""
        return cls(**{**data, "sides": tuple(data["sides"])})


_NOT_IN_KEY = ("sides", "group")

_MAX_REPLICATED_BYTES = 64 * 2**20
"""Of tables whose gradients are averaged as they are, in each step."""


def fits(case: Case, side: str) -> bool:
    """Whether anyone would run a case so: plain torch on one rank, or with small tables. Bare kernels on one rank."""
    size = sum(4 * table.rows * table.dim for table in case.tables)
    match side:
        case "torch":
            alone_or_small = case.ranks == 1 or size <= _MAX_REPLICATED_BYTES
            return case.mode != "dlrm" and case.optimizer in ("sgd", "rowwise_adagrad") and alone_or_small
        case "kernels":
            return case.mode != "dlrm" and case.optimizer != "adam" and case.ranks == 1
    return True


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to know to measure one side of a case.

    Args:
        case: what is timed.
        side: of the case's sides.
        plan: where the tables are, as JSON.
        inputs: folder of the batches, see :mod:`benchmarks.harness.timing.inputs`; "" lets each rank draw its own.
        steps: most steps to time.
        seconds: limit of a turn. Steps are left out, down to three, if they would take longer.
        seed: of everything random.
        threads: per rank.
        device: ``"cpu"`` or ``"cuda"``.
    """

    case: Case
    side: str
    plan: Mapping[str, Any]
    inputs: str
    steps: int = 8
    seconds: float = 3.0
    seed: int = 0
    threads: int = 1
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, **self._nested()}

    def _nested(self) -> dict[str, Any]:
        return {"case": self.case.to_json(), "plan": dict(self.plan)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """The job that :meth:`to_json` gave."""
        return cls(**{**data, "case": Case.from_json(data["case"])})
