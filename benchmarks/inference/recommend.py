"""Latency of the best items of a catalogue for batches of histories: the model's queries, all scores, the best k.

A SASRec with first values, on one rank. Half of the batches leave out the items of their histories.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

import numpy as np
import torch

import shardrec
from shardrec.trainer.data import Feature, FeatureSpec
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.model import build_model
from shardrec.trainer.run.recommend import Recommender

LONGEST = 50


def recommender(items: int, dim: int) -> Recommender:
    """The items looked up."""
    features = (
        Feature(name="history", kind="sequence", share="item", max_length=LONGEST),
        Feature(name="item", kind="id", ids="number", rows=items + 1),
    )
    spec = FeatureSpec(features=features)
    torch.manual_seed(0)
    config = TrainConfig(model="sasrec", model_args={"dim": dim, "max_length": LONGEST})
    found = Recommender(shardrec.shard(build_model(config, spec.schema_)).eval(), spec, torch.device("cpu"))
    found.catalogue.look_up()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="of each batch size")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, draws = recommender(options.items, options.dim), np.random.default_rng(0)
    results = []
    for size in options.batches:
        times, cpu_times = [], []
        for call in range(options.calls + 3):
            histories = draws.integers(1, options.items + 1, (size, LONGEST)).tolist()
            start, cpu_start = time.perf_counter(), time.process_time()
            model.answer([{"history": history} for history in histories], options.top, exclude_seen=call % 2 == 0)
            times.append(1000 * (time.perf_counter() - start))
            cpu_times.append(1000 * (time.process_time() - cpu_start))
        p50, p99 = np.quantile(times[3:], [0.5, 0.99], method="lower")  # so that no time is made up
        cpu_p50 = np.quantile(cpu_times[3:], 0.5, method="lower")
        results.append({"batch": size, "p50_ms": p50, "p99_ms": p99, "cpu_p50_ms": cpu_p50})
    machine = {"machine": platform.processor() or platform.machine(), "load": os.getloadavg()[0]}
    print(json.dumps({**machine, **vars(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
