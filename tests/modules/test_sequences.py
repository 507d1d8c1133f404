"""A sharded EmbeddingCollection against the unsharded one: rows, gradients' effect, and weights, under random plans."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from shardrec.errors import InputError, PlanError
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedEmbeddingCollection, shard
from tests.collective_counts import CountCollectives
from tests.ranks import ranks

ROWS = {"t0": 13, "t1": 7, "t2": 29}
FEATURES = {"t0": ["a"], "t1": ["b", "c"], "t2": ["a"]}
KEY_ROWS = {"a": 13, "b": 7, "c": 7}
DIM = 16


class LazyAdam(torch.optim.Optimizer):
    """Adam that leaves rows without a gradient alone, as the fused one does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                rows = p.grad.any(1)
                grad = p.grad[rows]
                state["t"] += 1
                state["m"][rows] = 0.9 * state["m"][rows] + 0.1 * grad
                state["v"][rows] = 0.999 * state["v"][rows] + 0.001 * grad * grad
                first = state["m"][rows] / (1 - 0.9 ** state["t"])
                second = state["v"][rows] / (1 - 0.999 ** state["t"])
                p[rows] -= group["lr"] * first / (second.sqrt() + 1e-8)


OPTIMIZERS: dict[str, tuple[Any, Any, float]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD, 0.5),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, 0.5),
    "rowwise": (torchrec.optim.RowWiseAdagrad, torchrec.optim.RowWiseAdagrad, 0.5),
    "adam": (LazyAdam, torch.optim.Adam, 0.1),
    "none": (None, None, 0.0),
}


def collection(optimizer: Any, lr: float, device: str = "cpu") -> EmbeddingCollection:
    torch.manual_seed(0)
    made = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=FEATURES[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device(device),
        need_indices=True,
    )
    if optimizer is not None:
        _apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": lr})
    return made


class Holder(nn.Module):
    def __init__(self, sequences: EmbeddingCollection) -> None:
        super().__init__()
        self.sequences = sequences

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.sequences(features)


def random_layout(rng: random.Random, name: str, rows: int, world: int, even: bool) -> TableLayout:
    if rng.random() < 0.15:
        return cuts.data_parallel(name, rows, DIM)
    stripes = rng.choice([1, 1, 2, 4]) if even else rng.randrange(1, 4)
    inner = (
        [DIM * i // stripes for i in range(1, stripes)] if even else sorted(rng.sample(range(4, DIM, 4), stripes - 1))
    )
    columns = [0, *inner, DIM]
    shards = []
    for left, right in pairwise(columns):
        edges = [0, *sorted(rng.sample(range(1, rows), rng.randrange(0, 3))), rows]
        for top, bottom in pairwise(edges):
            shards.append(
                Shard(
                    table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rng.randrange(world)
                )
            )
    return TableLayout(name=name, num_embeddings=rows, embedding_dim=DIM, shards=tuple(shards))


def batch(rng: random.Random, keys: list[str], size: int) -> KeyedJaggedTensor:
    lengths, values = [], []
    for key in keys:
        for _ in range(size):
            count = rng.randrange(0, 4)
            lengths.append(count)
            values += [rng.randrange(KEY_ROWS.get(key, 1000)) for _ in range(count)]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def gradient(key: str, ids: torch.Tensor, step: int) -> torch.Tensor:
    """A gradient for each row that depends on key, id and place, and is the same whoever computes it."""
    base = torch.arange(DIM, dtype=torch.float32) * 0.1 + ord(key[0]) % 7 + step
    return torch.sin(base + ids.unsqueeze(1).float() * 1.7 + torch.arange(len(ids)).unsqueeze(1))


def compare(seeds: range, dedup: bool) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        rng = random.Random(seed)
        name = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
        unsharded_class, fused_class, lr = OPTIMIZERS[name]
        reference = collection(unsharded_class, lr)
        layouts = [
            random_layout(rng, f"sequences.{table}", rows, world, name == "rowwise") for table, rows in ROWS.items()
        ]
        plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts))
        source = collection(fused_class, lr, "meta" if seed % 2 and fused_class is None else "cpu")
        torch.manual_seed(0)
        model = shard(Holder(source), plan, dedup=dedup)
        sharded = model.sequences
        assert isinstance(sharded, ShardedEmbeddingCollection)
        for step in range(3):
            keys = ["a", "b", "c", "x"]
            rng.shuffle(keys)
            batches = [batch(rng, keys, rng.randrange(1 if r == 0 else 0, 5)) for r in range(world)]
            output = model(batches[rank])
            loss = torch.zeros(())
            for r, each in enumerate(batches):
                if each.stride() == 0:
                    if r == rank:
                        for value in output.values():
                            assert value.values().shape == (0, DIM)
                            loss = loss + value.values().sum()
                    continue
                expected = reference(each)
                for key, value in expected.items():
                    weight = gradient(key, each[key.split("@")[0]].values(), step)
                    if r == rank:
                        got = output[key]
                        torch.testing.assert_close(got.values(), value.values(), atol=1e-5, rtol=1e-5)
                        assert torch.equal(got.lengths(), value.lengths())
                        assert torch.equal(got.weights(), value.weights())
                        loss = loss + (got.values() * weight).sum()
                assert rank != r or list(output) == list(expected)
            total = sum(
                (value.values() * gradient(key, each[key.split("@")[0]].values(), step)).sum()
                for each in batches
                if each.stride()
                for key, value in reference(each).items()
            )
            loss.backward()
            (total / world).backward()
            finish_dense(reference, sharded, name)
        check_weights(reference, sharded)
    return len(seeds)


def finish_dense(reference: EmbeddingCollection, sharded: ShardedEmbeddingCollection, name: str) -> None:
    if name != "none":
        return
    with torch.no_grad():
        for module in (reference, sharded):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def check_weights(reference: EmbeddingCollection, sharded: ShardedEmbeddingCollection) -> None:
    for name, table in sharded.tables().items():
        whole = reference.embeddings[name].weight
        for place, parameter in table.locals.items():
            part = whole if place is None else whole[place.row_start : place.row_end, place.col_start : place.col_end]
            torch.testing.assert_close(parameter, part, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_and_weights_equal_the_unsharded(world: int, dedup: bool) -> None:
    assert ranks(world, compare, range(25), dedup, timeout=120) == [25] * world


def count_collectives() -> list[dict[str, int]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layouts = [
        cuts.row_wise("sequences.t0", ROWS["t0"], DIM, ranks=range(world)),
        cuts.column_wise("sequences.t1", ROWS["t1"], DIM, ranks=range(world)),
        cuts.table_wise("sequences.t2", ROWS["t2"], DIM, rank=1),
    ]
    plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts))
    model = shard(Holder(collection(torch.optim.Adagrad, 0.1)), plan)
    counts = []
    for step in range(2):
        with CountCollectives() as counted:
            values = model(batch(random.Random(rank * 10 + step), ["a", "b", "c"], rank + step))
            sum(value.values().sum() for value in values.values()).backward()
        counts.append(dict(counted))
    return counts


@pytest.mark.parametrize("world", [2, 4])
def test_three_collectives_forward_and_one_backward(world: int) -> None:
    for per_rank in ranks(world, count_collectives):
        for counts in per_rank:
            assert sum(counts.values()) == 4, counts


def bad_ids() -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = ShardingPlan(
        topology=Topology(ranks_per_host=world),
        tables=tuple(cuts.row_wise(f"sequences.{t}", r, DIM, ranks=range(world)) for t, r in ROWS.items()),
    )
    model = shard(Holder(collection(torch.optim.Adagrad, 0.1)), plan)
    good = batch(random.Random(0), ["a", "b", "c"], 3)
    bad = KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.tensor([1, 7, 2]), lengths=torch.tensor([1, 1, 1]))
    before = {key: value.values().clone() for key, value in model(good).items()}
    try:
        model(bad if rank == 1 else good)
    except InputError as error:
        after = model(good)
        assert all(torch.equal(after[key].values(), value) for key, value in before.items())
        return str(error)
    return ""


def test_a_bad_id_on_one_rank_is_reported_on_all() -> None:
    messages = ranks(2, bad_ids)
    assert messages[0] == messages[1]
    for word in ("rank 1", "'b'", "'sequences.t1'", "id 7", "[0, 7)"):
        assert word in messages[0]


def test_unequal_stripes_under_rowwise_adagrad_are_refused() -> None:
    layouts = [cuts.column_wise("t0", ROWS["t0"], DIM, ranks=[0, 0], widths=[4, 12])]
    layouts += [cuts.table_wise(name, ROWS[name], DIM, rank=0) for name in ("t1", "t2")]
    plan = ShardingPlan(topology=Topology(), tables=tuple(layouts))
    with pytest.raises(PlanError, match=r"'t0' is cut into column stripes of 4, 12 columns"):
        ShardedEmbeddingCollection(collection(torchrec.optim.RowWiseAdagrad, 0.1), plan)


def all_frozen_on_one_rank() -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    source = collection(None, 0.0)
    source.requires_grad_(False)
    layouts = [cuts.table_wise(f"sequences.{name}", rows, DIM, rank=0) for name, rows in ROWS.items()]
    model = shard(Holder(source), ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts)))
    scale = torch.ones((), requires_grad=True)
    for step in range(2):
        values = model(batch(random.Random(rank + step), ["a", "b", "c"], 3))
        (sum(value.values().sum() for value in values.values()) * scale).backward()
    return scale.grad is not None


def test_ranks_agree_on_a_backward_when_one_holds_all_the_tables_and_they_are_frozen() -> None:
    assert ranks(2, all_frozen_on_one_rank, timeout=20) == [True, True]
