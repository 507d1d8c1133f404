"""Train LightGCN on Gowalla, its tables sharded over the ranks, and evaluate it; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import shardrec
from examples.gowalla.batches import BatchSampler, Graph
from examples.gowalla.data import Dataset, read_dataset
from examples.gowalla.evaluate import Metrics, evaluate
from examples.gowalla.model import LightGCN, sampled_softmax
from shardrec.layout import ShardingPlan, Topology
from shardrec.rpc import EmbeddingServer, RemoteModel, RpcWorld
from shardrec.rpc.serve import open_store, serve

__all__ = ["Settings", "Trainer", "main"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The recipe; each field is an option of the command line.

    Args:
        epochs: passes over the users.
        users_per_batch: users in a step, per rank.
        num_negatives: random items in a step, per rank, beside the batch's positives.
        dim: columns of each table.
        neighbor_weight: what neighbors weigh in a vector, beside its own embedding.
        lr: learning rate of the fused rowwise Adagrad.
        scale: standard deviation of the tables' first values.
        temperature: divides the cosines in the softmax.
        balance: a user with n items weighs n ** balance in the loss.
        prior: how much of the log of an item's popularity is added to its cosine when items are ranked.
        cut: how the planner has to cut the tables; "any" leaves it the choice.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        servers: hold the tables, as processes of their own; 0 shards them over the ranks that train.
        staleness: updates that a step may leave under way at the servers.
        validate: share of train to hold out and evaluate on in place of test, which is not read then.
        seed: of first values, order and random items.
    """

    epochs: int = 12
    users_per_batch: int = 512
    num_negatives: int = 2048
    dim: int = 128
    neighbor_weight: float = 5.0
    lr: float = 0.1
    scale: float = 0.07
    temperature: float = 0.1
    balance: float = 0.5
    prior: float = 0.035
    cut: str = "row_wise"
    eval_every: int = 4
    servers: int = 0
    staleness: int = 0
    validate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "users_per_batch", "num_negatives", "dim", "eval_every"):
            if getattr(self, name) < 1:
                raise shardrec.ConfigError(f"{_option(name)} is {getattr(self, name)}; give at least 1")
        for name in ("servers", "staleness"):
            if getattr(self, name) < 0:
                raise shardrec.ConfigError(f"--{name} is {getattr(self, name)}; give 0 or more")
        if self.staleness and not self.servers:
            raise shardrec.ConfigError(
                f"--staleness is {self.staleness} without --servers; updates are made at once then"
            )
        if not 0 <= self.validate < 1:
            raise shardrec.ConfigError(f"--validate is {self.validate}; give a share from 0 to below 1, such as 0.1")
        for name in ("neighbor_weight", "lr", "scale", "temperature"):
            if not getattr(self, name) > 0:
                raise shardrec.ConfigError(f"{_option(name)} is {getattr(self, name)}; give a positive number")


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def make_model(dataset: Dataset, settings: Settings) -> LightGCN:
    """The unsharded model with its optimizers, the same in every process."""
    torch.manual_seed(settings.seed)
    model = LightGCN(dataset.train.num_users, dataset.train.num_items, dim=settings.dim, scale=settings.scale)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": settings.lr})
    return model


def make_plan(model: LightGCN, settings: Settings) -> ShardingPlan:
    """Over the servers, or over the ranks of the process group."""
    topology = Topology(ranks_per_host=settings.servers) if settings.servers else None
    constraints = None if settings.cut == "any" else {"*": shardrec.Constraint(cuts=(settings.cut,))}
    return shardrec.plan(
        model, topology, batch_size=settings.users_per_batch + settings.num_negatives, constraints=constraints
    )


class Trainer:
    """A sharded model, its sampler and the loop over both; every rank has one.

    Args:
        dataset: what to learn from.
        settings: the recipe.
        rank: this rank.
        world_size: number of ranks; 1 works without a process group.
        servers: names of the embedding servers that hold the tables.

    Attributes:
        model: the sharded model.
        sampler: of this rank's batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        servers: Sequence[str] | None = None,
    ) -> None:
        self._test = dataset.test
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        model = make_model(dataset, settings)
        plan = make_plan(model, settings)
        remote = None if servers is None else shardrec.Servers(servers, staleness=settings.staleness)
        self.model = shardrec.shard(model, plan, device="cpu", servers=remote)
        self._graph = Graph(dataset.train, neighbor_weight=settings.neighbor_weight)
        self.sampler = BatchSampler(
            self._graph,
            users_per_batch=settings.users_per_batch,
            num_negatives=settings.num_negatives,
            rank=rank,
            world_size=world_size,
            seed=settings.seed,
        )

    def steps(self) -> Iterator[tuple[float, int]]:
        """Train for one epoch; yields the loss and the number of positives of each of this rank's steps."""
        for batch in self.sampler.epoch():
            own, neighbors = self.model(batch.nodes, batch.num_users)
            loss = sampled_softmax(
                own, neighbors, batch, temperature=self._settings.temperature, balance=self._settings.balance
            )
            # The tables' optimizers are fused into this; no parameter is left for a step() after it.
            loss.backward()
            yield loss.item(), len(batch.rows)

    def evaluate(self) -> Metrics:
        """Recall@20 and NDCG@20 of the model as it is."""
        if isinstance(self.model, RemoteModel):
            self.model.flush()
        # A sharded model has the attributes of the model it holds, which a type checker cannot see.
        model = cast(LightGCN, self.model)
        return evaluate(
            model,
            self._graph,
            self._test,
            prior=self._settings.prior,
            rank=self._rank,
            world_size=self._world_size,
        )


def run(trainer: Trainer, settings: Settings, console: Console) -> list[dict[str, float]]:
    """Train and evaluate, telling the console; returns a record per evaluation."""
    records: list[dict[str, float]] = []
    seconds = 0.0
    with _progress(console) as progress:
        task = progress.add_task("", total=settings.epochs * trainer.sampler.steps)
        for epoch in range(1, settings.epochs + 1):
            begin = time.perf_counter()
            losses, samples = 0.0, 0
            for step, (loss, positives) in enumerate(trainer.steps(), 1):
                losses, samples = losses + loss, samples + positives
                rate = samples / (time.perf_counter() - begin)
                text = f"epoch {epoch}  loss {losses / step:.4f}  {rate:,.0f} samples/s/rank"
                progress.update(task, advance=1, description=text)
            seconds += time.perf_counter() - begin
            progress.console.print(text)
            if epoch % settings.eval_every == 0 or epoch == settings.epochs:
                metrics = trainer.evaluate()
                progress.console.print(
                    f"epoch {epoch}  Recall@20 {metrics.recall:.4f}  NDCG@20 {metrics.ndcg:.4f}  "
                    f"{metrics.users} users  trained {seconds:.0f} s"
                )
                record = {"epoch": epoch, "loss": losses / trainer.sampler.steps, "train_seconds": seconds}
                records.append(record | dataclasses.asdict(metrics))
    return records


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _serve(dataset: Dataset, settings: Settings, store: str, trainers: int, rank: int) -> None:
    """One embedding server, until the job ends."""
    torch.set_num_threads(1)
    model = make_model(dataset, settings)
    server = EmbeddingServer(model, make_plan(model, settings), rank)
    names = [f"server{one}" for one in range(settings.servers)]
    serve(server, open_store(store), trainers=trainers, servers=names, name=names[rank])


@contextmanager
def _embedding_servers(
    dataset: Dataset, settings: Settings, rank: int, world_size: int
) -> Iterator[Sequence[str] | None]:
    """Names of the servers, which rank 0 starts and ends; None if there are to be none."""
    if not settings.servers:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        shared: list[str] = [f"file://{folder}/store"]
        if world_size > 1:
            dist.broadcast_object_list(shared)
        start = multiprocessing.get_context("spawn").Process
        servers = [
            start(target=_serve, args=(dataset, settings, shared[0], world_size, one), daemon=True)
            for one in range(settings.servers if rank == 0 else 0)
        ]
        for server in servers:
            server.start()
        world = RpcWorld(open_store(shared[0]), trainers=world_size, servers=settings.servers, name=f"trainer{rank}")
        with world.joined():
            yield world.servers
            if world_size > 1:
                dist.barrier()
            world.end()
        for server in servers:
            server.join()


@contextmanager
def _process_group() -> Iterator[tuple[int, int]]:
    """Rank and world size; joins the group if torchrun started this process."""
    if "WORLD_SIZE" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _parse(arguments: list[str] | None) -> tuple[Path, Path, Settings]:
    parser = argparse.ArgumentParser(prog="examples.gowalla.main", description=__doc__)
    data = os.environ.get("SHARDREC_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data), help="folder that holds gowalla_m1 (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gowalla/metrics.json"), help="metrics (%(default)s)")
    for field in dataclasses.fields(Settings):
        parser.add_argument(_option(field.name), type=type(field.default), default=field.default, help="%(default)s")
    options = vars(parser.parse_args(arguments))
    return options.pop("data"), options.pop("out"), Settings(**options)


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate and write the metrics.

    Args:
        arguments: of the command line; default: this process's.
    """
    begin = time.perf_counter()
    folder, out, settings = _parse(arguments)
    torch.set_num_threads(1)
    with _process_group() as (rank, world_size):
        console = Console(quiet=rank != 0)
        dataset = read_dataset(folder / "gowalla_m1", validate=settings.validate)
        with _embedding_servers(dataset, settings, rank, world_size) as servers:
            trainer = Trainer(dataset, settings, rank=rank, world_size=world_size, servers=servers)
            records = run(trainer, settings, console)
        if rank == 0:
            wall = time.perf_counter() - begin
            report = {
                "settings": dataclasses.asdict(settings),
                "world_size": world_size,
                "wall_seconds": wall,
                "evaluations": records,
            }
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            console.print(f"{wall / 60:.1f} minutes in all; metrics are in {out}")


if __name__ == "__main__":
    main()
