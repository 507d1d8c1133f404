"""The operators of an update alone: processor time of one rank's tables, table-wise over two ranks.

``python -m benchmarks.updates.operators``

All ways take turns on the same four batches, so that ratios mean something beside other work, too:

- ``backward``: ``update`` after each of the four, as tables that are updated in backward;
- ``step``: ``update_matrix`` after each. ``accumulate``: once, with the gradients of all four;
- ``sums``: what ``accumulate`` was before: ``sum_gradient`` after each, joined, added up once more, then
  ``update_rows``;
- ``clip``: ``sum_gradient``, the norm and ``update_rows`` with a factor, after each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.workload import parse_tables
from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.group_shards import TableBank, summed
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.row_optimizers import RowOptimizer
from shardrec.memory import keep_large_blocks

BATCHES = 4


def ways(workload: str, size: int, most_rows: int) -> dict[str, Callable[[], None]]:
    """Each way to make the updates of four batches of ``size`` samples a rank."""
    tables = parse_tables([workload], max_rows=most_rows)[::2]
    shapes, slots, cpu = [(table.rows, table.dim) for table in tables], list(range(len(tables))), torch.device("cpu")
    rule = FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.01, eps=1e-8)
    in_backward, bank = TableBank(shapes, slots, rule, cpu), TableBank(shapes, slots, None, cpu)
    optimizer = RowOptimizer(bank.classes, len(shapes), rule)
    for weight in (*in_backward.weights, *bank.weights):
        weight.fill_(0.01)
    maker = BatchMaker(tables, batch_size=2 * size, ids="zipf", seed=0)
    lookups = []
    for number in range(BATCHES):
        batch, columns = maker.draw(0, number), sum(table.dim for table in tables)
        lengths, gradient = batch.lengths().view(len(tables), -1).int(), torch.randn(2 * size, columns)
        lookups.append(LookupGradient(ids=batch.values(), lengths=lengths, id_weights=None, gradient=gradient))
    outputs = [in_backward.look_up(one.ids, one.lengths, None) for one in lookups]

    def backward() -> None:
        for output, lookup in zip(outputs, lookups, strict=True):
            output.backward(lookup.gradient, retain_graph=True)

    def step() -> None:
        for lookup in lookups:
            optimizer.step_from_lookups(bank, [lookup])

    def sums() -> None:
        of_batches = [bank.row_gradients([lookup]) for lookup in lookups]
        by_class = zip(*of_batches, strict=True)
        joined = [(torch.cat([one.rows for one in same]), torch.cat([one.values for one in same])) for same in by_class]
        optimizer.step([summed(*given, cls) for given, cls in zip(joined, bank.classes, strict=True)])

    def clip() -> None:
        for lookup in lookups:
            gradients = bank.row_gradients([lookup])
            factor = 0.5 / sum(gradient.square_sums().sum() for gradient in gradients).sqrt()  # type: ignore[union-attr]
            optimizer.step([gradient.times(factor) for gradient in gradients])

    accumulate = lambda: optimizer.step_from_lookups(bank, lookups)  # noqa: E731
    return {"backward": backward, "step": step, "accumulate": accumulate, "sums": sums, "clip": clip}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", default=["criteo", "multi_hot"])
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 4096], help="samples of a rank")
    parser.add_argument("--rows", type=int, default=100_000, help="most rows of a table")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()
    print("| workload | batch | backward, ms | step | accumulate | sums | clip |\n|---|---:|---:|---:|---:|---:|---:|")
    for workload in options.workload:
        for size in options.batch:
            calls = ways(workload, size, options.rows)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(options.turns + 1):
                for name in list(calls)[:: 1 if turn % 2 else -1]:
                    began = time.process_time()
                    calls[name]()
                    times[name].append(time.process_time() - began)
            base = times.pop("backward")[1:]
            ratios = [median(a / b for a, b in zip(of[1:], base, strict=True)) for of in times.values()]
            cells = [f"{median(base) / BATCHES * 1e3:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
            print(f"| {workload} | {size:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
