"""A step of 20 skewed tables under three plans, in turn: shardrec's, round-robin table-wise, and TorchRec's planner's.

    shardrec calibrate profile.json --ranks 2
    python benchmarks/planner/training.py --profile profile.json

All three are carried out by shardrec, in the same processes, so that the plan is all that differs. With ``--ids
skewed`` some ids come much more often than others, in some tables more than in others. Shardrec's planner gets sample
batches that tell it so, other than those that are timed. See README.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median, quantiles

import torch
from plans_in_turn import measure_plans
from rich.console import Console
from rich.table import Table
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.types import Topology as TheirTopology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.presets import detect_machine
from shardrec.planner import Profile, TableLoad, from_torchrec, plan_tables
from shardrec.planner.cost import CostModel
from shardrec.planner.describe import sampled_features, table_loads
from shardrec.planner.price import predicted_ms


def skewed_tables() -> dict[str, TableLoad]:
    """Twenty tables whose work falls off like 1/n: a few large ones with many ids, a long tail of small ones."""
    found = {}
    for number in range(20):
        rows = max(200, 600_000 // (number + 1) ** 2)
        found[f"t{number}"] = TableLoad(
            num_embeddings=rows,
            embedding_dim=(128, 64, 64, 32)[min(3, number // 3)],
            poolings=(float(max(1, 32 // (number + 1))),),
            row_state_bytes=4,
            whole_row_state=True,
        )
    return found


def collection_of(tables: Mapping[str, TableLoad]) -> EmbeddingBagCollection:
    """The tables as a collection, without memory. Rowwise Adagrad updates it in backward."""
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=load.num_embeddings,
                embedding_dim=load.embedding_dim,
                feature_names=[f"{name}.{index}" for index in range(load.features)],
            )
            for name, load in tables.items()
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    return collection


def batches_of(tables: Mapping[str, TableLoad], batch_size: int, count: int, seed: int) -> list[KeyedJaggedTensor]:
    """Batches whose ids follow a power law in each table, with exponents from 0 to 1.4, on rows in no order."""
    rng = Random(1)
    draws = torch.Generator().manual_seed(seed)
    shares = {}
    for number, (name, load) in enumerate(tables.items()):
        weights = torch.arange(1, load.num_embeddings + 1, dtype=torch.float64) ** -rng.uniform(0.0, 1.4)
        order = torch.randperm(load.num_embeddings, generator=torch.Generator().manual_seed(number))
        shares[name] = (weights.cumsum(0) / weights.sum(), order)
    keys = [f"{name}.{index}" for name, load in tables.items() for index in range(load.features)]
    found = []
    for _ in range(count):
        ids, lengths = [], []
        for name, load in tables.items():
            below, order = shares[name]
            for pooling in load.poolings:
                drawn = torch.rand(batch_size * round(pooling), dtype=torch.float64, generator=draws)
                ids.append(order[torch.searchsorted(below, drawn).clamp(max=load.num_embeddings - 1)])
                lengths.append(torch.full((batch_size,), round(pooling), dtype=torch.int32))
        found.append(KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=torch.cat(lengths)))
    return found


def torchrec_plan(tables: Mapping[str, TableLoad], topology: Topology, batch_size: int, device: str) -> ShardingPlan:
    """What TorchRec's planner chooses for the same tables, ranks and batch, as it comes."""
    planner = EmbeddingShardingPlanner(
        topology=TheirTopology(
            world_size=topology.world_size,
            local_world_size=topology.ranks_per_host,
            compute_device=device,
        ),
        batch_size=batch_size,
        constraints={name: ParameterConstraints(pooling_factors=list(load.poolings)) for name, load in tables.items()},
        stats=[],
        debug=False,
    )
    plan = planner.plan(collection_of(tables), [EmbeddingBagCollectionSharder()])
    shapes = {name: (load.num_embeddings, load.embedding_dim) for name, load in tables.items()}
    return from_torchrec(plan, topology, shapes)


def main() -> None:
    """Make the plans, time them in turn, show them, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ids", default="skewed", choices=["even", "skewed"])
    parser.add_argument("--batch-size", type=int, default=2048, help="samples per rank")
    parser.add_argument("--profile", type=Path, help="of shardrec calibrate; default: the machine's preset")
    parser.add_argument("--rounds", type=int, default=20, help="in which the plans take turns")
    parser.add_argument("--steps", type=int, default=5, help="of a plan in a round")
    parser.add_argument("--out", type=Path, default=Path("runs/planner_training.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    machine = detect_machine(options.ranks, device=options.device)
    profile = Profile.of_machine(machine) if options.profile is None else Profile.load(options.profile)
    topology = Topology(ranks_per_host=options.ranks, machine=machine)
    tables, batches = skewed_tables(), []
    if options.ids == "skewed":
        sampled = sampled_features(batches_of(tables, options.batch_size, 4, seed=0))
        tables = table_loads(collection_of(tables), sampled=sampled)
        batches = batches_of(tables, options.batch_size, 4 * options.ranks, seed=1)
    plans = {
        "shardrec": plan_tables(tables, topology, batch_size=options.batch_size, profile=profile),
        "round-robin table-wise": ShardingPlan(
            topology=topology,
            tables=tuple(
                cuts.table_wise(name, load.num_embeddings, load.embedding_dim, rank=number % options.ranks)
                for number, (name, load) in enumerate(tables.items())
            ),
        ),
        "TorchRec": torchrec_plan(tables, topology, options.batch_size, options.device),
    }
    rounds = measure_plans(
        tables,
        list(plans.values()),
        batch_size=options.batch_size,
        batches=batches,
        device=options.device,
        rounds=options.rounds,
        steps=options.steps,
    )
    model = CostModel(profile=profile, topology=topology, batch_size=options.batch_size)
    shown = Table("plan", "cuts", "predicted, ms", "measured, ms", "quartiles", "against shardrec, round by round")
    results = []
    for (name, plan), times in zip(plans.items(), rounds, strict=True):
        kinds: dict[str, int] = {}
        for layout in plan.tables:
            kinds[layout.cut] = kinds.get(layout.cut, 0) + 1
        predicted = predicted_ms(model, tables, plan)
        ratio = median(time / ours for time, ours in zip(times, rounds[0], strict=True))
        low, _, high = quantiles(times, n=4)
        results.append(
            {"plan": name, "cuts": kinds, "predicted_ms": predicted, "measured_ms": times, "against_shardrec": ratio}
        )
        cells = (f"{predicted:.2f}", f"{median(times):.2f}", f"{low:.2f} to {high:.2f}", f"{ratio:.3f}")
        shown.add_row(name, ", ".join(f"{count} {cut}" for cut, count in kinds.items()), *cells)
    Console(width=140).print(shown)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
