"""Small models of each kind, their batches, and a compiled copy trained beside an eager one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import torch
import torch._inductor.compile_fx  # for the ranks, too: tests.rank_pool
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.collective_counts import CollectiveOperators

__all__ = [
    "MODELS",
    "TwoTowers",
    "assert_models_equal",
    "assert_trains_alike",
    "batch",
    "breaks",
    "fresh",
    "graphs",
    "make",
    "plan_of",
]

ROWS = {"a": 13, "b": 29, "c": 7}
DIM = 8
DENSE = 4
Optimizer = type[torch.optim.Optimizer]


def _bags(features: dict[str, int]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                pooling=PoolingType.MEAN if name == "c" else PoolingType.SUM,
            )
            for name, rows in features.items()
        ]
    )


class Clicks(nn.Module):
    """Logits of one of torchrec's models."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.model(dense, features).squeeze(1)
        return logits


class Least(nn.Module):
    """One embedding module and two layers: what compiles soonest."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DENSE, 1)
        self.bags = _bags(ROWS)
        self.after = nn.Linear(len(ROWS) * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = (self.before(dense) + self.after(self.bags(features).values())).squeeze(1)
        return logits


class TwoTowers(nn.Module):
    """Two embedding modules, each with dense layers before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DENSE, DIM)
        self.one = _bags({"a": ROWS["a"]})
        self.between = nn.Linear(DIM, DIM)
        self.two = _bags({"b": ROWS["b"], "c": ROWS["c"]})
        self.after = nn.Linear(2 * DIM, DIM)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        hidden = torch.relu(self.before(dense))
        user = self.between(self.one(features).values() * hidden)
        items = self.after(self.two(features).values())
        return (torch.relu(user) * items).sum(dim=1)


class Sequences(nn.Module):
    """Rows of each id, summed in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DENSE, DIM)
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
                for name, rows in ROWS.items()
            ]
        )
        self.after = nn.Linear(DIM, DIM)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        hidden = torch.tanh(self.before(dense))
        rows = self.rows(features)
        scores = hidden.sum(dim=1)
        for name in ROWS:
            scores = scores + torch.tanh(self.after(rows[name].values())).sum() / dense.size(0)
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: Clicks(DLRM(_bags(ROWS), DENSE, [8, DIM], [8, 1])),
    "dcn": lambda: Clicks(DLRM_DCN(_bags(ROWS), DENSE, [8, DIM], [8, 1], 2, 4)),
    "least": Least,
    "towers": TwoTowers,
    "sequences": Sequences,
}


def plan_of(model: nn.Module, world_size: int, *, replicated: bool = True) -> ShardingPlan:
    """Row-wise, column-wise and replicated (or table-wise), a table each."""
    tables = []
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for config in (
                module.embedding_bag_configs()
                if hasattr(module, "embedding_bag_configs")
                else (module.embedding_configs())
            ):
                name, rows, dim = f"{path}.{config.name}", config.num_embeddings, config.embedding_dim
                if config.name == "t_a":
                    tables.append(cuts.row_wise(name, rows, dim, ranks=range(world_size)))
                elif config.name == "t_b":
                    tables.append(cuts.column_wise(name, rows, dim, ranks=range(world_size)))
                elif replicated:
                    tables.append(cuts.data_parallel(name, rows, dim))
                else:
                    tables.append(cuts.table_wise(name, rows, dim, rank=world_size - 1))
    return ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=tuple(tables))


def make(
    name: str, mode: str | None, optimizer: Optimizer | None = torch.optim.Adagrad, **options: Any
) -> ShardedModel:
    """A sharded model, the same for the same arguments."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = MODELS[name]()
    if optimizer is not None:
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
                _apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
    replicated = options.pop("replicated", True)
    sharded = shard(model, plan_of(model, world_size, replicated=replicated), **options)
    if mode is not None:
        shardrec.annotate_for_dynamo(sharded, mode=mode)  # type: ignore[arg-type]
    return sharded


def batch(rng: Random, size: int) -> tuple[Tensor, KeyedJaggedTensor]:
    """Dense columns and 0 to 3 ids per bag."""
    lengths = [rng.randrange(4) for _ in range(len(ROWS) * size)]
    values = [
        rng.randrange(rows)
        for key, rows in enumerate(ROWS.values())
        for count in lengths[key * size : (key + 1) * size]
        for _ in range(count)
    ]
    dense = torch.tensor([[rng.random() for _ in range(DENSE)] for _ in range(size)])
    return dense.view(size, DENSE), KeyedJaggedTensor(
        keys=list(ROWS),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing left after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled since :func:`fresh`."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> int:
    """Graph breaks met since :func:`fresh`."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def assert_models_equal(model: ShardedModel, other: ShardedModel, atol: float = 1e-5) -> None:
    """Parameters and their gradients."""
    for (name, one), (other_name, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(
            whole(one), whole(two), atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (one.grad is None) == (two.grad is None), name


def whole(tensor: Tensor) -> Tensor:
    """The unsharded value of a parameter that FSDP2 may have sharded."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def kept(model: ShardedModel) -> list[Any]:
    """What a traced model keeps for a backward."""
    traced = [vars(one)["_traced"] for one in model._sharded if "_traced" in vars(one)]
    return [call for one in traced for call in one.program._kept]


def assert_trains_alike(
    name: str,
    mode: str,
    optimizer: Optimizer | None = torch.optim.Adagrad,
    *,
    steps: int = 10,
    backend: str = "aot_eager",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    regions: int | None = None,
    exchanges: Mapping[str, int] | None = None,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Compiled and eager: outputs and gradients of each step, and weights after all of them.

    ``dynamic`` compiles for all sizes at once, else for the first size and then for all; ``regions`` are the most that
    either compiles; ``exchanges`` are the all-to-alls of the last step, by operator.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    with fresh():
        model, reference = (
            make(name, mode, optimizer, device=device, **options),
            make(name, None, optimizer, device=device),
        )
        compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, reference)]
        for step in range(steps):
            # The first size is no other size of the model, which a tracer would take for the same.
            size = 2 + (step * 5 + rank) % 7 if step else 5 + rank
            dense, features = batch(Random(100 * step + rank), size)
            dense, features = dense.to(device), features.to(torch.device(device))
            losses = []
            watched = exchanges is not None and step == steps - 1
            for run, opt in zip((compiled, reference), optimizers, strict=True):
                opt.zero_grad()
                if step == 1 and not dist.is_initialized():  # DistributedDataParallel makes another graph of it
                    run(dense, features)  # its backward never comes
                    assert not kept(model), "nothing is left behind"
                with CollectiveOperators() if watched and run is compiled else nullcontext() as called:
                    out = run(dense, features)
                    losses.append(out)
                    out.square().sum().backward()
                if called is not None:
                    assert called.all_to_alls() == exchanges
            torch.testing.assert_close(
                losses[0], losses[1], atol=1e-5, rtol=1e-4, msg=lambda t, s=step: f"step {s}: {t}"
            )
            if step in (0, steps - 1):
                for (key, one), two in zip(model.named_parameters(), reference.parameters(), strict=True):
                    if one.grad is not None and two.grad is not None:
                        torch.testing.assert_close(
                            whole(one.grad),
                            whole(two.grad),
                            atol=1e-5,
                            rtol=1e-4,
                            msg=lambda t, k=key: f"{k}.grad: {t}",
                        )
            for opt in optimizers:
                opt.step()
        assert_models_equal(model, reference)
        assert graphs() > 0, "nothing was compiled"
        if regions is not None:
            assert breaks() == 0 or mode == "boundary"
            assert graphs() <= (1 if dynamic else 2) * regions
