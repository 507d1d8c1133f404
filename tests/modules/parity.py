"""Train a collection sharded and unsharded, side by side on every rank, and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.layout import Shard, ShardingPlan
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedModel, shard
from tests.batches import Bags, joined, random_bags
from tests.models import OPTIMIZERS, collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan, topologies_of

__all__ = ["Case", "assert_weights_equal", "check", "local_part", "random_case"]

ATOL = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collection, how it is trained, and where its tables go.

    Args:
        name: for messages.
        configs: the tables.
        plan: where they go.
        optimizers: a key of ``tests.models.OPTIMIZERS`` per table.
        weighted: ids come with weights.
        seed: of the batches and first values.
        meta: the collection to be sharded is built on meta.
    """

    name: str
    configs: Sequence[EmbeddingBagConfig]
    plan: ShardingPlan
    optimizers: Sequence[str]
    weighted: bool
    seed: int
    meta: bool = False

    def __str__(self) -> str:
        tables = [
            f"{config.name} ({config.num_embeddings}, {config.embedding_dim}) {config.pooling.value} of "
            f"{','.join(config.feature_names)}, {optimizer}: {layout.cut} {'; '.join(map(str, layout.shards))}"
            for config, optimizer, layout in zip(self.configs, self.optimizers, self.plan.tables, strict=True)
        ]
        return "\n  ".join([f"{self.name}, weighted={self.weighted}, meta={self.meta}", *tables])


def random_case(seed: int, world_size: int) -> Case:
    """Tables, plan, optimizers, pooling and weights drawn at random."""
    rng = Random(seed)
    weighted = rng.random() < 0.3
    configs = random_configs(rng, weighted=weighted)
    for config in configs:
        config.embedding_dim -= rng.choice([0, 0, 0, 1, 2, 3])  # fbgemm's kernels take multiples of 4 only
    plan = random_plan(rng, table_sizes(configs), rng.choice(topologies_of(world_size)))
    one = rng.choice(sorted(OPTIMIZERS))
    mixed = rng.random() < 0.3
    optimizers = [rng.choice(sorted(OPTIMIZERS)) if mixed else one for _ in configs]
    return Case(
        name=f"random {seed}",
        configs=configs,
        plan=plan,
        optimizers=optimizers,
        weighted=weighted,
        seed=seed,
        meta=rng.random() < 0.3,
    )


def check(case: Case, steps: int = 3) -> None:
    """Train both for some steps; outputs, losses, weights and other ranks' samples must agree.

    Raises:
        AssertionError: naming the case, the step and the largest difference.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(case.seed)
    reference = collection(
        case.configs, weighted=case.weighted, optimizers=case.optimizers, reference=True, seed=case.seed
    )
    unsharded = collection(
        case.configs,
        weighted=case.weighted,
        optimizers=case.optimizers,
        seed=case.seed,
        device="meta" if case.meta else "cpu",
    )
    torch.manual_seed(case.seed)
    model = shard(unsharded, case.plan)
    assert_weights_equal(model.module, reference, f"{case.name}: first values")
    dense = [dense_adam(module) for module in (reference, model)]
    losses = torch.zeros(2)
    for step in range(steps):
        sizes = [0 if rng.random() < 0.2 else rng.randrange(5) for _ in range(world_size)]
        extra = rng.choice([(), ("x",), ("x", "y")])
        keys_differ = rng.random() < 0.5
        batches = [
            random_bags(
                rng if keys_differ else Random(step),
                feature_rows(case.configs),
                size,
                weighted=case.weighted,
                extra=extra,
            )
            for size in sizes
        ]
        dtypes = rng.choice([torch.int32, torch.int64]), rng.choice([torch.int32, torch.int64])
        losses += train_step(case, model, reference, batches, dtypes, f"{case.name}, step {step}")
        for optimizer in dense:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(losses[0], losses[1], atol=ATOL), f"{case.name}: losses {losses.tolist()}"
    assert_weights_equal(model.module, reference, f"{case.name}: weights after {steps} steps")
    assert [name for name, _ in model.named_buffers()] == []
    assert rank == model.context.collectives.rank


def dense_adam(module: nn.Module) -> torch.optim.Optimizer:
    """Adam for the tables without an optimizer in backward (and for one more parameter, as it takes no empty list)."""
    tables = [one for one in module.parameters() if not hasattr(one, "_in_backward_optimizers")]
    return torch.optim.Adam([*tables, nn.Parameter(torch.zeros(1))], lr=0.1)


def train_step(
    case: Case,
    model: ShardedModel,
    reference: nn.Module,
    batches: Sequence[Bags],
    dtypes: tuple[torch.dtype, torch.dtype],
    where: str,
) -> Tensor:
    """One forward and backward of both; returns this rank's loss, sharded and not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [batch.size for batch in batches]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    output = model(batches[rank].kjt(*dtypes))
    values = output.values()
    assert output.keys() == output_names(case.configs), f"{where}: keys {output.keys()}"
    assert values.shape == (sizes[rank], sum(output.length_per_key()))
    gradient = torch.randn(sum(sizes), values.size(1), generator=torch.Generator().manual_seed(case.seed))
    loss = (values * gradient[mine]).sum()
    loss.backward()
    everything = joined(batches)
    if not sum(sizes):
        # Without samples there is no unsharded backward; one of empty bags is the same step.
        bare: dict[str, list[list[int]]] = {key: [[]] for key in everything.keys}
        everything = Bags(keys=everything.keys, size=1, ids=bare, weights=bare if case.weighted else None)
    pooled = reference(everything.kjt())
    assert output.keys() == pooled.keys()
    expected = pooled.values()[: sum(sizes)]
    difference = (values - expected[mine]).abs().max().item() if sizes[rank] else 0.0
    assert torch.allclose(values, expected[mine], atol=ATOL), f"{where}: outputs differ by {difference}: {case}"
    ((expected * gradient).sum() / world_size).backward()
    return torch.stack([loss.detach(), (expected[mine] * gradient[mine]).sum().detach()])


def output_names(configs: Sequence[EmbeddingBagConfig]) -> list[str]:
    """A feature's name; with its table's where several tables look it up."""
    uses = Counter(feature for config in configs for feature in config.feature_names)
    return [
        f"{feature}@{config.name}" if uses[feature] > 1 else feature
        for config in configs
        for feature in config.feature_names
    ]


def local_part(whole: Tensor, place: Shard | None) -> Tensor:
    """A rank's part of a whole table."""
    if place is None:
        return whole
    return whole[place.row_start : place.row_end, place.col_start : place.col_end]


def assert_weights_equal(sharded: nn.Module, reference: nn.Module, where: str) -> None:
    """This rank's shards against the unsharded tables."""
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    for name, table in sharded.tables().items():
        whole = reference.embedding_bags[name].weight.detach()  # type: ignore[index,union-attr]
        for place, parameter in table.locals.items():
            part = local_part(whole, place)
            difference = (parameter.detach() - part).abs().max().item()
            assert torch.allclose(parameter, part, atol=ATOL), f"{where}: {place or name} differs by {difference}"
