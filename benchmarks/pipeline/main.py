"""What pipelines gain: ``torchrun --nproc-per-node 2 -m benchmarks.pipeline.main`` (3 processes for the skips)."""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.pipeline.link import Link
from benchmarks.pipeline.stages import bubbles, skips
from benchmarks.pipeline.training import Row, Workload, compare

__all__ = ["main"]


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown, in milliseconds of a step."""
    linked = rows[0].ids_link_ms > 0
    heads = ["", "step", "waits for ids", "for rows", "core busy"]
    heads[4:4] = ["ids on the link", "hidden", "rows on the link", "hidden", "all hidden"] if linked else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.side, f"{row.step_ms:.0f}", f"{row.ids_wait_ms:.1f}", f"{row.rows_wait_ms:.1f}"]
        if linked:
            ids, rows_of = (row.ids_link_ms, row.ids_seen_ms), (row.rows_link_ms, row.rows_seen_ms)
            both = ids[0] + rows_of[0], ids[1] + rows_of[1]
            hidden = [f"{1 - seen / spent:.0%}" for spent, seen in (ids, rows_of, both)]
            cells += [f"{ids[0]:.1f}", hidden[0], f"{rows_of[0]:.1f}", *hidden[1:]]
        lines.append(f"| {' | '.join([*cells, f'{row.busy:.0%}'])} |")
    return lines


def main() -> None:
    """Measure, and print on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 4096], help="samples of a rank")
    parser.add_argument("--dim", type=int, default=32, help="columns per table")
    parser.add_argument("--pooling", type=int, default=4, help="ids of each bag")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each loop; four times as many steps of stages")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of the link between ranks")
    parser.add_argument("--gbit", type=float, default=math.inf, help="its gigabits per second")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    def show(*lines: str) -> None:
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)

    def new_link() -> Link:
        return Link(latency_s=options.latency_ms / 1e3, bytes_per_s=options.gbit * 1.25e8)

    if dist.get_world_size() == 3:
        for name, (ms, sent) in skips(4 * options.rounds).items():
            show(f"skip {name}: {ms:.1f} ms, {sent} bytes through stage 1")
    else:
        if options.latency_ms == 0 and options.gbit == math.inf:
            for count, seen, due in bubbles(4 * options.rounds):
                show(f"{count} micro-batches: idle {seen:.2f}, formula {due:.2f}")
        for batch in options.batch:
            workload = Workload(batch, options.dim, options.pooling)
            show("", f"batch {batch}", "", *table(compare(workload, new_link, options.rounds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
