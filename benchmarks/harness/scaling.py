"""The predicted time of a step on many ranks, from the planner's prices. benchmarks/scaling/README.md has the model.

The planner prices what plans differ in, the embeddings. To compare numbers of ranks the rest of a step is needed, too:
the dense part, which does not change with the ranks, the all-reduce of its gradient, and what the collectives cost
without bytes, which grows with them. Every rank keeps its batch (weak scaling). The ranks may hold several copies of
the tables (``shardrec.shard(replicas=Replicas(...))``): each copy's ranks exchange among themselves, and the copies are
averaged now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from shardrec.layout import ShardingPlan, Topology
from shardrec.layout.machine import Machine
from shardrec.planner.cost import MEMORY, CostModel, Profile, TableLoad

__all__ = ["DLRM_DCN_V2", "Assumptions", "DensePart", "ScalingPoint", "predict"]

_FLOAT = 4
_ALL_TO_ALLS = 4  # header, payload, output, gradient
_PASSES = 3  # forward, and two products of the same size in backward


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """The dense layers of a click model, by their widths.

    Args:
        layers: (inputs, outputs) of each linear layer that a sample goes through.
    """

    layers: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> float:
        """Of a training step, per sample: two for each weight and pass."""
        return 2.0 * _PASSES * sum(inputs * outputs for inputs, outputs in self.layers)

    @property
    def bytes(self) -> float:
        """Of its gradient."""
        return float(_FLOAT * sum(inputs * outputs + outputs for inputs, outputs in self.layers))


def _dcn_v2() -> DensePart:
    features, dim, rank, crosses = 26, 128, 512, 3
    wide = (features + 1) * dim
    chains = [(13, 512, 256, dim), *[(wide, rank, wide)] * crosses, (wide, 1024, 1024, 512, 256, 1)]
    return DensePart(layers=tuple(pair for chain in chains for pair in pairwise(chain)))


DLRM_DCN_V2 = _dcn_v2()
"""Of MLPerf training's DLRM-DCN v2: 128 columns, three cross layers of rank 512."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the planner's profile does not say. None of it is measured.

    Args:
        dense_flops: that a rank's dense part reaches, per second: an H100's TF32 peak is 495e12, and small products
            reach a third of it.
        peer_us: of an all-to-all, for each other rank it has a message for.
        links: share of the links' peak that a large all-reduce reaches.
        sync_every: steps between two averagings of copies.
    """

    dense_flops: float = 150e12
    peer_us: float = 1.0
    links: float = 0.7
    sync_every: int = 100


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """A predicted step; milliseconds.

    Args:
        ranks: W, in all copies.
        replicas: copies of the tables.
        batch_size: samples of each.
        work: of the embeddings on the slowest rank: ids, rows, pooled columns, updates, and the host's part.
        links: bytes of the embeddings between ranks, on that rank.
        dense: layers forward and backward.
        reduce: all-reduce of their gradient.
        sync: averaging the copies, shared out over the steps between.
        latency: the collectives without bytes.
        gap: how far from the best plan this one is at most, for the planner's cost.
    """

    ranks: int
    replicas: int
    batch_size: int
    work: float
    links: float
    dense: float
    reduce: float
    sync: float
    latency: float
    gap: float

    @property
    def serial(self) -> float:
        """One after the other."""
        return self.work + self.links + self.dense + self.reduce + self.sync + self.latency

    @property
    def overlapped(self) -> float:
        """Everything between ranks behind everything on one, as far as there is enough of it. Latency and sync not."""
        return max(self.work + self.dense, self.links + self.reduce) + self.sync + self.latency

    @property
    def samples_per_second(self) -> float:
        """Of all ranks, with nothing overlapped."""
        return 1e3 * self.ranks * self.batch_size / self.serial


def predict(
    tables: Mapping[str, TableLoad],
    plan: ShardingPlan,
    *,
    batch_size: int,
    machine: Machine,
    replicas: int = 1,
    profile: Profile | None = None,
    dense: DensePart = DLRM_DCN_V2,
    assumptions: Assumptions | None = None,
) -> ScalingPoint:
    """The step of a plan.

    Args:
        tables: of the plan, by name.
        plan: where they are, among the ranks of one copy.
        batch_size: samples per rank.
        replicas: copies.
        machine: per rank. The links of the dense part's all-reduce are its.
        profile: time coefficients, as ``shardrec calibrate`` writes them. Default: from the machine's data sheet.
        dense: the dense part.
        assumptions: the rest.
    """
    from shardrec.planner.price import priced_plan

    assumed = assumptions or Assumptions()
    profile = profile or Profile.of_machine(machine)
    topology = plan.topology
    linkless = replace(profile, exchange_byte_ns=0.0, host_exchange_byte_ns=0.0)
    costs, local = (
        priced_plan(CostModel(profile=one, topology=topology, batch_size=batch_size), tables, plan)[0]
        for one in (profile, linkless)
    )
    slowest = max(range(topology.world_size), key=lambda rank: costs[rank].ms)
    held = max(cost.memory[MEMORY.index("weights")] + cost.memory[MEMORY.index("optimizer")] for cost in costs)
    ranks = replicas * topology.world_size
    return ScalingPoint(
        ranks=ranks,
        replicas=replicas,
        batch_size=batch_size,
        work=local[slowest].ms + (profile.forward_us + profile.backward_us) * 1e-3,
        links=costs[slowest].ms - local[slowest].ms,
        dense=1e3 * dense.flops * batch_size / assumed.dense_flops,
        reduce=_reduce_ms(dense.bytes, ranks, _dense_link(topology, replicas, machine), assumed),
        sync=_reduce_ms(held, replicas, machine.network, assumed) / assumed.sync_every,
        latency=(ranks > 1) * 1e-3 * (_exchange_us(profile, topology, assumed) + profile.exchange_us),
        gap=plan.report.gap if plan.report is not None else 0.0,
    )


def _exchange_us(profile: Profile, topology: Topology, assumed: Assumptions) -> float:
    """Of the all-to-alls among the ranks of a copy."""
    if topology.world_size == 1:
        return 0.0
    return _ALL_TO_ALLS * (profile.exchange_us + assumed.peer_us * (topology.world_size - 1))


def _dense_link(topology: Topology, replicas: int, machine: Machine) -> float:
    """Bytes per second and rank of a ring over all ranks, which between hosts goes over all of a host's adapters."""
    if topology.hosts * replicas == 1:
        return machine.host_link
    return min(machine.host_link, topology.ranks_per_host * machine.network)


def _reduce_ms(size: float, ranks: int, link: float, assumed: Assumptions) -> float:
    """An all-reduce as a ring."""
    return 1e3 * 2 * (ranks - 1) / ranks * size / (assumed.links * link)
