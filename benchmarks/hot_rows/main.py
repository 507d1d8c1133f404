"""What hot rows save: bytes and time of a step with them and without, in turns in one run; see README.md."""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.counting import CountingCollectives
from benchmarks.harness.module import unsharded_module
from benchmarks.harness.workload import WorkloadTable
from shardrec.data.zipf import AliasTables, zipf_probabilities
from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.queue import ModelContext
from shardrec.launch.ranks import Place
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedModel

EXCHANGES = ("header", "payload", "output", "gradient")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is looked up.

    Args:
        tables: number of tables, each of one feature.
        rows: of a table.
        dim: columns.
        exponent: of the Zipf distribution of the ids, which are shuffled over the rows.
        pooling: ids of each bag, or of each sample.
        pooled: bags, else a row for each id.
        dedup: of rows for each id.
        batch: samples of a rank.
        hot: hot rows of each table, in turns.
    """

    tables: int
    rows: int
    dim: int
    exponent: float
    pooling: int
    pooled: bool
    dedup: bool
    batch: int
    hot: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of hot rows.

    Args:
        hot: of each table.
        share: of the ids, by the distribution.
        expected: of the payload's ids and, without pooling, of output and gradient, what should be left.
        kib: per exchange, sent by rank 0 in a step.
        ids_kib: of the payload, without lengths.
        reduced_kib: of the tensors that are all-reduced.
        ms: median step.
        against: median over the rounds of its step over the one without hot rows in the same round.
        cpu_against: the same of the processor time of rank 0, which other work of the machine hardly changes.
        apart: the largest difference of an output from that without hot rows, after all the steps.
    """

    hot: int
    share: float
    expected: float
    kib: dict[str, float]
    ids_kib: float
    reduced_kib: float
    ms: float
    against: float
    cpu_against: float
    apart: float


class Scored(nn.Module):
    """A collection, and a dense part that is as small as can be: with hot rows or without, its gradient is all-reduced.

    Args:
        sharded: the collection.
        workload: what is looked up.
    """

    def __init__(self, sharded: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.sharded, self.pooled = sharded, workload.pooled
        self.scale = nn.Parameter(torch.full((), 100.0))

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """What was looked up, and a loss."""
        output = self.sharded(features)
        values = output.values() if self.pooled else torch.cat([one.values() for one in output.values()])
        return values, values.square().mean() * self.scale


class Side:
    """A model with some hot rows.

    Args:
        workload: what is looked up.
        hottest: per table, its rows, those that come most first.
        hot: of these.
    """

    def __init__(self, workload: Workload, hottest: list[list[int]], hot: int) -> None:
        torch.manual_seed(0)
        world = dist.get_world_size()
        tables = [WorkloadTable(rows=workload.rows, dim=workload.dim, name=f"t{t}") for t in range(workload.tables)]
        module = unsharded_module(tables, pooled=workload.pooled, weighted=False, optimizer="rowwise_adagrad")
        layouts = [cuts.row_wise(one.name, one.rows, one.dim, ranks=range(world)) for one in tables]
        plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts))
        if hot:
            plan = plan.with_hot_rows({f"t{t}": rows[:hot] for t, rows in enumerate(hottest)})
        self.counted = CountingCollectives(collectives_of())
        context = ModelContext(self.counted, torch.device("cpu"))
        sharded: Any
        if workload.pooled:
            sharded = ShardedEmbeddingBagCollection(module, plan, context=context)
        else:
            sharded = ShardedEmbeddingCollection(module, plan, context=context, dedup=workload.dedup)
        self.model = ShardedModel(Scored(sharded, workload), plan, context, dist.group.WORLD)
        self.reduced = sum(4 * one.numel() for table in sharded.tables().values() for one in table.copies.values())

    def step(self, features: KeyedJaggedTensor) -> Tensor:
        """Forward and backward; gives the output."""
        values, loss = self.model(features)
        loss.backward()
        found: Tensor = values.detach()
        return found


def batches_of(workload: Workload, hottest: list[list[int]], count: int) -> list[KeyedJaggedTensor]:
    """This rank's batches."""
    rng = np.random.default_rng(1000 + dist.get_rank())
    draw = AliasTables([zipf_probabilities(workload.rows, workload.exponent)])
    size = workload.batch * workload.pooling
    by_rank = [np.array(rows) for rows in hottest]
    made = []
    for _ in range(count):
        ids = [rows[draw.draw(rng.integers(2**32, size=(size, 1), dtype=np.uint32))[:, 0]] for rows in by_rank]
        lengths = torch.full((workload.tables * workload.batch,), workload.pooling, dtype=torch.int32)
        keys = [f"f_t{t}" for t in range(workload.tables)]
        made.append(KeyedJaggedTensor(keys=keys, values=torch.from_numpy(np.concatenate(ids)), lengths=lengths))
    return made


def expected_of(workload: Workload, hot: int) -> tuple[float, float]:
    """By the distribution: the share of the ids in hot rows, and what is left of those that are sent."""
    p = zipf_probabilities(workload.rows, workload.exponent)
    share = float(p[:hot].sum())
    if workload.pooled or not workload.dedup:
        return share, 1 - share
    seen = 1 - (1 - p) ** (workload.batch * workload.pooling)
    return share, float(seen[hot:].sum() / seen.sum())


def measure(place: Place, workload: Workload, steps: int, rounds: int) -> list[Row]:
    """Bytes of some steps, then rounds of a step of each side, in turns."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rng = np.random.default_rng(0)
    hottest = [rng.permutation(workload.rows).tolist() for _ in range(workload.tables)]
    batches = batches_of(workload, hottest, steps)
    sides = {hot: Side(workload, hottest, hot) for hot in workload.hot}
    sent = {}
    for hot, side in sides.items():
        side.step(batches[0])  # which reads the copies from their shards
        side.counted.take()
        for features in batches:
            side.step(features)
        counted = side.counted.take()
        sent[hot] = {name: sum(counted.bytes.get(name, [0])) / steps / 1024 for name in EXCHANGES}
    times: dict[int, list[float]] = {hot: [] for hot in workload.hot}
    cpu: dict[int, list[float]] = {hot: [] for hot in workload.hot}
    apart = dict.fromkeys(workload.hot, 0.0)
    for number in range(rounds + 2):
        features = batches[number % steps]
        outputs = {}
        # The order turns, so that no side is always after the same one.
        for hot in workload.hot[number % len(workload.hot) :] + workload.hot[: number % len(workload.hot)]:
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            outputs[hot] = sides[hot].step(features)
            times[hot].append((time.perf_counter() - begin) * 1e3)
            cpu[hot].append(time.process_time() - used)
        for hot, output in outputs.items():
            apart[hot] = float((output - outputs[workload.hot[0]]).abs().max())
    bags = workload.tables * (workload.batch if workload.pooled else 1) * (dist.get_world_size() - 1)
    first = workload.hot[0]
    return [
        Row(
            hot=hot,
            share=expected_of(workload, hot)[0],
            expected=expected_of(workload, hot)[1],
            kib=sent[hot],
            ids_kib=sent[hot]["payload"] - bags * 4 / 1024,
            reduced_kib=sides[hot].reduced / 1024,
            ms=median(times[hot][2:]),
            against=_ratio(times[hot], times[first]),
            cpu_against=_ratio(cpu[hot], cpu[first]),
            apart=apart[hot],
        )
        for hot in workload.hot
    ]


def _ratio(mine: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(mine[2:], others[2:], strict=True))


def shown(workload: Workload, rows: list[Row]) -> str:
    """Markdown."""
    plain = rows[0]
    kind = "bags" if workload.pooled else f"rows per id, dedup={workload.dedup}"
    lines = [
        f"{kind}, {workload.pooling} id(s), batch {workload.batch}",
        "",
        "| hot rows | their share of the ids | ids sent, KiB | left | by theory | output + gradient, KiB | left "
        "| all-reduce, KiB | step, ms | against none | processor time | outputs apart |",
        "|" + "---:|" * 12,
    ]
    for row in rows:
        both, before = (sum(one.kib[name] for name in EXCHANGES[2:]) for one in (row, plain))
        lines.append(
            f"| {row.hot} | {row.share:.1%} | {row.ids_kib:.0f} | {row.ids_kib / plain.ids_kib:.1%} "
            f"| {row.expected:.1%} | {both:.0f} | {both / before:.1%} | {row.reduced_kib:.0f} | {row.ms:.1f} "
            f"| {row.against:.2f} | {row.cpu_against:.2f} | {row.apart:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=20_000, help="of each table")
    parser.add_argument("--dim", type=int, default=64, help="columns")
    parser.add_argument("--exponent", type=float, default=1.05, help="of Zipf's law")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a rank")
    parser.add_argument("--pooling", type=int, default=1, help="ids of each bag, or sample")
    parser.add_argument("--kind", choices=["bags", "rows", "distinct"], default="bags")
    parser.add_argument(
        "--hot", type=int, nargs="+", default=[0, 64, 1024], help="hot rows; the first is compared with"
    )
    parser.add_argument("--steps", type=int, default=4, help="whose bytes are counted")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each side that are timed, in turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    workload = Workload(
        tables=options.tables,
        rows=options.rows,
        dim=options.dim,
        exponent=options.exponent,
        pooling=options.pooling,
        pooled=options.kind == "bags",
        dedup=options.kind == "distinct",
        batch=options.batch,
        hot=tuple(options.hot),
    )
    rows = on_new_ranks(measure, workload, options.steps, options.rounds, nproc=options.ranks)
    print(json.dumps([asdict(row) for row in rows]) if options.json else shown(workload, rows))


if __name__ == "__main__":
    main()
